"""Attention of one new query per sequence over slots that each head selects, and loads of selected slots from host
memory.

If JAX removes Pallas' Triton backend, Mosaic GPU can replace `gather_attention` for pages on Hopper and later GPUs: TMA
copies them whole. Single slots, and other GPUs, then use XLA's gather. `fetch_slots` can be written in Mosaic GPU,
which can also read host memory in place.
"""

from .api import fetch_slots as fetch_slots
from .api import gather_attention as gather_attention
from .api import reads_host_memory as reads_host_memory
