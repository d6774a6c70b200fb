"""TreeKV's eviction while decoding: of two neighbours the less attended goes, and the scope moves on.

Once JAX drops Pallas' Triton backend: XLA, which takes a pass more over the ranks.
"""

from .api import tree_eviction as tree_eviction
from .types import Ranked as Ranked
