"""Public function. Its `Op` picks a Triton kernel or XLA."""

from typing import Any

from jaxtyping import Array, Float, Int

from ..op import Implementation, Op
from ..projection import Matrix
from .tiles import Biases


def _prefer_xla_reason(*_: Any, **__: Any) -> str:
    return "the kernels were compiled for GPUs and interpreted, but they have not run on one"


_OP = Op(
    "expert_mlp",
    __name__,
    gpu=("few_pairs_pallas_triton", "many_pairs_pallas_triton"),
    prefer_xla_reason=_prefer_xla_reason,
)


def expert_mlp(
    x: Float[Array, "R D"],
    experts: Int[Array, "R k"],
    weights: Float[Array, "R k"],
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    biases: Biases | None = None,
    *,
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
        gate, up: matrices [EF, D], expert after expert, outputs first.
        down: matrices [ED, F], expert after expert, outputs first.
        biases: biases of the three projections, expert after expert. XLA computes this case.
        activation: "silu", "gelu_tanh" or "clamped_swiglu", see `kvjax.pallas_kernels.activations`. XLA computes the last.
        total: number of experts of which the matrices have a part, in which case some of a token's experts are ignored.
            None if they have all.
        implementation: "auto" is XLA until the Pallas kernels for GPUs ("gpu") have run on one.
        interpret: run the Pallas kernels in interpret mode, on any device.

    Returns:
        The sums, in float32.

    Raises:
        Unsupported: the requested implementation does not support this case.
    """
    options = {"activation": activation, "total": total, "implementation": implementation, "interpret": interpret}
    return _OP(x, experts, weights, gate, up, down, biases, **options)
