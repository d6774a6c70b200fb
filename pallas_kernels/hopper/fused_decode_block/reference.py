"""Reference of `fused_decode_block`: the same as separate matmuls. `api.py` calls it if the kernel is not used."""

from jaxtyping import Array, Float

from ...op import Implementation
from ...projection import gated_projection, projection
from .types import BlockWeights


def multiply_apart(
    attended: Float[Array, "B A"],
    x: Float[Array, "B D"],
    weights: BlockWeights,
    implementation: Implementation = "auto",
) -> list[Array]:
    """Return the residual stream and the next layer's q, k and v. Each matmul picks its own implementation.

    `implementation="xla"` is passed on to all of them.
    """
    by = "xla" if implementation == "xla" else "auto"
    (x,) = projection(attended, weights.o, residual=x, implementation=by)
    wide = gated_projection(x, weights.gate, weights.up, norm=weights.mlp_norm, implementation=by)
    (x,) = projection(wide, weights.down, residual=x, implementation=by)
    return [x, *projection(x, weights.q, weights.k, weights.v, norm=weights.attn_norm, implementation=by)]
