"""Attention of one new query a row where a layer's KV heads are divided among caches of different sizes."""

from .api import sharded_decode_attention as sharded_decode_attention
from .types import CacheShard as CacheShard
