"""Attention of one new query per row over the slots of a compressed cache.

A layer's KV heads may lie in one cache, be divided among several of different sizes, or have segments of one store; and keys and
values may be in a few bits.

Once JAX drops Pallas' Triton backend: Mosaic GPU on Hopper and later, whose copy engine brings tiles of the cache
while others are multiplied; XLA elsewhere.
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
from .types import PackedSlots as PackedSlots
from .types import Rotation as Rotation
