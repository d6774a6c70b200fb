"""Attention that each token of a prompt receives from the last queries (`window_scores`) or from all
(`attention_mass`).

Policies that score a prompt's tokens call these, through `kvjax.policies.families.scoring`.

If JAX removes Pallas' Triton backend, Mosaic GPU can replace its kernels on Hopper and later GPUs: TMA copies tiles of
keys while others are multiplied. Other GPUs then use XLA.
"""

from .api import attention_mass as attention_mass
from .api import window_scores as window_scores
