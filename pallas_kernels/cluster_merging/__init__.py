"""Chunked Soft Matching: find the most similar keys in every chunk and merge tokens along these edges. Chelsea uses it.

The modules use these words:

- slot: index into the cache, S of them. A sequence's chunks begin at slot `first`, and its next `count` slots contain
  tokens. These slots are live.
- chunk: C adjacent slots. A cache has N = ⌈S / C⌉ chunks. The last ones can be empty.
- even and odd slot: counted from the chunk's start. Pair i of a chunk is its slots 2i and 2i + 1. A chunk has
  A = ⌈C / 2⌉ even slots.
- edge: an even slot and the odd slot whose key is the most similar. The odd slot is the edge's target.

`chunk_similarity` finds the edges and `merge_clusters` merges along chosen ones. `copy_clusters` copies the result into
other arrays. The kernels keep no similarity matrix in memory, and the merged cache has no gaps.

If JAX removes Pallas' Triton backend, Mosaic GPU can compute the similarities on Hopper and later GPUs: a chunk is two
tiles and one matmul. Other GPUs then use XLA. Merging moves rows to computed indices, which Mosaic GPU's copies cannot
do. XLA gathers replace it, or the same kernel through jax_triton.
"""

from .api import chunk_similarity as chunk_similarity
from .api import copy_clusters as copy_clusters
from .api import merge_clusters as merge_clusters
from .reference import RESOLUTION as RESOLUTION
from .types import Clusters as Clusters
