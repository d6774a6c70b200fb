"""XLA reference of `write_rows`: a scatter.

`Op` in `api.py` calls it if the kernel does not support the case. The kernel must match it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def write_rows(
    array: Shaped[Array, "B ..."], rows: Int[Array, " R"], values: Shaped[Array, "R ..."]
) -> Shaped[Array, "B ..."]:
    """Write whole rows; see the public function."""
    # A negative index would count from the end.
    return array.at[jnp.where(rows < 0, array.shape[0], rows)].set(values, mode="drop")
