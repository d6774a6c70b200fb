"""Attention of one new query per row over slots that each head selects from a large cache, and the fetching of such slots
from a cache in the host's memory.

Once JAX drops Pallas' Triton backend: Mosaic GPU on Hopper and later for pages, which its copy engine brings whole;
XLA's gather for single slots and elsewhere. For slots in the host's memory a body in Mosaic GPU, too, which may read them in place as well.
"""

from .api import fetch_slots as fetch_slots
from .api import gather_attention as gather_attention
from .api import reads_host_memory as reads_host_memory
