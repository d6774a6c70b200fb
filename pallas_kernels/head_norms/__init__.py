"""RMS norms of query and key heads, in one kernel.

If JAX removes Pallas' Triton backend, XLA replaces the kernel, with a kernel for each norm.
"""

from .api import head_norms as head_norms
