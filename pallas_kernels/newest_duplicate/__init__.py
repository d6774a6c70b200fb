"""R-KV's search for near duplicates: for each key the newest of the others that it is nearly the same as.

Once JAX drops Pallas' Triton backend: XLA, which writes and reads the cosines of all pairs, a part of the keys at a time.
"""

from .api import newest_duplicate as newest_duplicate
