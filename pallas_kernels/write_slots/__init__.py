"""Write a new token into one slot per head, in all arrays of a cache at once. The cache layers call it at every decode
step.

If JAX removes Pallas' Triton backend, XLA scatters replace the kernel, one per array.
"""

from .api import write_sharded_slots as write_sharded_slots
from .api import write_slots as write_slots
from .api import writes_host_memory as writes_host_memory
from .types import SlotUpdate as SlotUpdate
