"""The public functions, and the choice of who computes them."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..dispatch import Implementation, choose
from . import reference


def top_k(
    scores: Float[Array, "*B N"],
    count: Int[Array, "*#B"],
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Bool[Array, "*B N"]:
    """Which are the `count` highest scores of each row; of equal ones the first.

    Scores are compared in float32: what is within rounding of the last that is chosen equals it (see `ties`), -0.0 equals 0.0, -inf
    may be chosen, and NaN is lower than all. Every implementation chooses the same. `kvjax.cache.compact` makes ascending indices of the mask.

    Args:
        scores: N for each row.
        count: how many of a row; all where N or more, none where 0 or less.
        implementation: who computes it, see `kvjax.pallas_kernels.dispatch`.
        interpret: interpret the Pallas body that was named, on any device.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    scores, size = jax.lax.stop_gradient(scores), scores.shape[-1]
    count = jnp.broadcast_to(count, scores.shape[:-1])
    if scores.size == 0:
        return jnp.zeros(scores.shape, bool)
    chosen = choose(
        "top_k",
        implementation,
        tpu=lambda: _body("tpu").refuses(size),
        gpu=lambda: _body("gpu").refuses(size),
        interpret=interpret,
    )
    if chosen == "xla":
        return reference.top_k(scores, count)
    rows, counts = scores.reshape(-1, size), jnp.clip(count, 0, size).reshape(-1)
    return _body(chosen).top_k(rows, counts, interpret=interpret).reshape(scores.shape)


def top_k_indices(
    scores: Float[Array, "*B N"],
    count: Int[Array, "*#B"],
    size: int,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Int[Array, "*B S"], Bool[Array, "*B S"]]:
    """Where the `count` highest scores of each row are, of equal ones the first; they are compared as in `top_k`.

    What is -inf or NaN is never chosen, so there may be fewer. All implementations choose the same, each in an
    order of its own.

    Args:
        scores: N for each row.
        count: how many of a row, at most `size`; none where 0 or less.
        size: S, at most N.
        implementation: who computes it, see `kvjax.pallas_kernels.dispatch`. There is no body for TPUs.
        interpret: interpret the Pallas body that was named, on any device.

    Returns:
        Places, those that are meant first, and which are meant. All are places in the row.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    scores, length = jax.lax.stop_gradient(scores), scores.shape[-1]
    count = jnp.broadcast_to(count, scores.shape[:-1])
    chosen = choose("top_k_indices", implementation, gpu=lambda: _body("gpu").refuses(length), interpret=interpret)
    if chosen == "xla" or scores.size == 0:
        return reference.top_k_indices(scores, count, size)
    rows, counts = scores.reshape(-1, length), jnp.clip(count, 0, size).reshape(-1)
    index, live = _body(chosen).top_k_indices(rows, counts, size, interpret=interpret)
    return index.reshape(*count.shape, size), live.reshape(*count.shape, size)


def _body(name: str) -> Any:
    """The module of a Pallas body, imported where it is used."""
    return import_module(f".{name}", __package__)
