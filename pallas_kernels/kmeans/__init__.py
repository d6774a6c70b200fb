"""Clustering of every head's keys, each head for itself, and the search for the nearest key that it rests on.

The search has no score for each pair of a query and a key in memory.

Once JAX drops Pallas' Triton backend: for k-means XLA's sums by segment, as Mosaic GPU has no atomic additions to arrays in memory.
The nearest key is Mosaic GPU's on Hopper already; XLA's on older GPUs.
"""

from .api import kmeans as kmeans
from .api import nearest as nearest
from .lloyd import Distance as Distance
from .types import Nearest as Nearest
