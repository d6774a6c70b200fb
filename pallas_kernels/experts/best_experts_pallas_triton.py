"""Triton kernel of `best_experts`: the softmax over all experts and the choice of the best ones, one program per token.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py`; weights may
differ by rounding.

XLA needs a softmax, a sort, a gather and a slice for this. In a decoding step, each of them takes longer to launch than
to run.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..triton import backend, triton_call, triton_unsupported

MOST = 1024
"""Maximum number of experts, which a program holds in registers."""


def unsupported_reason(logits: Array, **_: Any) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if logits.shape[1] > MOST:
        return f"{logits.shape[1]} experts are more than {MOST}"
    return triton_unsupported()


@functools.partial(jax.jit, static_argnames=("count", "normalized", "scale", "interpret"))
def best_experts(
    logits: Float[Array, "R E"], *, count: int, normalized: bool, scale: float, interpret: bool = False
) -> tuple[Int[Array, "R k"], Float[Array, "R k"]]:
    """Choose each token's experts; see the public function."""
    shape = len(logits), count
    call = triton_call(
        functools.partial(_choose, normalized=normalized, scale=scale),
        warps=1,
        grid=(len(logits),),
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        interpret=interpret,
        name="best_experts",
    )
    experts, weights = call(logits)
    return experts, weights


def _choose(logits_ref: Any, experts_ref: Any, weights_ref: Any, *, normalized: bool, scale: float) -> None:
    """Choose the experts of one token, the best first."""
    row, count, most = pl.program_id(0), logits_ref.shape[1], experts_ref.shape[1]
    expert = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
    logits = backend.load(logits_ref.at[row, expert], mask=expert < count, other=-jnp.inf).astype(jnp.float32)
    powers = jnp.exp(logits - jnp.max(logits))
    choice = jnp.where(expert < count, powers / jnp.sum(powers), -1.0)
    slot = jnp.arange(pl.next_power_of_2(most), dtype=jnp.int32)
    experts, weights = jnp.zeros(slot.shape, jnp.int32), jnp.zeros(slot.shape, jnp.float32)
    for i in range(most):
        best = jnp.max(choice)
        first = jnp.min(jnp.where(choice == best, expert, len(expert)))
        experts, weights = jnp.where(slot == i, first, experts), jnp.where(slot == i, best, weights)
        choice = jnp.where(expert == first, -1.0, choice)
    if normalized:
        weights = weights / (jnp.sum(weights) + 1e-20)
    weights = (weights * scale).astype(logits_ref.dtype).astype(jnp.float32)
    backend.store(experts_ref.at[row, slot], experts, mask=slot < most)
    backend.store(weights_ref.at[row, slot], weights, mask=slot < most)
