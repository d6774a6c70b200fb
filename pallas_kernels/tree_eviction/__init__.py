"""TreeKV's eviction while decoding: of two neighbours the less attended goes, and the scope moves on."""

from .api import tree_eviction as tree_eviction
from .types import Ranked as Ranked
