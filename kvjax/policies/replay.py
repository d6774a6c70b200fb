"""Replays: reading parts of a prompt again, to learn which tokens to keep.

The model first prefills the prompt and keeps it whole. It then reads parts of the prompt again, each behind words that
ask for it. These tokens attend to the whole prompt and, causally, to themselves. No layer caches them, but a method's
`Replay` observes them. When `prefill` chooses from the prompt, the carry has the observations of all layers.
`kvjax.runtime.replay` runs the passes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, TokenBlock

from .attention_context import AttentionContext

Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True)
class Part:
    """What one layer sees while a part is read again. B rows, T tokens of the prompt, R tokens that are read now.

    Attributes:
        held: cache with the whole prompt in its first T slots, with rotated keys, followed by R free slots.
        block: the tokens that are read: words, then the part.
        start: position of the part's first token in each row.
        count: the part's tokens in each row: 0 in rows that end before it.
        words: tokens of the block before the part.
        around: attention inputs and output projection, for a `Replay` that declares `needs_context`.
        prepared: result of `Replay.prepare`.
        sensitivity: for a `Replay` that `needs_gradients`, norm of the gradient at each token of the block
            (`transformer.attention_gradients`). None without a model.
    """

    held: LayerCache
    block: TokenBlock
    start: Int[Array, " B"]
    count: Int[Array, " B"]
    words: Int[Array, ""]
    around: AttentionContext | None = None
    prepared: Any = None
    sensitivity: Float[Array, "B R"] | None = None


@dataclasses.dataclass(frozen=True)
class Replay:
    """How a prompt is read again, and what is observed (`CacheLayer.replays`). Layers with equal replays share a pass.

    Attributes:
        chunk: tokens of the prompt in each part.
        overlap: last tokens of the previous part that the words repeat at their end.
        skipped: first tokens, which are in no part.
        after_template: whether the first tokens of the chat template (`LayerSpec.template`), as far as a row begins
            with them, are in no part, either.
        first, then: words that ask for the first part, and for each later part. A model without a tokenizer reads none.
        needs_context: whether `prepare` and `observe` need the attention inputs and output projection.
        needs_gradients: whether `observe` needs `Part.sensitivity`, which takes a second and a backward pass of each part.
    """

    needs_gradients: ClassVar[bool] = False

    chunk: int
    overlap: int = 0
    skipped: int = 0
    first: str = ""
    then: str = ""
    needs_context: bool = False
    after_template: bool = False

    def prepare(self, spec: LayerSpec, held: LayerCache, around: AttentionContext | None) -> Any:
        """Return what one layer computes from a prompt once, before parts are read. It becomes `Part.prepared`.

        Args:
            spec: the layer's static shapes and model facts.
            held: as in `Part`.
            around: as in `Part`, from the first pass over the prompt.
        """
        return None

    def observe(self, spec: LayerSpec, part: Part) -> Any:
        """Return what one layer learns from one part: any arrays, with zeros in rows that read nothing."""
        raise NotImplementedError

    def parts(self, size: int) -> int:
        """Number of parts of prompts padded to `size` tokens, at least 1."""
        return max(-(-(size - self.skipped) // self.chunk), 1)

    def part_size(self, size: int) -> int:
        """Maximum number of tokens of a part of prompts padded to `size` tokens."""
        return max(min(self.chunk, size - self.skipped), 1)

    def with_observed(self, layer: int, found: Any, carry: dict[str, Any], key: str = "") -> dict[str, Any]:
        """Return the carry with the observations of one layer.

        Args:
            layer: index of the layer.
            found: observations of all parts, stacked along a new first axis.
            carry: values of earlier layers.
            key: `CacheLayer.key` of the layer, equal for layers of one policy.
        """
        every = carry.get(repr(self), {})
        return {**carry, repr(self): {**every, key: {**every.get(key, {}), layer: found}}}

    def starts(self, spec: LayerSpec, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        """Position of the first part in each row of right-padded prompts."""
        template = spec.template[: tokens.shape[1]] if self.after_template else ()
        same = tokens[:, : len(template)] == jnp.asarray(template, tokens.dtype)
        common = jnp.sum(jnp.cumprod(same, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
        return jnp.minimum(jnp.maximum(common, self.skipped), lengths).astype(jnp.int32)

    def with_starts(self, starts: Int[Array, " B"], carry: dict[str, Any]) -> dict[str, Any]:
        """Return the carry with the position of the first part in each row."""
        return {**carry, f"{self!r} starts": starts}

    def starts_in(self, carry: dict[str, Any]) -> Int[Array, " B"]:
        """Return the position of the first part in each row."""
        return carry[f"{self!r} starts"]

    def found(self, carry: dict[str, Any], key: str | None = None) -> dict[int, Any] | None:
        """Return the observations by layer, or None if there was no replay.

        Args:
            carry: values of earlier layers.
            key: key of the layers to return. None for all.
        """
        every = carry.get(repr(self), {})
        keys = [key] if key in every else [] if key is not None else list(every)
        return {layer: each for key in keys for layer, each in every[key].items()} or None


def over_parts(replay: Replay, size: int, count: Int[Array, " B"], read: Callable[[Int[Array, ""]], Found]) -> Found:
    """Stack what `read` returns for each part along a new first axis. Parts that no row has are zeros.

    Args:
        replay: declares the parts.
        size: length that prompts are padded to.
        count: tokens in the parts of each row.
        read: called with the index of a part.
    """
    shapes = jax.eval_shape(read, jnp.zeros((), jnp.int32))
    start = jax.tree.map(lambda x: jnp.zeros((replay.parts(size), *x.shape), x.dtype), shapes)
    parts = jnp.clip(-(-jnp.max(count) // replay.chunk), 0, replay.parts(size))

    def add(i: Int[Array, ""], found: Found) -> Found:
        return jax.tree.map(lambda every, one: jax.lax.dynamic_update_index_in_dim(every, one, i, 0), found, read(i))

    return jax.lax.fori_loop(jnp.zeros_like(parts), parts, add, start)


def held_whole(spec: LayerSpec, prompt: PromptKV, more: int) -> LayerCache:
    """Return a cache with all tokens of a prompt, followed by `more` free slots."""
    return cache.extended(cache.from_prompt(spec, prompt.size, prompt), more)


def as_prompt(spec: LayerSpec, held: LayerCache, size: int, total: Int[Array, " B"]) -> PromptKV:
    """Return the prompt whose keys and values are in the first `size` slots, without queries or unrotated keys."""
    k, v = (jnp.swapaxes(x[:, :, :size], 1, 2) for x in (held.k, held.v))
    none = jnp.zeros((spec.batch, 0, spec.num_heads, spec.head_dim), k.dtype)
    return PromptKV(none, k, v, none, k, held.pos[:, :, :size], held.seen, held.seen, total)


def without_model(replay: Replay, spec: LayerSpec, prompt: PromptKV) -> Any:
    """Return what one layer would observe without words and with the first pass's queries, keys and values.

    For a layer without a model, as in benchmarks of layers.
    """
    size = replay.part_size(prompt.size)
    held = held_whole(spec, prompt, size)
    q, k, v = (jnp.pad(x, ((0, 0), (0, size), (0, 0), (0, 0))) for x in (prompt.q, prompt.k, prompt.v))
    around = AttentionContext.alone(spec)
    prepared = replay.prepare(spec, held, around)

    def read(i: Int[Array, ""]) -> Any:
        at = replay.skipped + i * replay.chunk
        start = jnp.full_like(prompt.lengths, at)
        count = jnp.clip(prompt.lengths - start, 0, size)
        own_q, own_k, own_v = (jax.lax.dynamic_slice_in_dim(x, at, size, axis=1) for x in (q, k, v))
        block = TokenBlock(own_q, own_k, own_v, prompt.lengths, count, prompt.total, spec.rope, prompt.sinks)
        return replay.observe(spec, Part(held, block, start, count, jnp.zeros((), jnp.int32), around, prepared))

    return over_parts(replay, prompt.size, prompt.lengths - replay.skipped, read)
