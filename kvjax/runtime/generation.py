"""Text in, text out: `generate` and `stream`."""

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.arguments import amount, short
from kvjax.cache import Shard, host_memory, layer_specs
from kvjax.conversion.tokenizer import Tokenizer
from kvjax.models import Params
from kvjax.models.sharding import bytes_per_device, get_mesh, mesh_of
from kvjax.policies import Full, Policy, PolicyError, get_policy
from kvjax.policies.capabilities import check_reads_blocks
from kvjax.policies.transforms.offload import fetched_bytes, hits
from kvjax.runtime import decoding
from kvjax.runtime.engine import Engine
from kvjax.runtime.growing_text import GrowingText
from kvjax.runtime.memory import device_bytes
from kvjax.runtime.mesh import on_host, policy_shard
from kvjax.runtime.processes import check_same, lost_processes
from kvjax.runtime.prompts import Message, Prompt, Question, asked_in_chats, question_ids, refuse_rows, token_ids
from kvjax.runtime.request import GenerateOptions, Request, RequestOptions, check_request, row_seeds

StopReason = Literal["eos", "length", "stop"]

BLOCK = 4096
"""Tokens of the blocks in which prompts are read that would not fit whole."""

STREAM_STEPS = 8
"""Tokens decoded between looks at the host, when text is streamed or stop strings are given."""


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """What one call did; of a batch, all rows together.

    Attributes:
        rows: prompts that were continued.
        prompt_tokens, new_tokens: tokens read and sampled.
        prefill_seconds, decode_seconds: time to run the two programs, compilation not included.
        compile_seconds: time to compile them, 0 when they were compiled before.
        cache_bytes: bytes the policy's cache holds on the device; on each device of a mesh.
        full_cache_bytes: bytes a full cache would hold there for the same prompts and new tokens.
        host_cache_bytes: bytes the policy's cache holds in the host's memory, if it is `offloaded`.
        step_bytes_read: bytes of it that attention reads in a decoding step; see `Policy.bytes_read`.
        hit_rate: share of the tokens that queries selected which were on the device already; None if none was looked for on
            the host. Rows that are done count until all are.
        fetched_bytes: bytes of keys and values that decoding needed from the host's memory, all steps together; of sparse layers those
            of selected tokens that were not on the device, not counting each row's first query.
        question_tokens: tokens read one by one after the prompts had been compressed.
        budget_applies: whether the policy has a budget; of one that has none, such as `full`, a `budget` that was given had no effect.
        prefill_block: tokens of the blocks that the prompts were read in; None if they were read whole.
        devices: over how many devices it ran.
        head_copies: how many of these held the same KV heads, with all slots, as there are fewer heads.
        slot_devices: how many of these shared the slots of the same KV heads.
        repeated_cache_bytes: of `cache_bytes`, what these held alike nevertheless: of layers whose slots cannot be dealt all, of others
            what is known of slots besides keys and values.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    cache_bytes: int
    full_cache_bytes: int
    host_cache_bytes: int
    step_bytes_read: int
    hit_rate: float | None
    fetched_bytes: int = 0
    question_tokens: int = 0
    budget_applies: bool = True
    prefill_block: int | None = None
    devices: int = 1
    head_copies: int = 1
    slot_devices: int = 1
    repeated_cache_bytes: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens read per second."""
        return self.prompt_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens read per second while decoding: of questions, and those sampled, but for the last of each row."""
        return (self.question_tokens + self.new_tokens - self.rows) / max(self.decode_seconds, 1e-9)


@dataclasses.dataclass(frozen=True, repr=False)
class Reply:
    """What a model wrote.

    Attributes:
        text: the new text, without special tokens and stop string; None for a model without tokenizer.
        tokens: the new token ids, the end token included if one was sampled.
        logprobs: each token's log-probability under the model, before temperature and filters.
        stop_reason: "eos" (sampled an end token), "stop" (produced a stop string, or sampled the special token that is one), or
            "length".
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason

    def __repr__(self) -> str:
        """All fields; of lists the beginning and how many there are."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        fields = (f"{name}={_listed(value) if isinstance(value, list) else repr(value)}" for name, value in values)
        return f"{type(self).__name__}({', '.join(fields)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Generation(Reply):
    """One continued prompt: a `Reply`, and what it took.

    Attributes:
        stats: what the call did.
    """

    stats: GenerationStats


# A string is also a sequence of strings; the first that fits is taken.
@overload
def generate(  # pyright: ignore[reportOverlappingOverload]
    params: Params,
    prompt: str | Sequence[int] | Sequence[Message],
    policy: str | Policy = ...,
    budget: int | float | None = ...,
    max_new_tokens: int = ...,
    *,
    question: Question | None = ...,
    **options: Unpack[GenerateOptions],
) -> Generation: ...
@overload
def generate(
    params: Params,
    prompt: Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Message]],
    policy: str | Policy = ...,
    budget: int | float | None = ...,
    max_new_tokens: int = ...,
    *,
    question: Sequence[Question] | None = ...,
    **options: Unpack[GenerateOptions],
) -> list[Generation]: ...
@overload
def generate(
    params: Params,
    prompt: Any,
    policy: str | Policy = ...,
    budget: int | float | None = ...,
    max_new_tokens: int = ...,
    *,
    question: Any = ...,
    **options: Unpack[GenerateOptions],
) -> Any: ...


def generate(
    params: Params,
    prompt: Prompt | Sequence[Prompt],
    policy: str | Policy = "full",
    budget: int | float | None = None,
    max_new_tokens: int = 128,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    question: Question | Sequence[Question] | None = None,
    prefill_block: int | None = None,
    mesh: Mesh | str | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Generation | list[Generation]:
    """Continue one prompt, or several at once.

    Everything is checked before anything is compiled or run. Numbers may be Python's, NumPy's or JAX's.

    Args:
        params: a model, from `kvjax.load`.
        prompt: text, token ids, or chat messages; or a list of any of these, or an array of token ids, a row each. Rows of a list
            may have any lengths: each gets what it would get alone.
        policy: how the KV cache is kept: a name (see `kvjax.policies()`) or a `Policy` with hyperparameters of your choice.
        budget: cache slots per head: a number of tokens, or a fraction of prompt + new tokens. None: the policy's default.
            A policy without one ignores it, as `GenerationStats.budget_applies` tells.
        max_new_tokens: most tokens to sample. A model with LongRoPE (Phi-3) has one rotation up to its original window and another one
            beyond. A sequence that grows beyond the window is read again with the other rotation, all that it has sampled included.
        temperature: 0 is greedy.
        top_k, top_p, min_p: filters on what may be sampled, see `kvjax.runtime.sampling.Sampling`.
        seed: with the same seed a prompt samples the same tokens; row i of a list samples as it would alone with `seed + i`. Any whole
            number will do; what counts is its remainder modulo 2**32.
        stop: strings that end the text where they appear (they are not part of it). A special token of the model, such as
            "<|im_end|>", is one by itself; the text of a special token is no part of a longer string.
        ignore_eos: go on past end tokens.
        question: text or token ids that follow the prompt (one for each prompt of a list), read only once the prompt has been
            compressed: what is kept of the prompt is chosen without knowing it. Its tokens count as new ones. After chat messages,
            the question is appended to the user's last message as it is, and is read together with the end of that message and the
            opening of the answer. If the last message is not the user's, the question is a message of the user's own.
        prefill_block: read prompts in blocks of so many tokens, each compressed together with what is kept of those before it, so that
            memory and time per token do not depend on a prompt's length. Tokens attend to what is kept and, causally, to their block.
            The first block of a prompt is the one that is not full. By default prompts are read whole, or in blocks of `BLOCK` where
            their keys and values would not fit beside the weights, as `GenerationStats.prefill_block` tells. Not for policies that
            choose from a prompt as a whole.
        mesh: devices to run over, as for `kvjax.Engine`. Load the weights there (`kvjax.load(..., mesh=...)`), or each call deals them anew.
        progress: called with the blocks of prompts that have been read, and all of them, where prompts are read in blocks.

    Returns:
        A `Generation`; for a list of prompts a list of them.

    Raises:
        ValueError: the prompt is empty, not of a known kind, or has a token id that is none of the model's, or an option is out of range.
            Of a list, all such prompts are named.
        PolicyError: the policy is unknown, or cannot work with this budget; for which prompts of a list.
    """
    request = check_request(params, max_new_tokens, temperature, top_k, top_p, min_p, seed, stop, ignore_eos)
    return Run(params, prompt, policy, budget, request, question, prefill_block, mesh=mesh, progress=progress).finish()


def stream(
    params: Params,
    prompt: Prompt,
    policy: str | Policy = "full",
    budget: int | float | None = None,
    max_new_tokens: int = 128,
    *,
    question: Question | None = None,
    prefill_block: int | None = None,
    mesh: Mesh | str | None = None,
    progress: Callable[[int, int], Any] | None = None,
    **options: Unpack[RequestOptions],
) -> Iterator[str]:
    """Continue one prompt and yield its text as it comes.

    The pieces joined are the `text` that `generate` returns for the same arguments; the generator's return value (what
    `yield from` evaluates to) is that `Generation`. Text that might turn out to be the beginning of a stop string or of a
    character is held back until it is known.

    Args and errors: as for `generate`.
    """
    request = check_request(params, max_new_tokens, **options)
    if params.tokenizer is None:
        raise ValueError("this model has no tokenizer, so there is no text to stream; call generate with token ids")
    how: dict[str, Any] = {"streamed": True, "mesh": mesh, "progress": progress}
    return _pieces(Run(params, prompt, policy, budget, request, question, prefill_block, **how))


def _pieces(run: "Run") -> Iterator[str]:
    text = run.rows[0].growing
    assert text is not None
    for _ in run.chunks(STREAM_STEPS):
        if piece := text.take():
            yield piece
    if rest := text.rest():
        yield rest
    return run.generations()[0]


def _listed(values: list[Any]) -> str:
    return repr(values) if len(values) <= 8 else f"[{', '.join(map(short, values[:6]))}, … {len(values)} in all]"


def automatic_block(
    params: Params, policy: Policy, shard: Shard, rows: int, longest: int, new_tokens: int
) -> int | None:
    """Tokens of a block where whole prompts would not fit and the policy can prefill in blocks; None for whole prompts.

    Args:
        policy: bound to the model.
        shard: how devices share the model with the policy's cache.
        rows: sequences that run together.
        longest: tokens of the longest prompt.
        new_tokens: maximum number of tokens that follow a prompt.
    """
    limit = device_bytes()
    if limit is None or longest <= BLOCK:
        return None
    held = Full().nbytes(params.config, -(-rows // shard.data), longest, new_tokens, params.dtype)
    if bytes_per_device(params) + held // (shard.heads * shard.slots) <= limit:
        return None
    specs = layer_specs(params.config, 1, longest, new_tokens, params.dtype, block=BLOCK)
    readable = all(policy.layer(spec).traits.reading == "blocks" for spec in specs)
    return BLOCK if readable else None


@dataclasses.dataclass
class Row:
    """What one row has sampled so far.

    Attributes:
        prompt, question: token ids that were given.
        tokenizer: None for a model without text.
        growing: the text as it comes, where somebody watches it.
        again: how many of the sampled tokens were read again with the prompt, when the model's rotation changed.
    """

    prompt: list[int]
    question: list[int]
    tokenizer: Tokenizer | None
    growing: GrowingText | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    stop_reason: StopReason | None = None
    again: int = 0

    @property
    def read_first(self) -> list[int]:
        """Tokens that are read as a prompt."""
        return [*self.prompt, *self.question, *self.tokens[: self.again]] if self.again else self.prompt

    @property
    def read_next(self) -> list[int]:
        """Tokens that are read one by one after it."""
        return [] if self.again else self.question

    def watch(self, stop: Sequence[str]) -> None:
        """Have the text made as tokens come, up to the first stop string."""
        assert self.tokenizer is not None
        self.growing = GrowingText(self.tokenizer, self.prompt + self.question, stop)

    def text(self) -> str | None:
        """The new text."""
        if self.tokenizer is None:
            return None
        if self.growing is not None:
            return self.growing.whole()
        return self.tokenizer.decode_after(self.prompt + self.question, self.tokens)

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], request: Request) -> None:
        """Take in newly sampled tokens up to the row's end."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            if self.stop_reason is not None:
                return
            self.tokens.append(int(token))
            self.logprobs.append(float(logprob))
            if token in request.ends:
                self.stop_reason = "eos" if token in request.eos else "stop"
            if self.growing is not None:
                self.growing.push(token)
                if self.growing.stopped:
                    self.stop_reason = "stop"


