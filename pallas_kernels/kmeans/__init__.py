"""Clustering of every head's keys, each head for itself; the search for the nearest key that it rests on, and that for near duplicates.

The searches have no score for each pair of keys in memory.

Once JAX drops Pallas' Triton backend: for k-means XLA's sums by segment, as Mosaic GPU has no atomic additions to arrays in memory.
The nearest key is Mosaic GPU's on Hopper already; XLA's on older GPUs. Near duplicates are XLA's, a part of the keys at a time.
"""

from .api import kmeans as kmeans
from .api import nearest as nearest
from .api import newest_duplicate as newest_duplicate
from .lloyd import Distance as Distance
from .types import Nearest as Nearest
