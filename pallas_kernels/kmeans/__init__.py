"""k-means clustering of each head's keys, search for the nearest key, and search for near duplicates.

The kernels keep no matrix of scores for all pairs in memory.

If JAX removes Pallas' Triton backend, k-means uses XLA's segment sums, since Mosaic GPU has no atomic additions to
global memory. `nearest` already has a Mosaic GPU kernel on Hopper; older GPUs then use XLA. Near duplicates use XLA
too, for a part of the keys at a time.
"""

from .api import kmeans as kmeans
from .api import nearest as nearest
from .api import newest_duplicate as newest_duplicate
from .lloyd import Distance as Distance
from .types import Nearest as Nearest
