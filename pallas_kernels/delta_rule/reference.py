"""XLA reference of `delta_rule`.

`Op` in `api.py` calls it if the kernels do not support the case. The kernels must match it, up to rounding.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

CHUNK = 64
"""Tokens of a chunk. Larger chunks have larger triangular systems, smaller ones more steps."""


def delta_rule(
    q: Float[Array, "B S G X"],
    k: Float[Array, "B S G X"],
    v: Float[Array, "B S M Y"],
    log_decay: Float[Array, "B S M"],
    rate: Float[Array, "B S M"],
    memory: Float[Array, "B M X Y"],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B S M Y"], Float[Array, "B M X Y"]]:
    """Update and read each head's matrix; see the public function.

    With the sums G of log decays within a chunk, and the matrix S before it, tokens write D = (d₁, d₂, …), where

        d_t = β_t (v_t − e^{G_t} Sᵀ k_t − Σ_{i<t} e^{G_t − G_i} (k_i · k_t) d_i)

    This is a unit lower triangular system (Section 3.3 of the paper). Its solution is linear in S, so all but that is
    computed for all chunks at once. So are the outputs, from what the tokens read of S and what they wrote.
    """
    dot = partial(jnp.einsum, precision=_precision(v.dtype))
    size, dtype = q.shape[1], v.dtype
    chunk = min(chunk, size)
    pad = -size % chunk
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))

    def cut(x: Float[Array, "B S M *_"]) -> Float[Array, "n B M C *_"]:
        x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)

    q, k, v, log_decay, rate = map(cut, (q, k, v, log_decay, rate))
    total = jnp.cumsum(log_decay, axis=-1)
    place = jnp.arange(chunk, dtype=jnp.int32)
    earlier = jnp.broadcast_to(place[:, None] >= place, (*total.shape, chunk))
    between = jnp.exp(jnp.where(earlier, total[..., None] - total[..., None, :], -jnp.inf))  # of i's share in t
    before = jnp.broadcast_to(place[:, None] > place, between.shape)
    system = jnp.where(before, dot("nbmtx,nbmix->nbmti", k, k) * between * rate[..., None], 0.0)
    scale = jnp.exp(total)[..., None]
    sides = jnp.concatenate([v * rate[..., None], k * scale * rate[..., None]], axis=-1)
    solved = dot("nbmti,nbmix->nbmtx", _inverse(system, dot), sides)
    free, of_memory = jnp.split(solved, [v.shape[-1]], axis=-1)
    end = total[..., -1:]
    parts = jnp.concatenate([of_memory, q * scale], axis=-2), free, k * jnp.exp(end - total)[..., None], end

    def one(memory: Array, part: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        readers, free, k, end = part
        taken, read = jnp.split(dot("bmtx,bmxy->bmty", readers, memory), 2, axis=-2)
        written = free - taken
        return memory * jnp.exp(end)[..., None] + dot("bmtx,bmty->bmxy", k, written), (read, written)

    memory, (read, written) = jax.lax.scan(one, memory, parts)
    attention = dot("nbmtx,nbmix->nbmti", q, k) * between
    out = read + dot("nbmti,nbmiy->nbmty", attention, written)
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 2, 3)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :size].astype(dtype), memory


def _inverse(lower: Float[Array, "*B C C"], dot: Callable[..., Array]) -> Float[Array, "*B C C"]:
    """Inverse of I + L, where L is strictly lower triangular, by matmuls alone.

    It starts with the diagonal blocks of one token. If X has the inverses of diagonal blocks, and J the entries of L that
    join the blocks of each pair, then X − X J X has the inverses of blocks twice as large.
    """
    size = lower.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    block = 1
    while block < size:
        join = jnp.where(jnp.broadcast_to(joins(size, block), lower.shape), lower, 0.0)
        inverse = inverse - (join if block == 1 else dot("...ij,...jk,...kl->...il", inverse, join, inverse))
        block *= 2
    return inverse


def joins(size: int, block: int) -> Array:
    """Which entries [C, C] of a lower triangular matrix join the two blocks of a pair of diagonal blocks."""
    place = jnp.arange(size, dtype=jnp.int32)
    pair, half = place // (2 * block), place // block
    return (pair[:, None] == pair) & (half[:, None] > half)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """Precision of products within chunks: that of float32 for a model in float32.

    For others, more than their own precision is enough: TF32 on GPUs, and three passes in bfloat16 on TPUs.
    """
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.HIGH
