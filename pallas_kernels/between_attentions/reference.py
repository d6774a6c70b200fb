"""The same, one product after the other; each by whoever computes it best."""

from typing import TYPE_CHECKING

from jaxtyping import Array, Float

from ..dispatch import Implementation
from ..projection import gated_projection, projection

if TYPE_CHECKING:
    from .api import Between


def between_attentions(
    attended: Float[Array, "B A"], x: Float[Array, "B D"], weights: "Between", by: Implementation = "auto"
) -> list[Array]:
    """The residual stream and the next layer's q, k and v; `by` says who multiplies."""
    (x,) = projection(attended, weights.o, residual=x, implementation=by)
    wide = gated_projection(x, weights.gate, weights.up, norm=weights.mlp_norm, implementation=by)
    (x,) = projection(wide, weights.down, residual=x, implementation=by)
    return [x, *projection(x, weights.q, weights.k, weights.v, norm=weights.attn_norm, implementation=by)]
