"""The most that a query can have as product with any key of a page, from the bounds of the keys in it.

Once JAX drops Pallas' Triton backend: Mosaic GPU on Hopper and later, whose copy engine brings tiles of bounds while
others are multiplied; XLA elsewhere.
"""

from .api import page_scores as page_scores
