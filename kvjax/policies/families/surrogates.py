"""Small networks that predict what a prompt's tokens are worth, trained for one model: their weights, and the scorers that use them.

They read what a layer's attention reads, the normed hidden states, and neither queries, keys nor values. Weights are files that the
methods' authors publish.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax._util import user_files
from kvjax.cache import LayerSpec, PromptKV
from kvjax.config import ModelConfig
from kvjax.pallas_kernels import top_k

from ..attention_context import AttentionContext
from ..base import CacheLayer, Carry, Policy
from ..fields import check_fields
from ..info import PolicyError
from .dense import DenseLayer
from .ragged import RaggedLayer
from .scoring import PromptScorer, PromptScorerLayer

Weights = Mapping[str, np.ndarray]
"""Arrays of one layer's network by their names in the file."""

WITHIN = "model.safetensors"
"""The file that is read of a folder."""

MOST_BYTES = 1 << 30
"""Of a file of weights: more than those that are published for models of 70 billion parameters."""

_PIECE = 1 << 20
"""Numbers that are checked at a time."""


@dataclasses.dataclass(frozen=True, eq=False)
class Surrogate:
    """Weights of a network per layer. Equal if all numbers are; hashable, so that it can be a policy's hyperparameter.

    Attributes:
        layers: of each layer the arrays by name.
        digest: hash of all of them.
    """

    layers: tuple[Weights, ...] = dataclasses.field(repr=False)
    digest: str

    @classmethod
    def of(cls, layers: Sequence[Weights]) -> Self:
        """That of some arrays.

        Raises:
            ValueError: there is no layer, a layer's arrays have other names than another's, or one has numbers that are not finite, or a
                single number.
        """
        if not layers:
            raise ValueError("no layers")
        digest = hashlib.sha256()
        for i, layer in enumerate(layers):
            if layer.keys() != layers[0].keys():
                raise ValueError(
                    f"layer {i} has {', '.join(sorted(layer))}, but layer 0 {', '.join(sorted(layers[0]))}"
                )
            for name, array in sorted(layer.items()):
                if not array.ndim:
                    raise ValueError(f"{name} of layer {i} is a single number")
                digest.update(f"{i} {name} {array.shape} {array.dtype}".encode())
                for piece in np.split(array.reshape(-1), range(_PIECE, array.size, _PIECE)):
                    if not np.isfinite(piece.astype(np.float32)).all():
                        raise ValueError(f"{name} of layer {i} has numbers that are not finite")
                    digest.update(piece.tobytes())
        return cls(tuple(layers), digest.hexdigest()[:16])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Surrogate) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def require(self, name: str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `PolicyError` unless there is a network for each of a model's layers, of these shapes."""
        if len(self.layers) != config.num_layers:
            raise PolicyError(f"{name}: weights for {len(self.layers)} layers, but this model has {config.num_layers}")
        for i, layer in enumerate(self.layers):
            found = {array: tuple(layer[array].shape) for array in layer}
            if found != dict(shapes):
                raise PolicyError(
                    f"{name}: layer {i} has weights {found}, but for this model they are {dict(shapes)}; give those that were trained for it"
                )


def load(path: str, read: Callable[[Path], Sequence[Weights]]) -> Surrogate:
    """Weights from a file, or from `WITHIN` of a folder, which `read` knows the layout of. A file that has not changed is read once.

    Raises:
        PolicyError: they are not in that layout, or have more than `MOST_BYTES`.
        OSError: there is no such file, it is not a regular one, or it cannot be read.
    """
    file = user_files.expanded(path)
    if (file / WITHIN).exists():
        file /= WITHIN
    try:
        user_files.check(file, MOST_BYTES)
    except ValueError as error:
        raise PolicyError(str(error)) from None
    about = file.stat()
    return _load(file, read, (about.st_mtime_ns, about.st_size))


@functools.lru_cache(maxsize=4)
def _load(path: Path, read: Callable[[Path], Sequence[Weights]], state: Any) -> Surrogate:
    try:
        return Surrogate.of(read(path))
    except ValueError as error:
        raise PolicyError(f"{path}: {error}") from None


@dataclasses.dataclass(frozen=True)
class SurrogateScorer(PromptScorer):
    """Base of methods that score a prompt's tokens by a network.

    Class attributes:
        source: where published weights are, for errors.
        reads: names that the matrix may have that reads what attention reads.

    Attributes:
        budget: slots for the prompt in the average head: a number of tokens, or a fraction of prompt + new tokens. A prompt within it is
            kept whole.
        weights: a `Surrogate`, or the path of published weights.
        scope: whether the heads of a "layer" share their budgets, or each "head" has its own.
        sinks: first tokens, which are kept.
    """

    keeps_highest: ClassVar[bool] = False
    scores_whole_prompts: ClassVar[bool] = True
    source: ClassVar[str] = ""
    reads: ClassVar[tuple[str, ...]] = ()

    weights: Surrogate | str | None = None
    scope: Literal["layer", "head"] = "layer"
    sinks: int = 0

    def __post_init__(self) -> None:
        check_fields(self, sinks=0)
        if not isinstance(self.weights, Surrogate | str | None):
            raise PolicyError(f"{self.info.name}: weights={self.weights!r}; give a Surrogate, or the path of a file")

    @staticmethod
    def read(path: Path) -> Sequence[Weights]:
        """A file's arrays, by layer and name.

        Raises:
            ValueError: it is not in the published layout.
        """
        raise NotImplementedError

    def shapes(self, config: ModelConfig, found: Surrogate) -> Mapping[str, tuple[int, ...]]:
        """What shapes a layer's arrays have in weights for a model; sizes that the model does not settle are those found."""
        raise NotImplementedError

    def predicted(
        self, weights: Mapping[str, Array], x: Float[Array, "B T D"], heads: Int[Array, " K"]
    ) -> Float[Array, "B K T"]:
        """What tokens are worth to some of a layer's KV heads, by what attention reads, in float32."""
        raise NotImplementedError

    def recent(self, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        """How many last tokens are kept of prompts of these lengths, as far as the budget goes."""
        return jnp.zeros_like(lengths)

    def bind(self, config: ModelConfig) -> Policy:
        """The policy with the weights themselves."""
        found = load(self.weights, self.read) if isinstance(self.weights, str) else self.weights
        if found is None:
            raise missing_weights(self)
        found.require(self.info.name, config, self.shapes(config, found))
        return dataclasses.replace(self, weights=found)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        if spec.window is not None:
            return DenseLayer(self, spec)
        if self.scope == "head":
            return SurrogateLayer(self, spec)
        return SharedSurrogateLayer(self, spec)

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0 + self.sinks, budget * 0

    def keep_mask(
        self,
        scores: Float[Array, "B K T"],
        lengths: Int[Array, " B"],
        budget: Int[Array, " B"],
        pos: Int[Array, "B #K T"] | None = None,
    ) -> Bool[Array, "B K T"]:
        first = self.sinks
        last = jnp.minimum(self.recent(lengths), budget - first)
        place = jnp.arange(scores.shape[-1], dtype=jnp.int32)
        live = jnp.broadcast_to((place < lengths[:, None])[:, None], scores.shape)
        ends = live & ((place < first) | (place >= (lengths - last)[:, None]))[:, None]
        whole = (lengths <= budget)[:, None, None]
        rivals = jnp.where(live & ~ends & ~whole, scores, -jnp.inf)
        if self.scope == "head":
            best = top_k(rivals, (budget - first - last)[:, None])
        else:
            flat = rivals.reshape(rivals.shape[0], -1)
            best = top_k(flat, (budget - first - last) * scores.shape[1]).reshape(scores.shape)
        return best & (rivals > -jnp.inf) | ends | live & whole

    def chosen(self, layer: PromptScorerLayer[Any], prompt: PromptKV, carry: Carry) -> Bool[Array, "B K T"]:
        """Which of a prompt's tokens one of its layers keeps."""
        spec = layer.spec
        assert isinstance(self.weights, Surrogate)
        x = jax.lax.stop_gradient(AttentionContext.of(carry, spec).inputs()).astype(jnp.float32)
        weights = self.weights.layers[spec.layer]
        width = next(weights[name].shape[1] for name in self.reads if name in weights)
        x = jnp.broadcast_to(x, (prompt.k.shape[0], prompt.size, width))  # without a model all inputs are alike
        x = jnp.where(prompt.live[:, 0, :, None], x, 0.0)
        heads = spec.head_ids if spec.kv_heads is None else jnp.asarray(spec.kv_heads)
        # Behind a barrier, or XLA would compute with such constants as it compiles.
        own = {name: jax.lax.optimization_barrier(jnp.asarray(array)) for name, array in weights.items()}
        own = {name: array.astype(jnp.float32) for name, array in own.items()}
        return layer.best(prompt, self.predicted(own, x, heads))[0]


def missing_weights(policy: Any) -> PolicyError:
    """The error of a policy that has no weights."""
    return PolicyError(
        f"{policy.info.name}: no weights are given, and none come with kvjax; give those of {policy.source} as weights=PATH"
    )


@dataclasses.dataclass(frozen=True)
class SurrogateLayer(PromptScorerLayer[SurrogateScorer]):
    """One layer of a `SurrogateScorer`, each of whose heads keeps as much."""

    @property
    def needs_context(self) -> bool:
        return True

    def chosen(self, prompt: PromptKV, carry: Carry) -> tuple[Bool[Array, "B K T"], Carry]:
        return self.policy.chosen(self, prompt, carry), carry


@dataclasses.dataclass(frozen=True)
class SharedSurrogateLayer(RaggedLayer[SurrogateScorer]):
    """One layer of a `SurrogateScorer`, whose heads share a store."""

    @property
    def needs_context(self) -> bool:
        return True

    def chosen(self, prompt: PromptKV, carry: Carry) -> tuple[Bool[Array, "B K T"], Carry]:
        return self.policy.chosen(self, prompt, carry), carry
