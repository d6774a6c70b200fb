"""Chunked Soft Matching: find the most similar keys in every chunk and merge tokens along these edges. Chelsea uses it.

The kernels keep no similarity matrix in memory, and the merged cache has no gaps.

If JAX removes Pallas' Triton backend, Mosaic GPU can compute the similarities on Hopper and later GPUs: a chunk is two
tiles and one matmul. Other GPUs then use XLA. Merging moves rows to computed indices, which Mosaic GPU's copies cannot
do. XLA gathers replace it, or the same kernel through jax_triton.
"""

from .api import chunk_similarity as chunk_similarity
from .api import copy_clusters as copy_clusters
from .api import merge_clusters as merge_clusters
from .reference import RESOLUTION as RESOLUTION
from .types import Clusters as Clusters
