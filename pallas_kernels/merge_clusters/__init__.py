"""Tokens of every chunk merged along edges, and the gaps closed."""

from .api import merge_clusters as merge_clusters
