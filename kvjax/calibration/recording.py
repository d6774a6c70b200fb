"""Records statistics of every layer's queries and keys on real text, with a policy that stores them instead of a cache."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax._util import user_files
from kvjax.cache import LayerSpec, PromptKV, layer_specs
from kvjax.models import Params, transformer
from kvjax.policies.base import Policy
from kvjax.policies.layer import CacheLayer, Carry
from kvjax.runtime.program import Program

Measure = Callable[[LayerSpec, Array, Array, Array], Any]
"""Maps a layer's spec, rotated queries [B, T, N, H], rotated keys [B, T, K, H] and values to any arrays. Has to be hashable, such as a frozen dataclass.
"""


@dataclasses.dataclass(frozen=True)
class Recorder(Policy):
    """A policy that stores what `measure` returns for each layer's prompt, and no cache."""

    measure: Measure

    def layer(self, spec: LayerSpec) -> "RecorderLayer":
        return RecorderLayer(self, spec)


@dataclasses.dataclass(frozen=True)
class RecorderLayer(CacheLayer[Recorder]):
    """One layer of a `Recorder`."""

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[Any, Carry]:
        return self.policy.measure(self.spec, prompt.q_rotated, prompt.k_rotated, prompt.v), carry

    def advance(self, state: Any) -> None:
        """Nothing is measured in a recurrent layer."""


def record(params: Params, tokens: Int[np.ndarray, "B T"], measure: Measure) -> tuple[Any, ...]:
    """Process texts of equal length, without padding, and return what `measure` returns for each compressed layer.

    See `ModelConfig.compressed`.
    """
    layers = record_all(params, tokens, measure)
    return tuple(layers[i] for i in params.config.compressed)


def record_all(params: Params, tokens: Int[np.ndarray, "B T"], measure: Measure) -> tuple[Any, ...]:
    """`record` for all layers. That of a recurrent layer is None."""
    batch, length = tokens.shape
    specs = layer_specs(params.config, batch, length, 0, params.dtype)
    return jax.device_get(_recorded(measure, specs, params, jnp.asarray(tokens, jnp.int32)))


def cut(params: Params, files: Sequence[Path], count: int, length: int) -> tuple[Int[np.ndarray, "S T"], str]:
    """Cut text files into samples: `count` pieces of `length` tokens, which do not overlap and are spread evenly over the files.

    Args:
        params: the model, whose tokenizer is used.
        files: plain text files.
        count: number of samples.
        length: tokens per sample.

    Returns:
        The samples, and their description. It names files with their folder, since many data sets have a `test.txt`.

    Raises:
        ValueError: the model has no tokenizer, there are no files, or the files are too short.
        OSError: a file cannot be read.
    """
    if params.tokenizer is None:
        raise ValueError("this model has no tokenizer, which is needed to calibrate on text")
    if not files or count < 1 or length < 1:
        raise ValueError(f"{count} samples of {length} tokens from {len(files)} files; give 1 or more of each")
    pieces: list[np.ndarray] = []
    for i, file in enumerate(files):
        wanted = count * (i + 1) // len(files) - count * i // len(files)
        ids = np.asarray(params.tokenizer.encode(user_files.read_text(file)), np.int32)
        if len(ids) < wanted * length:
            raise ValueError(
                f"{file} has {len(ids)} tokens, but {wanted} samples of {length} need {wanted * length}; give more text, or "
                "ask for fewer or shorter samples"
            )
        stride = len(ids) // max(wanted, 1)
        pieces += [ids[j * stride : j * stride + length] for j in range(wanted)]
    names = ", ".join("/".join(file.resolve().parts[-2:]) for file in files)
    return np.stack(pieces), f"{count} samples of {length} tokens, spread evenly over {names}"


def _record(measure: Measure, specs: tuple[LayerSpec, ...], params: Params, tokens: Int[Array, "B T"]) -> Any:
    lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    return transformer.prefill(params, tokens, lengths, lengths, [Recorder(measure).layer(spec) for spec in specs])[1]


_recorded = Program(_record, static=2)