class Run:
    """One call of `generate` or `stream`: checks the arguments, runs the programs, collects what they sample."""

    def __init__(
        self,
        params: Params,
        prompt: Any,
        policy: str | Policy,
        budget: int | float | None,
        request: Request,
        question: Any = None,
        prefill_block: int | None = None,
        streamed: bool = False,
        mesh: Mesh | str | None = None,
        progress: Callable[[int, int], Any] | None = None,
        longest: int | None = None,
    ) -> None:
        self.params, self.request, self.progress = params, request, progress
        self.policy = get_policy(policy, budget=budget).bind(params.config)
        self.mesh = mesh_of(params) if mesh is None else get_mesh(mesh)
        self.shard = policy_shard(self.mesh, params.config, self.policy)
        self.prefill_block = None if prefill_block is None else amount("prefill_block", prefill_block)
        if self.prefill_block is not None:  # as far as it can be told before prompts are read
            for spec in layer_specs(params.config, 1, 64, 64, params.dtype, block=self.prefill_block):
                check_reads_blocks(self.policy.layer(spec))
        prompts, self.single = token_ids(params, prompt, one=streamed, longest=longest)
        questions = [[] for _ in prompts]
        if question is not None:
            questions = question_ids(params, question, None if self.single else len(prompts))
            given = ([prompt], [question]) if self.single else (prompt, question)
            pairs = asked_in_chats(params, *given, list(zip(prompts, questions, strict=True)))
            prompts, questions = map(list, zip(*pairs, strict=True))
        check_same(self.mesh, [*prompts, *questions], request, self.policy, prefill_block)
        self.rows = [Row(*ids, params.tokenizer) for ids in zip(prompts, questions, strict=True)]
        self._check_budgets()
        if prefill_block is None:
            longest, new = (max(map(count, self.rows)) for count in (lambda row: len(row.prompt), self._new_tokens))
            self.prefill_block = automatic_block(params, self.policy, self.shard, len(self.rows), longest, new)
        self._check_lengths()
        for row in self.rows if streamed or request.stop else ():
            row.watch(request.stop)
        self.prefill_seconds = self.decode_seconds = self.compile_seconds = 0.0
        self.cache_bytes = self.full_cache_bytes = self.host_cache_bytes = self.step_bytes_read = 0
        self.repeated_cache_bytes = 0
        self.selected = self.found = self.fetched_bytes = 0

    def finish(self) -> Generation | list[Generation]:
        """Run to the end: one result for one prompt, a list for a list."""
        for _ in self.chunks(decoding.CHUNK):
            pass
        generations = self.generations()
        return generations[0] if self.single else generations

    def chunks(self, size: int) -> Iterator[None]:
        """Sample tokens for all rows; yields after every look at the host."""
        if self.request.stop:
            size = min(size, STREAM_STEPS)
        for group in self.groups():
            with lost_processes(self.mesh):
                yield from self._group_chunks(group, size)

    def generations(self) -> list[Generation]:
        """The results, once all chunks have run."""
        stats = GenerationStats(
            rows=len(self.rows),
            prompt_tokens=sum(len(row.prompt) for row in self.rows),
            new_tokens=sum(len(row.tokens) for row in self.rows),
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            compile_seconds=self.compile_seconds,
            cache_bytes=self.cache_bytes,
            full_cache_bytes=self.full_cache_bytes,
            host_cache_bytes=self.host_cache_bytes,
            step_bytes_read=self.step_bytes_read,
            hit_rate=self.found / self.selected if self.selected else None,
            fetched_bytes=self.fetched_bytes,
            question_tokens=sum(len(row.question) for row in self.rows),
            budget_applies=self.policy.info.takes_budget,
            prefill_block=self.prefill_block,
            devices=self.shard.devices,
            head_copies=self.shard.copies,
            slot_devices=self.shard.slots,
            repeated_cache_bytes=self.repeated_cache_bytes,
        )
        return [Generation(r.text(), r.tokens, r.logprobs, r.stop_reason or "length", stats) for r in self.rows]

    def _check_budgets(self) -> None:
        """Raise `PolicyError` for all rows that the policy cannot serve."""
        errors: list[str | None] = []
        for row in self.rows:
            try:
                self.policy.validate(self._total(row))
            except PolicyError as error:
                if self.single:
                    raise
                errors.append(f": {error}")
            else:
                errors.append(None)
        refuse_rows("prompt", errors, PolicyError)

    def _check_lengths(self) -> None:
        window = self.params.config.context_length
        longest, last = max(len(row.prompt) for row in self.rows), max(map(self._total, self.rows))
        if self.prefill_block is not None:
            sizes = longest, max(map(self._new_tokens, self.rows)), self.params.dtype, last, self.prefill_block
            specs = layer_specs(self.params.config, 1, *sizes)
            longest = min(longest, max(self.policy.layer(spec).max_kept for spec in specs) + self.prefill_block)
        reach = longest if self.policy.info.positions == "cache_rank" else last
        if reach > window:
            warnings.warn(
                f"positions up to {reach} are beyond the {window} this model was trained on, where its text degrades"
                + (
                    ""
                    if longest > window
                    else "; policies such as treekv reassign positions within the cache and can go on"
                ),
                stacklevel=4,
            )

    def _new_tokens(self, row: Row) -> int:
        """Tokens that may come after what is read as a prompt."""
        return len(row.read_next) + self.request.max_new_tokens - row.again

    def _total(self, row: Row) -> int:
        return len(row.read_first) + self._new_tokens(row)

    def groups(self) -> list[list[int]]:
        """Rows that can run in one batch: those that begin with the same rotation (only LongRoPE has two)."""
        groups: dict[Any, list[int]] = {}
        for i, row in enumerate(self.rows):
            groups.setdefault(self.params.config.rope.resolve(self._given(row)), []).append(i)
        return list(groups.values())

    def most_tokens(self, row: Row) -> int:
        """How many tokens a row can have sampled before it needs another rotation, or is done.

        With LongRoPE a sequence that comes to be longer than the original window is read again, with the other rotation: what it
        samples then depends neither on how much it was asked for nor on its neighbours. Hugging Face transformers does so, too.
        """
        most, window = self.request.max_new_tokens, self.params.config.rope.changes_after
        if window is None or row.again or self._given(row) > window:
            return most
        return min(most, window + 1 - self._given(row))

    @staticmethod
    def _given(row: Row) -> int:
        return len(row.read_first) + len(row.read_next)

    def engine_for(self, rows: Sequence[Row]) -> Engine:
        """What runs a group of rows, and others that idle where a mesh deals more."""
        given = max(map(self._given, rows))
        return Engine(
            self.params,
            self.policy,
            batch=-(-len(rows) // self.shard.data) * self.shard.data,
            prompt_len=max(len(row.read_first) for row in rows),
            max_new_tokens=max(map(self._new_tokens, rows)),
            max_total_tokens=given if self.params.config.rope.changes_after else max(map(self._total, rows)),
            block=self.prefill_block,
            mesh=self.mesh,
        )

    def _group_chunks(self, group: list[int], size: int) -> Iterator[None]:
        yield from self._chunks_until_done(group, size)
        left = [i for i in group if self._wants_more(self.rows[i])]
        for i in left:
            self.rows[i].again = len(self.rows[i].tokens)
        if left:
            yield from self._chunks_until_done(left, size)

    def _wants_more(self, row: Row) -> bool:
        return row.stop_reason is None and len(row.tokens) < self.request.max_new_tokens

    def _chunks_until_done(self, group: list[int], size: int) -> Iterator[None]:
        """Sample for rows until each is done, or has as many tokens as it may have with this rotation."""
        rows = [self.rows[i] for i in group]
        engine = self.engine_for(rows)
        idle = engine.batch - len(rows)
        last = rows[-1]
        rows += [Row(last.read_first[:1], last.read_next[:1], None, stop_reason="length") for _ in range(idle)]
        prompts, seeds = [row.read_first for row in rows], row_seeds(self.request.seed, [*group, *[0] * idle])
        how = (
            self.request.sampler,
            self.request.eos,
        )  # rows end at `stop_ids` on the host, so that no other program is compiled
        rest, new = [row.read_next for row in rows], [self._new_tokens(row) for row in rows]
        with self._timed(engine, "prefill_seconds"):
            state, first = engine.prefill(prompts, new, seeds, *how, progress=self.progress)
            tokens = on_host(state.token)
        if not last.again:
            self._count_bytes(engine, state)
        given = rest if rest[0] else None
        most = max(self.most_tokens(row) - row.again for row in rows if row.stop_reason is None)
        if given is None:
            self._collect(rows, tokens[:, None], on_host(first)[:, None], [1] * len(rows))

        steps, before = 0, [len(tokens) - 1 for tokens in rest]  # a row's first sample comes after so many steps
        while (sampled := steps - max(before)) < most and any(row.stop_reason is None for row in rows):
            yield
            if self.request.stop or any(row.stop_reason is not None for row in rows):
                state = dataclasses.replace(state, done=jnp.asarray([row.stop_reason is not None for row in rows]))
            count = min(size, most - max(sampled, 0))
            with self._timed(engine, "decode_seconds"):
                if given is None:
                    state, new, logprobs = engine.decode(state, count, *how)
                else:
                    state, new, logprobs = engine.answering(state, given, count, *how)()
                done, steps = steps, int(state.steps)
            counts = [steps - done - (0 if given is None else ahead) for ahead in before]
            self._collect(rows, np.asarray(new), np.asarray(logprobs), counts)
            given = None
        selected, found = hits(state.caches)
        self.selected, self.found = self.selected + selected, self.found + found
        self.fetched_bytes += fetched_bytes(state.caches, steps)
        yield

    def _count_bytes(self, engine: Engine, state: decoding.Decoding) -> None:
        leaves = jax.tree.leaves(state.caches)
        on_host = bytes_per_device([leaf for leaf in leaves if host_memory.on_host(leaf)])
        self.host_cache_bytes += on_host
        self.cache_bytes += bytes_per_device(leaves) - on_host
        self.full_cache_bytes += engine.full_cache_bytes
        self.step_bytes_read += engine.step_bytes_read
        self.repeated_cache_bytes += engine.repeated_cache_bytes

    @contextlib.contextmanager
    def _timed(self, engine: Engine, what: str) -> Iterator[None]:
        """Add the time within to `what`, and of it what compiling took to `compile_seconds`."""
        start, before = time.perf_counter(), engine.compile_seconds
        yield
        compiling = engine.compile_seconds - before
        self.compile_seconds += compiling
        setattr(self, what, getattr(self, what) + time.perf_counter() - start - compiling)

    def _collect(self, rows: list[Row], tokens: np.ndarray, logprobs: np.ndarray, counts: Sequence[int]) -> None:
        """Take each row's next `counts` samples, as far as it was asked for them."""
        for row, row_tokens, row_logprobs, count in zip(rows, tokens.tolist(), logprobs.tolist(), counts, strict=True):
            count = min(count, self.most_tokens(row) - len(row.tokens))
            row.extend(row_tokens[:count], row_logprobs[:count], self.request)
