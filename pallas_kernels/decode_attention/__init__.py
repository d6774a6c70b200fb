"""Attention of one new query per sequence over the slots of a compressed cache. The cache layers call it at every
decode step.

A layer's KV heads can be in one cache, be divided among several caches of different sizes, or have segments of one
store. Keys and values can be quantised.

If JAX removes Pallas' Triton backend, Mosaic GPU can replace these kernels on Hopper and later GPUs: TMA copies tiles
of the cache while others are multiplied. Other GPUs then use XLA.
"""

from .api import decode_attention as decode_attention
from .api import packed_decode_attention as packed_decode_attention
from .api import sharded_decode_attention as sharded_decode_attention
from .packed import Packed as Packed
from .reference import packed_and_latest as packed_and_latest
from .reference import partial_packed_attention as partial_packed_attention
from .reference import partial_ragged_attention as partial_ragged_attention
from .reference import ragged_attention as ragged_attention
from .types import Attended as Attended
from .types import CacheShard as CacheShard
from .types import Factors as Factors
from .types import PackedSlots as PackedSlots
from .types import Rotation as Rotation
