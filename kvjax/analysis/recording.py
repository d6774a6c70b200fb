"""Records queries, keys and values of every layer while a model processes a text."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import LayerSpec
from kvjax.calibration import recording
from kvjax.models import Params


class Recorded(NamedTuple):
    """Inputs of one layer's attention: T tokens, N query heads, K KV heads, H head dim, all float32.

    Attributes:
        q, k: queries and keys, rotated to their positions.
        v: values.
        window: sliding attention window of the layer in tokens; None for full attention.

    Example:
        >>> from kvjax.analysis.recording import record
        >>> layer = record(params, [5, 9, 2] * 4)[0]
        >>> layer.q.shape, layer.v.shape, layer.window  # tokens, heads, channels
        ((12, 4, 16), (12, 2, 16), None)
    """

    q: Float[np.ndarray, "T N H"]
    k: Float[np.ndarray, "T K H"]
    v: Float[np.ndarray, "T K H"]
    window: int | None = None


def record(params: Params, tokens: Sequence[int]) -> list[Recorded]:
    """Process a text without cache compression, and record the inputs of attention in every layer that has attention.

    Raises:
        ValueError: the text is empty.

    Example:
        >>> from kvjax.analysis.recording import record
        >>> layers = record(params, [5, 9, 2] * 4)
        >>> len(layers), layers[0].k.shape  # tokens, KV heads, channels
        (2, (12, 2, 16))
    """
    if not len(tokens):
        raise ValueError("there is nothing to record; give at least one token")
    layers = recording.record_all(params, np.asarray([tokens], np.int32), _whole)
    return [Recorded(*(x[0] for x in layers[i]), window=params.config.windows[i]) for i in params.config.cached]


def _whole(spec: LayerSpec, *arrays: Array) -> tuple[Array, ...]:
    return tuple(x.astype(jnp.float32) for x in arrays)
