"""A new entry in one slot a head, in several arrays of a cache at once.

Once JAX drops Pallas' Triton backend: XLA's scatters, one kernel an array.
"""

from .api import write_sharded_slots as write_sharded_slots
from .api import write_slots as write_slots
from .api import writes_host_memory as writes_host_memory
from .types import SlotUpdate as SlotUpdate
