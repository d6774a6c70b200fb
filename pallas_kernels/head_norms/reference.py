"""XLA reference of `head_norms`.

`Op` in `api.py` calls it if the kernel does not support the case. The kernel must match it, up to rounding.
"""

from jaxtyping import Array, Float

from ..projection import Norm


def head_norms(
    q: Float[Array, "*B N H"], k: Float[Array, "*B K H"], q_norm: Norm, k_norm: Norm
) -> tuple[Float[Array, "*B N H"], Float[Array, "*B K H"]]:
    """Norm each head; see the public function."""
    return q_norm(q), k_norm(k)
