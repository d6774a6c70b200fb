"""The gated delta rule over the tokens of a block, a chunk at a time.

If JAX removes Pallas' Triton backend, XLA's matmuls and a loop over chunks replace the kernels.
"""

from .api import delta_rule as delta_rule
