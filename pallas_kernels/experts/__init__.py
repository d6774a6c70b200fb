"""A mixture of experts: the choice of each token's experts, and their MLPs.

If JAX removes Pallas' Triton backend, a Mosaic GPU kernel of grouped matmuls replaces the kernels for many tokens, and
XLA's loop over tiles those for few, and XLA's softmax and sort the kernel that chooses experts.
"""

from .api import best_experts as best_experts
from .api import expert_mlp as expert_mlp
