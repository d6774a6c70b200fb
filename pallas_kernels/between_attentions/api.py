"""The public function, and the choice of who computes it."""

from typing import NamedTuple

from jaxtyping import Array, Float

from ..dispatch import Implementation, choose
from ..projection import Norm
from . import reference


class Between(NamedTuple):
    """Weights that a token meets between one layer's attention and the next, matrices as checkpoints keep them, outputs first.

    Attributes:
        o: attention's output projection, [D, A].
        mlp_norm: before the MLP.
        gate, up: [F, D].
        down: [D, F].
        attn_norm: before the next layer's attention.
        q, k, v: of the next layer, [_, D].
    """

    o: Float[Array, "D A"]
    mlp_norm: Norm
    gate: Float[Array, "F D"]
    up: Float[Array, "F D"]
    down: Float[Array, "D F"]
    attn_norm: Norm
    q: Float[Array, "Q D"]
    k: Float[Array, "K D"]
    v: Float[Array, "K D"]


class Moved(NamedTuple):
    """Where a token is after that.

    Attributes:
        x: the residual stream.
        q, k, v: the next layer's products, without biases or rotation.
    """

    x: Float[Array, "B D"]
    q: Float[Array, "B Q"]
    k: Float[Array, "B K"]
    v: Float[Array, "B K"]


def between_attentions(
    attended: Float[Array, "B A"],
    x: Float[Array, "B D"],
    weights: Between,
    *,
    implementation: Implementation = "auto",
) -> Moved:
    """Output projection, gated MLP (Shazeer 2020) and the next layer's queries, keys and values, with both residual sums and RMS norms.

    The Hopper body is one kernel for what else are four: weights go on arriving while programs wait for each other. It rounds
    normed inputs before they are divided by their root mean square instead of after.

    Args:
        attended: what attention returned, heads side by side.
        x: the residual stream before it is added.
        implementation: "auto" takes the device's body where it serves; there is no interpreter for it.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    from . import hopper

    chosen = choose("between_attentions", implementation, gpu=lambda: hopper.refuses(attended, x, weights))
    if chosen == "xla":
        by = "xla" if implementation == "xla" else "auto"
        return Moved(*reference.between_attentions(attended, x, weights, by))
    return Moved(*hopper.between_attentions(attended, x, weights))
