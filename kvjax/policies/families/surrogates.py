"""Surrogates: scorers with small networks that predict token scores, trained for one model.

The networks read the normed hidden states that a layer's attention reads. They need no queries, keys or values. The
methods' authors publish the weights as files.
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
from kvjax.cache import LayerSpec, PromptKV, Token
from kvjax.config import ModelConfig
from kvjax.pallas_kernels import top_k

from ..attention_context import AttentionContext
from ..base import Policy
from ..fields import check_fields
from ..info import PolicyError, PolicyInfo, not_bound
from ..layer import CacheLayer, Carry
from .dense import DenseLayer
from .ragged import RaggedLayer
from .scoring import PromptScorer, PromptScorerLayer, ScoreEviction

Weights = Mapping[str, np.ndarray]
"""Arrays of one layer's network, by their names in the file."""

WITHIN = "model.safetensors"
"""The file that is read from a folder."""

MOST_BYTES = 1 << 30
"""Maximum size of a file of weights, above all published ones (models of up to 70 billion parameters)."""

_PIECE = 1 << 20
"""Numbers that are checked at a time."""


@dataclasses.dataclass(frozen=True, eq=False)
class Surrogate:
    """Weights of the networks of KVzap or Fast KVzip, one per layer. Hashable and compared by value, so that it can be a hyperparameter.

    Attributes:
        layers: the arrays of each layer, by name.
        digest: hash of all arrays.
    """

    layers: tuple[Weights, ...] = dataclasses.field(repr=False)
    digest: str

    @classmethod
    def of(cls, layers: Sequence[Weights]) -> Self:
        """Make a surrogate from arrays.

        Raises:
            ValueError: there is no layer, layers have arrays of different names, or an array is a scalar or has numbers
                that are not finite.
        """
        if not layers:
            raise ValueError("no layers")
        digest = hashlib.sha256()
        for i, layer in enumerate(layers):
            if layer.keys() != layers[0].keys():
                raise ValueError(
                    f"layer {i} has {', '.join(sorted(layer))}, but layer 0 has {', '.join(sorted(layers[0]))}"
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
        """Raise `PolicyError` unless there is a network of these shapes for each layer of the model."""
        if len(self.layers) != config.num_layers:
            raise PolicyError(
                f"{name}: the weights have {len(self.layers)} layers, but this model has {config.num_layers}. Give weights trained for it."
            )
        for i, layer in enumerate(self.layers):
            found = {array: tuple(layer[array].shape) for array in layer}
            if found != dict(shapes):
                raise PolicyError(
                    f"{name}: layer {i} has weights {found}, but this model needs {dict(shapes)}. Give weights trained for it."
                )


def load(path: str, read: Callable[[Path], Sequence[Weights]]) -> Surrogate:
    """Load weights from a file, or from `WITHIN` of a folder. An unchanged file is read once.

    Args:
        path: file or folder.
        read: parses the file's layout.

    Raises:
        PolicyError: the file has another layout, or more than `MOST_BYTES`.
        OSError: the file does not exist, is not a regular file, or cannot be read.
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
        source: where weights are published, for errors.
        reads: possible names of the matrix that multiplies the attention inputs.

    Attributes:
        budget: slots for the prompt in the average head: a number of tokens, or a fraction of prompt + new tokens. A
            prompt within it is kept whole.
        weights: a `Surrogate`, or the path of published weights.
        scope: whether the heads of a "layer" share their budgets, or each "head" has its own.
        sinks: first tokens, always kept.

    A score depends on the token's attention inputs alone, so `thresholded` is supported, also while decoding.
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
            raise PolicyError(f"{self.info.name}: weights={self.weights!r} is not valid. Give a Surrogate or a path.")

    @property
    def token_scorer(self) -> "Predicted":
        return Predicted(self.budget, network=self)

    @staticmethod
    def read(path: Path) -> Sequence[Weights]:
        """Read a file's arrays, by layer and name.

        Raises:
            ValueError: the file does not have the published layout.
        """
        raise NotImplementedError

    def shapes(self, config: ModelConfig, found: Surrogate) -> Mapping[str, tuple[int, ...]]:
        """Shapes that a layer's arrays must have for a model. Sizes that it leaves open are taken from `found`."""
        raise NotImplementedError

    def predicted(
        self, weights: Mapping[str, Array], x: Float[Array, "B T D"], heads: Int[Array, " K"]
    ) -> Float[Array, "B K T"]:
        """Predicted scores of tokens for some of a layer's KV heads, from the attention inputs `x`, in float32."""
        raise NotImplementedError

    def recent(self, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        """Number of last tokens that are kept of prompts of these lengths, as far as the budget allows."""
        return jnp.zeros_like(lengths)

    def bind(self, config: ModelConfig) -> Policy:
        """Return the policy with its weights loaded."""
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
        """Which tokens of a prompt one of the policy's layers keeps."""
        return layer.best(prompt, self.prompt_scores(layer.spec, prompt, carry))[0]

    def prompt_scores(self, spec: LayerSpec, prompt: PromptKV, carry: Carry) -> Float[Array, "B K T"]:
        """Scores of the tokens of a prompt, or of a block behind kept tokens, whose scores are then arbitrary."""
        x = AttentionContext.of(carry, spec).inputs()
        if prompt.before and x.shape[1] > 1:
            x = jnp.pad(x, ((0, 0), (prompt.before, 0), (0, 0)))
        size = (prompt.k.shape[0], prompt.size, self._width(spec))
        x = jnp.broadcast_to(x, size)  # without a model, all inputs are equal
        return self.scores_of(spec, jnp.where(prompt.live[:, 0, :, None], x, jnp.zeros((), x.dtype)))

    def _width(self, spec: LayerSpec) -> int:
        """Number of attention inputs that a layer's network reads."""
        weights = self._network(spec)
        return next(weights[name].shape[1] for name in self.reads if name in weights)

    def scores_of(self, spec: LayerSpec, x: Float[Array, "B T D"]) -> Float[Array, "B K T"]:
        """Scores of tokens by their attention inputs, for the layer's KV heads."""
        x, weights = jax.lax.stop_gradient(x).astype(jnp.float32), self._network(spec)
        heads = spec.head_ids if spec.kv_heads is None else jnp.asarray(spec.kv_heads)
        # The barrier keeps XLA from constant folding with the weights while it compiles.
        own = {name: jax.lax.optimization_barrier(jnp.asarray(array)) for name, array in weights.items()}
        own = {name: array.astype(jnp.float32) for name, array in own.items()}
        return self.predicted(own, x, heads)

    def _network(self, spec: LayerSpec) -> Weights:
        """Weights of a layer's network."""
        if not isinstance(self.weights, Surrogate):
            raise not_bound(self.info)
        return self.weights.layers[spec.layer]


@dataclasses.dataclass(frozen=True)
class Predicted(ScoreEviction):
    """A `SurrogateScorer` that scores each token when it comes, prompt and new tokens alike, for `thresholded`.

    Attributes:
        budget: slots in total.
        network: predicts the scores.
    """

    needs_inputs: ClassVar[bool] = True

    network: SurrogateScorer = dataclasses.field(kw_only=True)

    @property
    def info(self) -> PolicyInfo:
        """The network's, but the budget is for all tokens, in each head."""
        return dataclasses.replace(
            self.network.info, stage="both", budget_excludes_new_tokens=False, heads_coupled=False
        )

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return self.network.always_kept(budget)

    def prompt_scores(self, spec: LayerSpec, prompt: PromptKV, carry: Carry) -> Float[Array, "B K T"]:
        return self.network.prompt_scores(spec, prompt, carry)

    def initial_score(self, spec: LayerSpec, token: Token) -> Float[Array, "B K"]:
        if token.inputs is None:
            raise PolicyError(
                f"{self.info.name}: a token has no attention inputs. Use kvjax.Engine, or give Token(inputs=...) to a single layer."
            )
        return self.network.scores_of(spec, token.inputs[:, None])[..., 0]


def missing_weights(policy: Any) -> PolicyError:
    """Return the error of a policy without weights."""
    return PolicyError(
        f"{policy.info.name}: no weights are given, and none come with kvjax. Give those of {policy.source} as weights=PATH."
    )


@dataclasses.dataclass(frozen=True)
class SurrogateLayer(PromptScorerLayer[SurrogateScorer]):
    """One layer of a `SurrogateScorer` whose heads all keep equally many tokens."""

    @property
    def needs_context(self) -> bool:
        return True

    def chosen(self, prompt: PromptKV, carry: Carry) -> tuple[Bool[Array, "B K T"], Carry]:
        return self.policy.chosen(self, prompt, carry), carry


@dataclasses.dataclass(frozen=True)
class SharedSurrogateLayer(RaggedLayer[SurrogateScorer]):
    """One layer of a `SurrogateScorer` whose heads share a store."""

    @property
    def needs_context(self) -> bool:
        return True

    def chosen(self, prompt: PromptKV, carry: Carry) -> tuple[Bool[Array, "B K T"], Carry]:
        return self.policy.chosen(self, prompt, carry), carry
