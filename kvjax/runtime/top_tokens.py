"""The most likely tokens of each step, for answers that report them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MOST = 20
"""Maximum number of tokens."""

GROUP = 128
"""Logits are searched in groups of this size. Only the groups with the largest maxima are searched further."""


def top_tokens(logits: Float[Array, "B V"], count: Int[Array, ""]) -> tuple[Int[Array, "B N"], Float[Array, "B N"]]:
    """The `count` largest logits of each row, the largest first. Ties go to the lowest id.

    Nothing but the maximum of each group is computed where `count` is 0. The time of the rest grows with `count`. There is no
    sort and no condition, so that a GPU runs it within the CUDA graph of a decode loop.

    Args:
        logits: V must be at least `count`.
        count: up to `MOST`.

    Returns:
        Token ids and their log-probabilities, with N = `MOST` columns. Columns from `count` on mean nothing.
    """
    rows, size = logits.shape
    groups = -(-size // GROUP)
    padded = jnp.pad(logits, ((0, 0), (0, groups * GROUP - size)), constant_values=-jnp.inf)
    padded = padded.reshape(rows, groups, GROUP)
    # The n largest logits are in the n groups with the largest maxima. Columns that are not filled repeat group 0.
    numbers = jnp.broadcast_to(jnp.arange(groups, dtype=jnp.int32), (rows, groups))
    best, _ = _largest(jnp.max(padded, axis=-1), numbers, count)
    ids = best[:, :, None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)
    candidates = jnp.take_along_axis(padded, best[:, :, None], axis=1)
    ids, values = _largest(candidates.reshape(rows, -1), ids.reshape(rows, -1), count)
    return ids, values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def _largest(
    values: Float[Array, "B C"], ids: Int[Array, "B C"], count: Int[Array, ""]
) -> tuple[Int[Array, "B N"], Float[Array, "B N"]]:
    """The `count` largest values, each after the one before it: with a smaller value, or an equal one and a larger id."""
    rows = values.shape[0]

    def one(i: Array, found: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        best, at, all_ids, all_values = found
        left = (values < best) | ((values == best) & (ids > at))
        best = jnp.max(jnp.where(left, values, -jnp.inf), axis=1, keepdims=True)
        at = jnp.min(jnp.where(left & (values == best), ids, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
        at = jnp.minimum(at, jnp.max(ids))  # logits that are no numbers leave none
        place = jnp.zeros((), i.dtype), i
        return (
            best,
            at,
            jax.lax.dynamic_update_slice(all_ids, at, place),
            jax.lax.dynamic_update_slice(all_values, best, place),
        )

    start = jnp.full((rows, 1), jnp.inf, values.dtype), jnp.full((rows, 1), -1, jnp.int32)
    buffers = jnp.zeros((rows, MOST), jnp.int32), jnp.zeros((rows, MOST), values.dtype)
    return jax.lax.fori_loop(0, count, one, (*start, *buffers))[2:]
