"""Prefill with replays: parts of a prompt are processed a second time for layers that declare it by `CacheLayer.replays`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, PromptKV, TokenBlock
from kvjax.conversion import turns
from kvjax.conversion.tokenizer import Tokenizer
from kvjax.models import Params, transformer
from kvjax.policies.attention_context import AttentionContext
from kvjax.policies.layer import CacheLayer, Carry, WrappedLayer
from kvjax.policies.replay import Part, Replay, as_prompt, held_whole, over_parts

Words = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
"""Tokens of instruction texts: the text, its tokens (before those of the previous part, if it ends with some), and the tokens that open an answer.
"""


def replays(layers: Sequence[CacheLayer[Any]]) -> tuple[Replay, ...]:
    """Replays that the layers declare, without duplicates."""
    return tuple(dict.fromkeys(replay for layer in layers for replay in layer.replays))


def told(layers: Sequence[CacheLayer[Any]], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What a `LayerSpec` contains of the tokenizer, by field."""
    return {"words": words_of(layers, tokenizer), "template": template_of(layers, tokenizer)}


def words_of(layers: Sequence[CacheLayer[Any]], tokenizer: Tokenizer | None) -> Words:
    """Tokens of the texts that ask for parts of a prompt, for `LayerSpec.words`; empty if the model has no tokenizer.

    They end with what the model's chat template puts after a question, if it has one.
    """
    texts = dict.fromkeys(text for replay in replays(layers) for text in (replay.first, replay.then) if text)
    if tokenizer is None or not texts:
        return ()

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special=False)) if text else ()

    opening = tokens(_opening(tokenizer))
    return tuple((text, tokens(text), opening) for text in texts)


