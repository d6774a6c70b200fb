"""The MLPs of a mixture of experts, each for the tokens that were routed to it.

If JAX removes Pallas' Triton backend, a Mosaic GPU kernel of grouped matmuls replaces the kernels for many tokens, and
XLA's loop over tiles those for few.
"""

from .api import expert_mlp as expert_mlp
