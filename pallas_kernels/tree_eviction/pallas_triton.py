"""Triton kernel of `tree_eviction`: evict the less attended of two neighbours in each head.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must equal those of `reference.py`.

One program per sequence and head finds the two neighbours and closes the gap in the ranks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..ties import exceeds
from ..triton import backend, triton_call, triton_unsupported
from .types import Ranked

BLOCK, WARPS = 1024, 8
"""Slots processed at a time, and warps per program."""


def unsupported_reason(*_: Any, **__: Any) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    return triton_unsupported()


@functools.partial(jax.jit, static_argnames=("sinks", "stride", "scored", "interpret"))
def tree_eviction(
    ranked: Ranked,
    score: Float[Array, "B K C"],
    steps: Float[Array, "B K C"],
    tree: Int[Array, " B"],
    budget: Int[Array, " B"],
    *,
    sinks: int,
    stride: int,
    scored: bool,
    interpret: bool = False,
) -> list[Array]:
    """Return the fields of `Ranked` after one eviction in the heads that exceed their budget; see the public function.

    Only changed entries are written, in place if the arrays are not used again. Otherwise XLA copies the arrays first.
    """
    batch, heads, slots = ranked.rank.shape
    folded = [x.reshape(batch * heads, *x.shape[2:]) for x in ranked]
    # `kept` is not aliased: attention reads its value from before the loop, which XLA would have to copy.
    given = [score.reshape(-1, slots), steps.reshape(-1, slots), tree, budget, *folded]
    first, own = len(given) - len(folded), ranked._fields.index("kept")
    out = triton_call(
        functools.partial(_body, heads=heads, slots=slots, sinks=sinks, stride=stride, scored=scored),
        grid=(batch * heads,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in folded],
        input_output_aliases={first + i: i for i in range(len(folded)) if i != own},
        warps=WARPS,
        stages=2,
        interpret=interpret,
        name="tree_eviction",
    )(*given)
    return [new.reshape(x.shape) for new, x in zip(out, ranked, strict=True)]


def _body(*refs: Any, heads: int, slots: int, sinks: int, stride: int, scored: bool) -> None:
    score_ref, steps_ref, tree_ref, budget_ref, _, _, _, before_ref, *_ = refs
    rank_ref, pos_ref, weight_ref, count_ref, next_ref, scope_ref = refs[-6:]
    here = pl.program_id(0)
    count, scope = before_ref[here], scope_ref[here]
    older, blocks = sinks + scope, pl.cdiv(slots, BLOCK)
    over = count > budget_ref[here // heads]
    count_ref[here] = count - over.astype(jnp.int32)

    def load(i: Any) -> tuple[Array, Array, Array]:
        at = i * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        return at, at < slots, backend.load(rank_ref.at[here, at], mask=at < slots, other=slots)

    def look(i: Any, found: tuple[Array, Array]) -> tuple[Array, Array]:
        at, _, rank = load(i)
        return jnp.where(rank == older, at, found[0]), jnp.where(rank == older + 1, at, found[1])

    @pl.when(over)
    def _evict() -> None:
        nowhere = jnp.full((BLOCK,), -1, jnp.int32)
        first, second = (jnp.max(at) for at in jax.lax.fori_loop(0, blocks, look, (nowhere, nowhere)))
        newer_goes = jnp.bool_(True)
        if scored:
            averages = [score_ref[here, at] / jnp.maximum(steps_ref[here, at], 1.0) for at in (first, second)]
            newer_goes = exceeds(averages[0], averages[1])
        victim, slot = older + newer_goes.astype(jnp.int32), jnp.where(newer_goes, second, first)

        def close(i: Any, _: None) -> None:
            at, inside, rank = load(i)
            moved = rank - ((rank > victim) & (rank < slots)).astype(jnp.int32)
            backend.store(rank_ref.at[here, at], jnp.where(rank == victim, slots, moved), mask=inside)

        jax.lax.fori_loop(0, blocks, close, None)
        pos_ref[here, slot] = jnp.int32(-1)
        weight_ref[here, slot] = jnp.float32(0)
        next_ref[here] = slot
        scope_ref[here] = (scope + stride) % jnp.maximum(tree_ref[here // heads], 1)