def template_of(layers: Sequence[CacheLayer[Any]], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Tokens that the chat template puts before a user's text, for `LayerSpec.template`; empty if no replay skips them."""
    if tokenizer is None or tokenizer.chat_template is None:
        return ()
    if not any(replay.after_template for replay in replays(layers)):
        return ()
    try:
        before, _ = turns.split(tokenizer, [{"role": "user", "content": ""}], 0, "", "")
    except ValueError:
        return ()
    return tuple(tokenizer.encode(before, add_special=False)) if before else ()


def prefill(
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    total: Int[Array, " B"],
    layers: Sequence[CacheLayer[Any]],
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """`transformer.prefill` for layers that may declare replays.

    Until all replays are done, the whole cache is in memory in addition to the states of layers without replays. The
    asking words and the part use the positions after the prompt, the same for every part.
    """
    wanted = replays(layers)
    more = max(len(_asking(replay, layers)[0][0]) + replay.part_size(tokens.shape[1]) for replay in wanted)
    logits, read = transformer.prefill(params, tokens, lengths, total, [_First.of(layer, more) for layer in layers])
    held, prepared = [each.held for each in read], [each.prepared for each in read]
    carry: Carry = {}
    for replay in wanted:
        starts = replay.starts(layers[0].spec, tokens, lengths)
        found = _again(replay, starts, params, tokens, lengths, total, layers, held, prepared)
        carry = replay.with_starts(starts, carry)
        for layer, own in zip(layers, found, strict=True):
            if replay in layer.replays:
                carry = replay.with_observed(layer.spec.layer, own, carry, layer.key)
    states: list[Any] = []
    for layer, each in zip(layers, read, strict=True):
        state = each.state
        if layer.replays:
            state, carry = layer.prefill(as_prompt(layer.spec, each.held, tokens.shape[1], total), carry)
        states.append(state)
    return logits, tuple(states)


def _again(
    replay: Replay,
    starts: Int[Array, " B"],
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    total: Int[Array, " B"],
    layers: Sequence[CacheLayer[Any]],
    held: Sequence[Any],
    prepared: Sequence[dict[Replay, Any]],
) -> tuple[Any, ...]:
    """Run one replay and return what each layer observes; None for layers that do not declare it."""
    length, size = tokens.shape[1], replay.part_size(tokens.shape[1])
    asking, shown, counts = _asking(replay, layers)
    place = jnp.arange(asking.shape[1] + size, dtype=jnp.int32)

    def read(i: Int[Array, ""]) -> tuple[Any, ...]:
        kind, start = jnp.minimum(i, 1), starts + i * replay.chunk
        words = jnp.asarray(counts, jnp.int32)[kind]
        count = jnp.clip(lengths - start, 0, size)
        # The block consists of words, which may include the end of the previous part, and of the part.
        own = jnp.where(place < words, place - shown - replay.overlap, place - words)
        given = jnp.take_along_axis(tokens, jnp.clip(start[:, None] + own, 0, length - 1), axis=1)
        said = jnp.take(jnp.asarray(asking, jnp.int32), kind, axis=0)
        said = jnp.pad(said, (0, size))
        block = jnp.where((place < words) & (said >= 0), said, given)
        at = start, count, words
        number = jnp.where(count > 0, words + count, 0)
        given = params, held, block, lengths, number, total
        norms: Any = [None] * len(layers)
        if replay.needs_gradients:
            readers = [_Reading(layer.policy, layer.spec, inner=layer) for layer in layers]
            norms = list(transformer.attention_gradients(*given, readers))
        observers = [
            _Again(layer.policy, layer.spec, inner=layer, of=replay, at=at, prepared=own.get(replay), norms=norm)
            for layer, own, norm in zip(layers, prepared, norms, strict=True)
        ]
        return transformer.read_block(*given, observers)[1]

    return over_parts(replay, length, lengths - starts, read)


def _asking(replay: Replay, layers: Sequence[CacheLayer[Any]]) -> tuple[np.ndarray, int, list[int]]:
    """Words that ask for the first part and for the others.

    Returns:
        Token ids [2, W], with -1 for tokens of the previous part; the column where those begin; and the number of words
            in each row.
    """
    words = {text: (before, after) for text, before, after in layers[0].spec.words}
    (first, opening), (then, _) = (words.get(text, ((), ())) for text in (replay.first, replay.then))
    rows = [*first, *opening], [*then, *[-1] * replay.overlap, *opening]
    table = np.full((2, max(map(len, rows))), -1, np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table, len(then), [len(row) for row in rows]


class _Read(NamedTuple):
    """A layer's result of the first pass over a prompt.

    Attributes:
        held: full cache of the prompt; the state of a recurrent layer.
        state: the layer's state, if it declares no replays.
        prepared: what the layer's replays prepared, by replay.
    """

    held: Any
    state: Any
    prepared: dict[Replay, Any]


@dataclasses.dataclass(frozen=True)
class _First(WrappedLayer[Any]):
    """First pass: keeps the full cache of a prompt, and the state of a layer that declares no replays."""

    more: int = dataclasses.field(kw_only=True)

    @classmethod
    def of(cls, layer: CacheLayer[Any], more: int) -> Self:
        """That of a layer, with room for `more` tokens."""
        return cls(layer.policy, layer.spec, inner=layer, more=more)

    @property
    def needs_context(self) -> bool:
        return self.inner.needs_context or any(replay.needs_context for replay in self.inner.replays)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[_Read, Carry]:
        whole, replays = held_whole(self.spec, prompt, self.more), self.inner.replays
        if not replays:
            state, carry = self.inner.prefill(prompt, carry)
            return _Read(whole, state, {}), carry
        around = {replay: AttentionContext.of(carry, self.spec) if replay.needs_context else None for replay in replays}
        return _Read(
            whole, None, {replay: replay.prepare(self.spec, whole, around[replay]) for replay in replays}
        ), carry

    def advance(self, state: Any) -> _Read:
        return _Read(state, state, {})


@dataclasses.dataclass(frozen=True)
class _Reading(WrappedLayer[Any]):
    """Attention to a prompt's full cache and to the block, without an observer. Recurrent layers go on from the prompt."""

    @property
    def needs_context(self) -> bool:
        return False

    def read_block(
        self, state: LayerCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], Any, Carry]:
        return cache.attend_block(self.spec, cache.insert_block(state, block), block), None, carry

    def advance(self, state: Any) -> None:
        return None


@dataclasses.dataclass(frozen=True)
class _Again(WrappedLayer[Any]):
    """Second pass: processes a part again, and returns what the layer observes instead of a state."""

    of: Replay = dataclasses.field(kw_only=True)
    at: tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, ""]] = dataclasses.field(kw_only=True)
    prepared: Any = dataclasses.field(kw_only=True)
    norms: Float[Array, "B R"] | None = dataclasses.field(kw_only=True)

    @property
    def needs_context(self) -> bool:
        return self.of.needs_context

    def read_block(
        self, state: LayerCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], Any, Carry]:
        out = cache.attend_block(self.spec, cache.insert_block(state, block), block)
        if self.of not in self.inner.replays:
            return out, None, carry
        around = AttentionContext.of(carry, self.spec) if self.of.needs_context else None
        return out, self.of.observe(self.spec, Part(state, block, *self.at, around, self.prepared, self.norms)), carry

    def advance(self, state: Any) -> None:
        return None


def _opening(tokenizer: Tokenizer) -> str:
    """Text that the model's chat template puts after a question, which opens the answer; empty if there is none."""
    if tokenizer.chat_template is None:
        return ""
    try:
        return turns.following(tokenizer, [{"role": "user", "content": "a question"}], 0)
    except ValueError:
        return ""
