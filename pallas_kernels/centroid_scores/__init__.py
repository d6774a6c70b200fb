"""Products of queries with the centroids of clusters."""

from .api import centroid_scores as centroid_scores
