"""Queries, keys and values of every layer, as a model reads a text."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import LayerSpec
from kvjax.calibration import recording
from kvjax.models import Params


class Recorded(NamedTuple):
    """What one layer's attention works with: T tokens, N query heads, K KV heads, H head dim, all float32.

    Attributes:
        q, k: queries and keys, rotated to their positions.
        v: values.
        window: the layer's sliding attention window in tokens, None where attention is full.
    """

    q: Float[np.ndarray, "T N H"]
    k: Float[np.ndarray, "T K H"]
    v: Float[np.ndarray, "T K H"]
    window: int | None = None


def record(params: Params, tokens: Sequence[int]) -> list[Recorded]:
    """Read a text with the plain model, and keep what every layer's attention works with.

    Raises:
        ValueError: the text is empty.
    """
    if not len(tokens):
        raise ValueError("there is nothing to record; give at least one token")
    layers = recording.record(params, np.asarray([tokens], np.int32), _whole)
    return [
        Recorded(*(x[0] for x in layer), window=window)
        for layer, window in zip(layers, params.config.windows, strict=True)
    ]


def _whole(spec: LayerSpec, *arrays: Array) -> tuple[Array, ...]:
    return tuple(x.astype(jnp.float32) for x in arrays)
