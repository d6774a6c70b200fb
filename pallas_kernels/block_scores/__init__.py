"""Scores of blocks of keys, by the bounds of the keys in each page or by the centroids of clusters.

Once JAX drops Pallas' Triton backend: Mosaic GPU on Hopper and later, whose copy engine brings tiles of bounds or centroids
while others are multiplied; XLA elsewhere. For a page's bounds, kept as tokens come: XLA's scatter of one page per head.
"""

from .api import centroid_scores as centroid_scores
from .api import page_scores as page_scores
from .api import widen_bounds as widen_bounds
