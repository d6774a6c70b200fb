"""Public functions. Their `Op`s pick a Triton kernel or XLA."""

from jaxtyping import Array, Float, Int

from ..op import Implementation, Op
from ..projection import Matrix, Norm
from .tiles import Biases

_BEST = Op("best_experts", __name__, gpu=("best_experts_pallas_triton",))
_MLP = Op("expert_mlp", __name__, gpu=("few_pairs_pallas_triton", "many_pairs_pallas_triton"))


def best_experts(
    logits: Float[Array, "R E"],
    count: int,
    *,
    normalized: bool = False,
    scale: float = 1.0,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Int[Array, "R k"], Float[Array, "R k"]]:
    """Choose the experts with the highest weights, the weights being a softmax over all experts.

    Args:
        logits: the router's outputs. The softmax is in float32.
        count: experts per token.
        normalized: divide a token's weights by their sum.
        scale: factor of the weights.
        implementation: which implementation computes it, see `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        Each token's experts, the best first, and their weights. Of equal weights the first expert's wins. Weights are
        rounded to the type of the logits and returned in float32.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> logits = jnp.log(jnp.asarray([[1.0, 6.0, 2.0]]))
        >>> experts, weights = kvjax.pallas_kernels.best_experts(logits, 2, normalized=True)
        >>> experts.tolist(), [round(weight, 2) for weight in weights[0].tolist()]  # 6 / 8 and 2 / 8
        ([[1, 2]], [0.75, 0.25])
    """
    options = {"implementation": implementation, "interpret": interpret}
    return _BEST(logits, count=count, normalized=normalized, scale=scale, **options)


def expert_mlp(
    x: Float[Array, "R D"],
    experts: Int[Array, "R k"],
    weights: Float[Array, "R k"],
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    biases: Biases | None = None,
    *,
    norm: Norm | None = None,
    activation: str = "silu",
    total: int | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "R D"]:
    """Weighted sum of the outputs of each token's experts: Σ weight · down(activation(gate(x)) · up(x)).

    The matrices of other experts are not read. The sum of a token does not depend on other tokens.

    Args:
        x: tokens.
        experts: each token's experts, all different. Those below 0, and E or more, are ignored.
        weights: factors of the experts' outputs.
        gate, up: matrices [EF, D], expert after expert, outputs first. XLA computes quantised ones, except MXFP4 of up to 16
            tokens.
        down: matrices [ED, F], expert after expert, outputs first.
        biases: biases of the three projections, expert after expert. XLA computes this case for more than 16 tokens.
        norm: RMS norm of the tokens. A kernel that computes a single token divides by the root mean square after the
            products.
        activation: "silu", "gelu_tanh" or "clamped_swiglu", see `kvjax.pallas_kernels.activations`. XLA computes the last for
            more than 16 tokens.
        total: number of experts of which the matrices have a part, in which case some of a token's experts are ignored.
            None if they have all.
        implementation: which implementation computes it, see `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernels in interpret mode, on any device.

    Returns:
        The sums, in float32.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> x, matrices = jnp.asarray([[1.0, 2.0]]), jax.random.normal(jax.random.key(0), (3, 2 * 4, 2))
        >>> gate, up, down = matrices[0], matrices[1], matrices[2].reshape(2, 4, 2).swapaxes(1, 2).reshape(4, 4)
        >>> out = kvjax.pallas_kernels.expert_mlp(x, jnp.asarray([[1]]), jnp.asarray([[1.0]]), gate, up, down)
        >>> bool(jnp.allclose(out, (jax.nn.silu(x @ gate[4:].T) * (x @ up[4:].T)) @ down[2:].T, atol=1e-5))  # expert 1
        True
    """
    options = {
        "norm": norm,
        "activation": activation,
        "total": total,
        "implementation": implementation,
        "interpret": interpret,
    }
    return _MLP(x, experts, weights, gate, up, down, biases, **options)
