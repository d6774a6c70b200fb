"""`KeptState`: the cache that a sequence ended with, to look at and to continue from."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import numpy as np
from jaxtyping import Float, Int

from kvjax.cache import LayerCache, LayerSpec
from kvjax.models import Params
from kvjax.policies import Policy
from kvjax.policies.layer import kept_slots
from kvjax.runtime.batch import Batch, Job
from kvjax.runtime.decoding import CHUNK
from kvjax.runtime.prompts import check_ids, question_ids
from kvjax.runtime.request import RequestOptions, check_request
from kvjax.runtime.row import StopReason
from kvjax.runtime.rows import Reading


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What `KeptState.generate` returns.

    Attributes:
        text: the new text; None if the model has no tokenizer.
        tokens: new token ids, including a sampled end token.
        logprobs: log-probability of each token under the model, before temperature and filters.
        stop_reason: "eos" or "length".
        state: the cache afterwards.
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    state: "KeptState"


@dataclasses.dataclass(frozen=True, repr=False)
class KeptState:
    """The cache of one sequence, copied to the host. `kvjax.generate(..., return_state=True)` makes it.

    L layers, K KV heads of a layer, C slots of a layer's cache. Layers may differ in K and C.

    Attributes:
        tokens: ids of all tokens that the cache has processed, kept or not, n: the prompt, the question, and the sampled
            tokens but the last.
        next_token: the last sampled token, which is not in the cache.
        policy: the policy, bound to the model.
        specs: description of each layer.
        caches: the policy's state for each layer, as NumPy arrays with one row.
        after: how many of `tokens` came after the prompt.

    Example:
        >>> prompt = [5, 9, 2] * 16
        >>> result = kvjax.generate(params, prompt, "snapkv:16,window=8", max_new_tokens=8, return_state=True)
        >>> state = result.state
        >>> len(state.tokens), len(state.caches)  # the prompt and all new tokens but the last; layers
        (55, 2)
    """

    tokens: list[int]
    next_token: int
    policy: Policy
    specs: tuple[LayerSpec, ...]
    caches: tuple[Any, ...]
    after: int = 0

    def __repr__(self) -> str:
        """Numbers of tokens."""
        counts = np.concatenate([held.reshape(-1) for held in self.counts])
        return (
            f"KeptState({self.policy.info.name}, {len(self.tokens)} tokens processed, {counts.min()} to {counts.max()} kept "
            f"per head, room for {self.room} more)"
        )

    @property
    def slots(self) -> tuple[LayerCache, ...]:
        """Each cached layer's keys, values, positions and weights, with a row axis of 1. See `kvjax.cache.LayerCache`."""
        caches = jax.tree.map(jax.numpy.asarray, self.caches)
        return kept_slots(map(self.policy.layer, self.specs), caches)

    @property
    def positions(self) -> tuple[Int[np.ndarray, "K C"], ...]:
        """Original position of each slot's token, in each cached layer; -1 if the slot is free.

        A merged slot has the position of its latest token.
        """
        return tuple(np.where(np.asarray(held.live)[0], np.asarray(held.pos)[0], -1) for held in self.slots)

    @property
    def counts(self) -> tuple[Int[np.ndarray, " K"], ...]:
        """Number of kept slots of each head, in each cached layer."""
        return tuple((positions >= 0).sum(axis=-1) for positions in self.positions)

    @property
    def scores(self) -> tuple[Float[np.ndarray, "K C"] | None, ...]:
        """The policy's score of each slot, in each layer, such as the attention mass of H2O and CaM. None without scores.

        Of `by_head`, scores are NaN for heads whose policy has none.
        """
        caches = jax.tree.map(jax.numpy.asarray, self.caches)
        found = (self.policy.layer(spec).slot_scores(state) for spec, state in zip(self.specs, caches, strict=True))
        return tuple(None if score is None else np.asarray(score)[0] for score in found)

    @property
    def room(self) -> int:
        """How many more tokens can be processed, `next_token` included. `kvjax.generate(..., room=...)` makes more."""
        return self.specs[0].new_tokens - self.after

    def generate(
        self,
        params: Params,
        max_new_tokens: int = 128,
        given: str | Sequence[int] = (),
        **options: Unpack[RequestOptions],
    ) -> Continuation:
        """Continue the sequence. The state itself remains usable.

        Args:
            params: the model that the state is of.
            max_new_tokens: maximum number of tokens to sample.
            given: text or token ids that follow `next_token` before any is sampled.
            options: sampling options of `kvjax.generate`, without `stop` and `sampler`.

        Returns:
            The new tokens, and the state after them.

        Raises:
            ValueError: there is not enough room, the model has other shapes, or an option is out of range.
        """
        if options.get("stop"):
            raise ValueError("stop strings are not supported here; cut the text yourself, or use kvjax.Session")
        if options.get("sampler") is not None:
            raise ValueError("sampler is not supported here; give temperature and filters, or use kvjax.generate")
        request = check_request(params, max_new_tokens, **options)
        if isinstance(given, str) and given:
            (given,) = question_ids(params, given, None)
        check_ids([list(given)], 1, len(given), params.config.vocab_size, "given row", least=0)
        first = [self.next_token, *map(int, given)]
        if len(first) + request.max_new_tokens - 1 > self.room:
            raise ValueError(
                f"{len(first)} given and {request.max_new_tokens} new tokens need room for {len(first) + request.max_new_tokens - 1} tokens, "
                f"but this state has room for {self.room}; ask for fewer, or call kvjax.generate with a larger room="
            )
        spec = self.specs[0]
        batch = Batch(
            params,
            self.policy,
            rows=1,
            prompt_len=spec.prompt_len,
            max_new_tokens=spec.new_tokens,
            given=len(first),
            ends=max(len(request.ends), 1),
            sampling=request.sampler.filters,
            block=spec.block or None,
            mixed=spec.mixed,
        )
        if batch.engine.shard.mesh is not None:
            raise ValueError("params are on a mesh, where a state cannot be continued; give weights on one device")
        if batch.reader != self.specs:
            raise ValueError("params are a model of other shapes than the one this state is of; give that model")
        logits: Any = np.zeros((1, params.config.vocab_size), np.float32)
        pos: Any = np.asarray([len(self.tokens)], np.int32)
        reading = Reading(jax.tree.map(jax.numpy.asarray, self.caches), logits, pos)
        job = Job(self.tokens, request.max_new_tokens, first, request.seed, request.ends, request.sampler)
        batch.insert(reading, job, 0)
        tokens: list[int] = []
        logprobs: list[float] = []
        live = True
        while live:
            call = batch.serve(CHUNK)
            count, live = int(call.filled[0]), bool(call.live[0])
            tokens += np.asarray(call.tokens)[0, :count].tolist()
            logprobs += np.asarray(call.logprobs)[0, :count].tolist()
        state = kept(batch, 0, [*self.tokens, *first], tokens, self.after)
        text = None if params.tokenizer is None else params.tokenizer.decode_after([*self.tokens, *first], tokens)
        return Continuation(text, tokens, logprobs, "eos" if tokens[-1] in request.ends else "length", state)


def kept(batch: Batch, row: int, given: Sequence[int], tokens: Sequence[int], before: int = 0) -> KeptState:
    """Copy the state of a row that has ended to the host.

    Args:
        batch: the batch.
        row: the row.
        given: tokens before the sampled ones.
        tokens: sampled tokens.
        before: tokens that were processed one by one before the row was inserted.
    """
    caches, count, after = batch.copy_row(row)
    processed = list(map(int, [*given, *tokens][:count]))
    specs = tuple(spec.whole for spec in batch.reader)
    return KeptState(processed, int(tokens[-1]), batch.policy, specs, caches, before + after)
