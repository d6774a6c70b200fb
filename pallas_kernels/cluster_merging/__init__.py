"""Chunked Soft Matching: the most similar keys of every chunk, and tokens merged along such edges.

No score for each pair is in memory, and gaps that merging leaves are closed.

Once JAX drops Pallas' Triton backend: for similarity Mosaic GPU on Hopper and later (a chunk is two tiles and one product), XLA
elsewhere. For merging XLA's gathers, or the same kernel by way of jax_triton; it moves rows to computed places, which Mosaic GPU's
copies do not.
"""

from .api import chunk_similarity as chunk_similarity
from .api import copy_clusters as copy_clusters
from .api import merge_clusters as merge_clusters
from .reference import RESOLUTION as RESOLUTION
from .types import Clusters as Clusters
