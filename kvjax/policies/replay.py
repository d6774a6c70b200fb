"""Reading a prompt once more: what a method declares that learns from it what to keep.

The model first reads a prompt as ever, and keeps it whole. Then it reads parts of it again, each behind words that ask for it, which see the
whole prompt and themselves; of that no layer keeps anything, but a method's `Replay` observes it. What was observed in all layers
is in the carry when their `prefill` chooses from the prompt. `kvjax.runtime.replay` has the model do so.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, TokenBlock

from .attention_context import AttentionContext

Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True)
class Part:
    """What one layer sees of a part of a prompt that is read again. B rows, T places of the prompt, R tokens that are read now.

    Attributes:
        held: the whole prompt in its first T slots with rotated keys, in as many as it has tokens, and R slots more.
        block: the tokens that are read: words, and then the part.
        start: position of the part's first token in the prompt, the same in all rows.
        count: the part's tokens in each row; none in rows that end before it, which read nothing now.
        words: tokens of the block before the part's.
        around: what the model has around attention, for a `Replay` that says so.
        prepared: what `Replay.prepare` has made of the prompt.
    """

    held: LayerCache
    block: TokenBlock
    start: Int[Array, ""]
    count: Int[Array, " B"]
    words: Int[Array, ""]
    around: AttentionContext | None = None
    prepared: Any = None


@dataclasses.dataclass(frozen=True)
class Replay:
    """How a prompt is read again, and what is learnt from it: `CacheLayer.replays` has it. Layers that declare equal ones share a reading.

    Attributes:
        chunk: tokens of the prompt that are read again at a time.
        overlap: tokens of the part before, with which the words end that ask for a part.
        skipped: first tokens, which are in no part.
        first, then: the words that ask for the first part, and for another one. A model without a tokenizer reads none.
        surroundings: whether `prepare` and `observe` look at what is around attention.
    """

    chunk: int
    overlap: int = 0
    skipped: int = 0
    first: str = ""
    then: str = ""
    needs_context: bool = False

    def prepare(self, spec: LayerSpec, held: LayerCache, around: AttentionContext | None) -> Any:
        """What one layer makes of a prompt once, before parts are read: `Part.prepared` of all of them.

        Args:
            held: as in `Part`.
            around: as in `Part`, when the prompt was first read.
        """
        return None

    def observe(self, spec: LayerSpec, part: Part) -> Any:
        """What one layer learns from one part: any arrays, zeros from rows that read nothing."""
        raise NotImplementedError

    def parts(self, size: int) -> int:
        """How many parts there are of prompts padded to so many tokens: one at least."""
        return max(-(-(size - self.skipped) // self.chunk), 1)

    def part_size(self, size: int) -> int:
        """The most tokens of a part of such prompts."""
        return max(min(self.chunk, size - self.skipped), 1)

    def with_observed(self, layer: int, found: Any, carry: dict[str, Any], key: str = "") -> dict[str, Any]:
        """The carry with what a layer has learnt: from all parts, one after the other along a new first axis.

        Args:
            key: the layer's (`CacheLayer.key`), the same of layers of one policy.
        """
        every = carry.get(repr(self), {})
        return {**carry, repr(self): {**every, key: {**every.get(key, {}), layer: found}}}

    def found(self, carry: dict[str, Any], key: str | None = None) -> dict[int, Any] | None:
        """What the layers that read again have learnt, by layer; None if there was no reading.

        Args:
            key: of the layers that are wanted; None for all.
        """
        every = carry.get(repr(self), {})
        keys = [key] if key in every else [] if key is not None else list(every)
        return {layer: each for key in keys for layer, each in every[key].items()} or None


def over_parts(replay: Replay, size: int, lengths: Int[Array, " B"], read: Callable[[Int[Array, ""]], Found]) -> Found:
    """What `read` finds in each part, one after the other along a new first axis; zeros of parts that no row has.

    Args:
        size: what prompts are padded to.
        lengths: tokens in each row.
        read: called with the number of a part.
    """
    shapes = jax.eval_shape(read, jnp.zeros((), jnp.int32))
    start = jax.tree.map(lambda x: jnp.zeros((replay.parts(size), *x.shape), x.dtype), shapes)
    count = jnp.clip(-(-(jnp.max(lengths) - replay.skipped) // replay.chunk), 0, replay.parts(size))

    def add(i: Int[Array, ""], found: Found) -> Found:
        return jax.tree.map(lambda every, one: jax.lax.dynamic_update_index_in_dim(every, one, i, 0), found, read(i))

    return jax.lax.fori_loop(jnp.zeros_like(count), count, add, start)


def held_whole(spec: LayerSpec, prompt: PromptKV, more: int) -> LayerCache:
    """All tokens of a whole prompt, and so many free slots more."""
    return cache.extended(cache.from_prompt(spec, prompt.size, prompt), more)


def as_prompt(spec: LayerSpec, held: LayerCache, size: int, total: Int[Array, " B"]) -> PromptKV:
    """The prompt whose keys and values are in the first `size` slots; its queries, and keys before rotation, are gone."""
    k, v = (jnp.swapaxes(x[:, :, :size], 1, 2) for x in (held.k, held.v))
    none = jnp.zeros((spec.batch, 0, spec.num_heads, spec.head_dim), k.dtype)
    return PromptKV(none, k, v, none, k, held.pos[:, :, :size], held.seen, held.seen, total)


def without_model(replay: Replay, spec: LayerSpec, prompt: PromptKV) -> Any:
    """What one layer would learn if the model had for a part what it had when it read it first, and words were none.

    For a layer alone, as in benchmarks of layers, where no model is there to read.
    """
    size = replay.part_size(prompt.size)
    held = held_whole(spec, prompt, size)
    q, k, v = (jnp.pad(x, ((0, 0), (0, size), (0, 0), (0, 0))) for x in (prompt.q, prompt.k, prompt.v))
    around = AttentionContext.alone(spec)
    prepared = replay.prepare(spec, held, around)

    def read(i: Int[Array, ""]) -> Any:
        start = replay.skipped + i * replay.chunk
        count = jnp.clip(prompt.lengths - start, 0, size)
        own_q, own_k, own_v = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (q, k, v))
        block = TokenBlock(own_q, own_k, own_v, prompt.lengths, count, prompt.total, spec.rope)
        return replay.observe(spec, Part(held, block, start, count, jnp.zeros((), jnp.int32), around, prepared))

    return over_parts(replay, prompt.size, prompt.lengths, read)
