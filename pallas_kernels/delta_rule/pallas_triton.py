"""Triton kernels of `delta_rule`.

`Op` in `api.py` calls them for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

They divide the work as the reference does, in the same notation. The first kernel solves the triangular systems of all
chunks at once. The second goes from chunk to chunk. A program of it keeps some columns of a head's matrix in registers:
columns do not depend on one another. Solutions, and operands of the second kernel's products, have the type of the
values. Matrices, and products of the first kernel, are more precise (float32 and TF32).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..triton import triton_call, triton_unsupported
from ..tuning import tuned
from .reference import CHUNK, joins


def unsupported_reason(q: Array, k: Array, v: Array, *_: Any) -> str | None:
    """Return why these kernels do not support a case, or None if they do."""
    for dim in (q.shape[-1], v.shape[-1]):
        if reason := triton_unsupported(dim=dim):
            return reason
    if v.dtype not in (jnp.bfloat16, jnp.float16):
        return f"values are {v.dtype}"
    return None


def delta_rule(
    q: Float[Array, "B S G X"],
    k: Float[Array, "B S G X"],
    v: Float[Array, "B S M Y"],
    log_decay: Float[Array, "B S M"],
    rate: Float[Array, "B S M"],
    memory: Float[Array, "B M X Y"],
    *,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> tuple[Float[Array, "B S M Y"], Float[Array, "B M X Y"]]:
    """Update and read each head's matrix; see the public function.

    Args:
        sizes: `columns` of a matrix per program, `solver_warps`, `warps` and `stages`, instead of the tuned sizes.
    """
    size = q.shape[1]
    case = {"rows": len(q), "heads": v.shape[2], "key_dim": q.shape[-1], "value_dim": v.shape[-1]}
    default = {"columns": 32, "solver_warps": 4, "warps": 4, "stages": 2}
    sizes = dict(sizes or tuned("delta_rule", case, default))
    sizes["columns"] = min(sizes["columns"], v.shape[-1])
    given = [jnp.pad(x, [(0, 0), (0, -size % CHUNK)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, log_decay, rate)]
    out, memory = _call(*given, memory, interpret=interpret, **sizes)
    return out[:, :size], memory


@functools.partial(jax.jit, static_argnames=("interpret", "columns", "solver_warps", "warps", "stages"))
def _call(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    rate: Array,
    memory: Array,
    *,
    interpret: bool,
    columns: int,
    solver_warps: int,
    warps: int,
    stages: int,
) -> tuple[Array, Array]:
    """Call the kernels for whole chunks. They are traced and lowered once for all layers."""
    (rows, size, groups, x), (_, _, heads, y) = q.shape, v.shape
    chunks, group = size // CHUNK, heads // groups
    scalars = [jnp.moveaxis(each, 2, 1) for each in (log_decay, rate)]

    def of_chunk(heads_of: int, dim: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, CHUNK, None, dim), lambda head, chunk: (head // heads, chunk, head % heads // heads_of, 0)
        )

    def scalar() -> pl.BlockSpec:
        return pl.BlockSpec((None, None, CHUNK), lambda head, chunk: (head // heads, head % heads, chunk))

    def solution(dim: int) -> tuple[pl.BlockSpec, jax.ShapeDtypeStruct]:
        shape = jax.ShapeDtypeStruct((rows * heads, size, dim), v.dtype)
        return pl.BlockSpec((None, CHUNK, dim), lambda head, chunk: (head, chunk, 0)), shape

    specs, shapes = zip(*map(solution, (y, x, CHUNK)), strict=True)
    solutions = triton_call(
        _solve,
        grid=(rows * heads, chunks),
        in_specs=[of_chunk(group, x), of_chunk(group, x), of_chunk(1, y), scalar(), scalar()],
        out_specs=[*specs],
        out_shape=[*shapes],
        warps=solver_warps,
        stages=1,
        interpret=interpret,
        name="delta_rule_solve",
    )(q, k, v, *scalars)

    def of_head(heads_of: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, size, None, x), lambda head, _: (head // heads, 0, head % heads // heads_of, 0))

    def whole(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, size, dim), lambda head, _: (head, 0, 0))

    own = pl.BlockSpec((None, size, columns), lambda head, block: (head, 0, block))
    matrix = pl.BlockSpec((None, None, x, columns), lambda head, block: (head // heads, head % heads, 0, block))
    out, memory = triton_call(
        _follow,
        grid=(rows * heads, y // columns),
        in_specs=[
            of_head(group),
            of_head(group),
            pl.BlockSpec((None, None, size), lambda head, _: (head // heads, head % heads, 0)),
            own,
            whole(x),
            whole(CHUNK),
            matrix,
        ],
        out_specs=[
            pl.BlockSpec((None, size, None, columns), lambda head, block: (head // heads, 0, head % heads, block)),
            matrix,
        ],
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(memory.shape, memory.dtype)],
        warps=warps,
        stages=stages,
        interpret=interpret,
        name="delta_rule_follow",
    )(q, k, scalars[0], *solutions, memory)
    return out, memory


def _solve(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    log_decay_ref: Any,
    rate_ref: Any,
    free_ref: Any,
    of_memory_ref: Any,
    attention_ref: Any,
) -> None:
    """Solve the system of one chunk of a head: what its tokens write, without a matrix and for each of its rows.

    Also compute the tokens' attention to what they write.
    """
    k, rate = k_ref[...], rate_ref[...][:, None]
    total = _sums(log_decay_ref[...])
    place = jnp.arange(CHUNK, dtype=jnp.int32)
    between = jnp.exp(jnp.where(place[:, None] >= place, total[:, None] - total[None], -jnp.inf))
    system = jnp.where(place[:, None] > place, _dot(k, k, 1, 1) * between * rate, 0.0)
    inverse = jnp.where(place[:, None] == place, 1.0, 0.0) - jnp.where(joins(CHUNK, 1), system, 0.0)
    block = 2
    while block < CHUNK:
        join = jnp.where(joins(CHUNK, block), system, 0.0)
        inverse -= _dot(_dot(inverse, join, 1, 0), inverse, 1, 0)
        block *= 2
    free_ref[...] = _dot(inverse, v_ref[...].astype(jnp.float32) * rate, 1, 0).astype(free_ref.dtype)
    of_memory_ref[...] = _dot(inverse, k * (jnp.exp(total)[:, None] * rate), 1, 0).astype(of_memory_ref.dtype)
    attention_ref[...] = (_dot(q_ref[...], k, 1, 1) * between).astype(attention_ref.dtype)


def _follow(
    q_ref: Any,
    k_ref: Any,
    log_decay_ref: Any,
    free_ref: Any,
    of_memory_ref: Any,
    attention_ref: Any,
    start_ref: Any,
    out_ref: Any,
    end_ref: Any,
) -> None:
    """Go from chunk to chunk with some columns of a head's matrix."""
    dtype = free_ref.dtype

    def step(chunk: Array, memory: Float[Array, "X Y"]) -> Float[Array, "X Y"]:
        at = pl.ds(chunk * CHUNK, CHUNK)
        log_decay = log_decay_ref[at]
        total, end = _sums(log_decay)[:, None], jnp.sum(log_decay)
        rounded = memory.astype(dtype)
        written = free_ref[at, :].astype(jnp.float32) - _dot(of_memory_ref[at, :], rounded, 1, 0)
        written = written.astype(dtype)
        out = _dot((q_ref[at, :] * jnp.exp(total)).astype(dtype), rounded, 1, 0)
        out_ref[at, :] = (out + _dot(attention_ref[at, :], written, 1, 0)).astype(dtype)
        return memory * jnp.exp(end) + _dot((k_ref[at, :] * jnp.exp(end - total)).astype(dtype), written, 0, 0)

    end_ref[...] = jax.lax.fori_loop(0, q_ref.shape[0] // CHUNK, step, start_ref[...])


def _sums(x: Float[Array, " C"]) -> Float[Array, " C"]:
    """Cumulative sums."""
    place = jnp.arange(CHUNK, dtype=jnp.int32)
    return jnp.sum(jnp.where(place[:, None] >= place, x[None], 0.0), axis=1)


def _dot(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    """Product in float32, over these axes of the factors."""
    return jax.lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)
