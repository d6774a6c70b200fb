"""Write whole rows of an array in place. A running batch writes rows back that it has compressed.

If JAX removes Pallas' Triton backend, an XLA scatter replaces the kernel, at about a fifth of its bandwidth.
"""

from .api import write_rows as write_rows
