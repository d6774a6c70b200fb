"""The public function, and the choice of who computes it."""

from importlib import import_module
from typing import Any

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

    Scores are compared in float32: -0.0 equals 0.0, -inf may be chosen, and NaN is lower than all. Every implementation
    chooses the same. `kvjax.cache.compact` makes ascending indices of the mask.

    Args:
        scores: N for each row.
        count: how many of a row; all where N or more, none where 0 or less.
        implementation: who computes it, see `kvjax.pallas_kernels.dispatch`.
        interpret: interpret the Pallas body that was named, on any device.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    size = scores.shape[-1]
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


def _body(name: str) -> Any:
    """The module of a Pallas body, imported where it is used."""
    return import_module(f".{name}", __package__)
