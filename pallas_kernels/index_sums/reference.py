"""XLA reference of `index_sums`.

`Op` in `api.py` calls it if the kernel does not support the case. The kernel must match it, up to rounding.
"""

import math

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int, Shaped

AT_A_TIME = 2**23
"""Maximum size of each one-hot factor, over all rows and heads."""


def index_sums(index: Int[Array, "B K T"], values: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
    """Sum values by index; see the public function.

    Indices become one-hot rows and columns of a square, and a matmul of both sums the values. A scatter would add in
    arbitrary order. Comparing all pairs would write T² numbers instead of 2 T √T. Values are processed in parts, so
    that the one-hot arrays have at most `AT_A_TIME` numbers.
    """
    values = values.astype(jnp.float32)
    count = index.shape[-1]
    side = math.isqrt(count - 1) + 1
    size = min(count, max(AT_A_TIME // (math.prod(index.shape[:2]) * side), 1))
    parts = -(-count // size)

    def divided(x: Array, nothing: int) -> Shaped[Array, "P B K S"]:
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, parts * size - count)), constant_values=nothing)
        return rearrange(padded, "b k (p s) -> p b k s", p=parts)

    def add(total: Float[Array, "B K R R"], part: tuple[Array, Array]) -> tuple[Float[Array, "B K R R"], None]:
        places, some = part
        row, column = (jax.nn.one_hot(x, side, dtype=some.dtype) for x in (places // side, places % side))
        return total + jnp.einsum("bksr,bksc->bkrc", row * some[..., None], column, precision="highest"), None

    none = jnp.zeros((*index.shape[:2], side, side), values.dtype)
    square, _ = jax.lax.scan(add, none, (divided(index, -1), divided(values, 0)))
    return square.reshape(*index.shape[:2], -1)[..., :count]
