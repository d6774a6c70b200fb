"""TreeKV's eviction during decoding: evict the less attended of two neighbours, then advance the scope.

If JAX removes Pallas' Triton backend, XLA replaces the kernel, with one more pass over the ranks.
"""

from .api import tree_eviction as tree_eviction
from .types import Ranked as Ranked
