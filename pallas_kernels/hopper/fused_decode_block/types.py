"""Weights and results of `fused_decode_block`."""

from typing import NamedTuple

from jaxtyping import Array, Float

from ...projection import Matrix, Norm


class BlockWeights(NamedTuple):
    """Weights between one layer's attention and the next layer's attention. Matrices are as in checkpoints, outputs
    first.

    Attributes:
        o: output projection of attention, [D, A].
        mlp_norm: norm before the MLP.
        gate, up: [F, D].
        down: [D, F].
        attn_norm: norm before the next layer's attention.
        q, k, v: projections of the next layer, [_, D].

    Example:
        >>> from kvjax.pallas_kernels import BlockWeights, Norm
        >>> a, b = params.layers
        >>> norms = [Norm(gain, params.config.norm_eps) for gain in (a.mlp_norm, b.attn_norm)]
        >>> mlp, qkv = (a.mlp.gate, a.mlp.up, a.mlp.down), (b.attn.q, b.attn.k, b.attn.v)
        >>> weights = BlockWeights(a.attn.o, norms[0], *mlp, norms[1], *qkv)
        >>> weights.o.shape, weights.q.shape
        ((48, 64), (64, 48))
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
    """Result of `fused_decode_block`.

    Attributes:
        x: the residual stream.
        q, k, v: the next layer's queries, keys and values, without biases or rotation.
    """

    x: Float[Array, "B D"]
    q: Float[Array, "B Q"]
    k: Float[Array, "B K"]
    v: Float[Array, "B K"]
