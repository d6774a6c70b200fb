"""The most similar keys of every chunk, without a score for each pair in memory.

Once JAX drops Pallas' Triton backend: Mosaic GPU on Hopper and later (a chunk is two tiles and one product); XLA
elsewhere.
"""

from .api import chunk_similarity as chunk_similarity
from .reference import RESOLUTION as RESOLUTION
