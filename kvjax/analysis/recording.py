"""Queries, keys and values of every layer, as a model reads a text."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec, layer_specs
from kvjax.models import Params, transformer
from kvjax.policies import Policy, rotated
from kvjax.policies.base import Carry


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


@dataclasses.dataclass(frozen=True)
class _Recorder(Policy):
    """A policy whose state of a prompt is all that attention saw of it."""

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[tuple[Array, Array, Array], Carry]:
        return (rotated(spec, q), rotated(spec, k), v), carry


def record(params: Params, tokens: Sequence[int]) -> list[Recorded]:
    """Read a text with the plain model, and keep what every layer's attention works with.

    Raises:
        ValueError: the text is empty.
    """
    if not len(tokens):
        raise ValueError("there is nothing to record; give at least one token")
    specs = layer_specs(params.config, 1, len(tokens), 0, params.dtype)
    ids, lengths = jnp.asarray([tokens], jnp.int32), jnp.asarray([len(tokens)], jnp.int32)
    _, states = jax.jit(partial(transformer.prefill, policy=_Recorder(), specs=specs))(params, ids, lengths)
    return [
        Recorded(*(np.asarray(x[0].astype(jnp.float32)) for x in state), window=spec.window)
        for spec, state in zip(specs, states, strict=True)
    ]
