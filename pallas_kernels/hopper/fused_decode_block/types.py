"""What a token meets between two attentions, and where it is then."""

from typing import NamedTuple

from jaxtyping import Array, Float

from ...projection import Matrix, Norm


class BlockWeights(NamedTuple):
    """Weights that a token meets between one layer's attention and the next, matrices as checkpoints keep them, outputs first.

    Attributes:
        o: attention's output projection, [D, A].
        mlp_norm: before the MLP.
        gate, up: [F, D].
        down: [D, F].
        attn_norm: before the next layer's attention.
        q, k, v: of the next layer, [_, D].
    """

    o: Matrix
    mlp_norm: Norm
    gate: Matrix
    up: Matrix
    down: Matrix
    attn_norm: Norm
    q: Matrix
    k: Matrix
    v: Matrix


class BlockOutput(NamedTuple):
    """Where a token is after that.

    Attributes:
        x: the residual stream.
        q, k, v: the next layer's products, without biases or rotation.
    """

    x: Float[Array, "B D"]
    q: Float[Array, "B Q"]
    k: Float[Array, "B K"]
    v: Float[Array, "B K"]
