"""Attention of one new query a row where a layer's KV heads are divided among caches of different sizes.

Once JAX drops Pallas' Triton backend: Mosaic GPU on Hopper and later, whose copy engine brings tiles of the cache
while others are multiplied; XLA elsewhere.
"""

from .api import sharded_decode_attention as sharded_decode_attention
from .types import CacheShard as CacheShard
