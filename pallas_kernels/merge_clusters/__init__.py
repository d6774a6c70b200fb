"""Tokens of every chunk merged along edges, and the gaps closed."""

from .api import copy_clusters as copy_clusters
from .api import merge_clusters as merge_clusters
from .types import Clusters as Clusters
