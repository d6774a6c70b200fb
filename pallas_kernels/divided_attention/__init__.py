"""Attention of one new query a row where a layer's KV heads are divided among caches of different sizes."""

from .api import divided_attention as divided_attention
from .types import Held as Held
