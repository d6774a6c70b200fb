"""Products of queries with the centroids of clusters.

Once JAX drops Pallas' Triton backend: Mosaic GPU on Hopper and later, whose copy engine brings tiles of centroids
while others are multiplied; XLA elsewhere.
"""

from .api import centroid_scores as centroid_scores
