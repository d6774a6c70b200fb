"""`generate` and `stream`: continue text, token ids or chats."""

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax._util.arguments import amount, short, whole
from kvjax.cache import Shard, bucket, layer_specs
from kvjax.models import Params
from kvjax.models.sharding import bytes_per_device, get_mesh, mesh_of
from kvjax.policies import Full, Policy, PolicyError, get_policy
from kvjax.policies.layer import check_reads_blocks
from kvjax.policies.transforms.offload import fetched_bytes, hits
from kvjax.policies.unbound import check_no_host_cache
from kvjax.runtime import decoding
from kvjax.runtime.engine import Engine
from kvjax.runtime.kept_share import kept_shares
from kvjax.runtime.kept_state import KeptState
from kvjax.runtime.many import prefilled_at_once, runs_continuously, through_batches
from kvjax.runtime.memory import device_bytes
from kvjax.runtime.mesh import on_host, policy_shard
from kvjax.runtime.processes import check_same, lost_processes
from kvjax.runtime.prompts import (
    Message,
    PromptLike,
    Question,
    asked_in_chats,
    for_chat,
    is_one,
    question_ids,
    refuse_rows,
    token_ids,
)
from kvjax.runtime.request import (
    GenerateOptions,
    ListOptions,
    Request,
    RequestOptions,
    check_request,
    check_requests,
    flag,
    row_seeds,
)
from kvjax.runtime.row import Row, StopReason
from kvjax.runtime.sampling import Greedy

BLOCK = 4096
"""Block size in tokens for prompts that would not fit whole."""

STREAM_STEPS = 8
"""Tokens decoded between checks on the host, for streaming and stop strings."""


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """Statistics of one call, over all sequences of a batch.

    Attributes:
        rows: number of sequences.
        prompt_tokens: number of prompt tokens.
        new_tokens: number of sampled tokens.
        prefill_seconds, decode_seconds: run time of the two programs, without compilation. Where prompts are prefilled
            between decode steps of others, the time of turns with a prefill counts as prefill.
        compile_seconds: compile time; 0 if the programs were already compiled.
        cache_bytes: bytes of the policy's cache on each device.
        full_cache_bytes: bytes that a full cache for the same tokens would need on each device.
        host_cache_bytes: bytes of the policy's cache in host memory, if it is `offloaded`.
        step_bytes_read: bytes of the cache that attention reads in one decode step; see `Policy.bytes_read`.
        hit_rate: fraction of the selected tokens that were already on the device. None if none were looked up on the
            host. Finished sequences count until all are finished.
        fetched_bytes: bytes of keys and values fetched from host memory over all decode steps. In sparse layers these
            are selected tokens that were not on the device, without each sequence's first query.
        question_tokens: number of question tokens, which are processed one by one after the prompts are compressed.
        budget_applies: whether the policy uses a budget. If not (as for `full`), a given `budget` had no effect.
        prefill_block: block size of chunked prefill in tokens; None if prompts were prefilled whole.
        kept_shares: share of each sequence's tokens that its cache keeps at its end, mean over the heads of all layers,
            for policies by which the text determines it (`thresholded`). None for others. In batches that start and stop
            together (offloaded caches, a sampler of one's own, LongRoPE, several processes), at the end of the batch.
        devices: number of devices.
        head_copies: number of devices that held the same KV heads with all slots, as there are fewer heads than
            devices.
        slot_devices: number of devices that shared the slots of the same KV heads.
        repeated_cache_bytes: bytes of `cache_bytes` that are replicated on every device that shares slots: whole caches
            of layers that cannot be sharded by slots, and positions and weights of the others.
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
    kept_shares: tuple[float, ...] | None = None
    devices: int = 1
    head_copies: int = 1
    slot_devices: int = 1
    repeated_cache_bytes: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second of prefill."""
        return self.prompt_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens processed per second of decoding: question tokens and new tokens, except the last one of each sequence."""
        return (self.question_tokens + self.new_tokens - self.rows) / max(self.decode_seconds, 1e-9)


@dataclasses.dataclass(frozen=True, repr=False)
class Reply:
    """A model's continuation of a prompt.

    Attributes:
        text: new text, without special tokens and stop string; None if the model has no tokenizer.
        tokens: new token ids, including a sampled end token.
        logprobs: log-probability of each token under the model, before temperature and filters.
        stop_reason: "eos" (an end token), "stop" (a stop string, or a special token that is one), or "length".
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason

    def __repr__(self) -> str:
        """All fields that were asked for; long lists are abbreviated."""
        fields = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        values = ((name, value) for name, value, default in fields if not value is default is None)
        fields = (f"{name}={_listed(value) if isinstance(value, list) else repr(value)}" for name, value in values)
        return f"{type(self).__name__}({', '.join(fields)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Generation(Reply):
    """A `Reply` with statistics of the call.

    Attributes:
        stats: statistics of the call.
        state: the cache that the sequence ended with, if `return_state` asked for it.
    """

    stats: GenerationStats
    state: KeptState | None = None


# A string is also a sequence of strings; the first matching overload is used.
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
    max_new_tokens: int | Sequence[int] = ...,
    *,
    question: Sequence[Question] | None = ...,
    **options: Unpack[ListOptions],
) -> list[Generation]: ...
@overload
def generate(
    params: Params,
    prompt: Any,
    policy: str | Policy = ...,
    budget: int | float | None = ...,
    max_new_tokens: int | Sequence[int] = ...,
    *,
    question: Any = ...,
    **options: Unpack[ListOptions],
) -> Any: ...


def generate(
    params: Params,
    prompt: PromptLike | Sequence[PromptLike],
    policy: str | Policy = "full",
    budget: int | float | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    *,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int | None] | None = None,
    top_p: float | Sequence[float | None] | None = None,
    min_p: float | Sequence[float | None] | None = None,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] | Sequence[Sequence[str]] = (),
    ignore_eos: bool | Sequence[bool] = False,
    sampler: Any = None,
    question: Question | Sequence[Question] | None = None,
    prefill_block: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    mesh: Mesh | str | None = None,
    progress: Callable[[int, int], Any] | None = None,
    rows: int | None = None,
    max_total_tokens: int | None = None,
    return_state: bool = False,
    room: int = 0,
) -> Generation | list[Generation]:
    """Continue one prompt, or a list of them.

    A long list runs through a batch of as many rows as fit the memory: when a sequence ends, the next prompt takes its
    row. See `iterate` for results as they finish.

    All arguments are checked before anything is compiled or run. Numbers may be from Python, NumPy or JAX. For a list of
    prompts, options from `max_new_tokens` to `ignore_eos` may be lists, with one value for each prompt.

    Args:
        params: a model from `kvjax.load`.
        prompt: text, token ids or chat messages; or a list of these; or an array of token ids, one row per prompt.
            Prompts of a list may have different lengths, and each result equals that of the prompt alone. The content of
            a message is text, or a list of parts {"type": "text", "text": ...}.
        policy: how the KV cache is compressed: a name (`kvjax policies` lists them) or a `Policy` with hyperparameters.
        budget: cache slots per head: a number of tokens, or a fraction of prompt + new tokens. None uses the policy's
            default. Policies without a budget ignore it, see `GenerationStats.budget_applies`.
        max_new_tokens: maximum number of tokens to sample. Models with LongRoPE (Phi-3) have one rotation up to their
            original window and another beyond. A sequence that outgrows the window is prefilled again with the other
            rotation, including its sampled tokens.
        temperature: sampling temperature; 0 is greedy.
        top_k, top_p, min_p: sampling filters, see `kvjax.runtime.sampling.Sampling`.
        seed: any whole number; only its remainder modulo 2**32 matters. The same seed and prompt give the same tokens.
            Prompt i of a list samples as it would alone with `seed + i`.
        stop: strings at which the text ends; they are not part of it. A special token such as "<|im_end|>" has to be a
            string by itself.
        ignore_eos: whether to continue after end tokens.
        sampler: one sampler for all prompts, instead of temperature and filters: a function or a callable pytree, as
            `kvjax.runtime.sampling.Sampler`, which is compiled with the programs, or
            `kvjax.runtime.sampling.Constrained` for grammars. Prompts of a list then run in batches of `rows` that start
            and stop together.
        question: text or token ids that follow the prompt, one per prompt of a list. The policy compresses the prompt
            before the question is processed (question-agnostic compression). Question tokens count as new tokens. After
            chat messages, the question is appended to the user's last message, and is processed with the end of that
            message and the opening of the answer. If the last message is not the user's, the question becomes a user
            message.
        prefill_block: block size in tokens of chunked prefill. Each block is compressed together with what is kept of
            earlier blocks, so memory and time per token do not depend on the prompt's length. Tokens attend to the kept
            tokens and causally to their block. If a block is partial, it is the first. None prefills whole prompts, or
            blocks of `BLOCK` if a prompt's keys and values would not fit, see `GenerationStats.prefill_block`. Policies that
            need the whole prompt do not support blocks.
        chat_template_kwargs: arguments of the chat template by name, as keywords of transformers' `apply_chat_template`.
            `tools` is a list of JSON schemas, and `documents` a list of dictionaries. With `continue_final_message`,
            the model continues the last message instead of answering it. Others are variables that the template reads,
            such as `enable_thinking` or `date_string`. A variable that the template does not read is an error.
        mesh: devices to run on, as for `kvjax.Engine`. Load the weights onto it (`kvjax.load(..., mesh=...)`);
            otherwise each call shards them again.
        progress: called after each block of chunked prefill with the number of finished blocks and of all blocks. For
            long lists, called with the number of finished prompts and of all prompts.
        rows: number of rows through which the prompts of a list run. By default as many as fit, up to 256. With the
            same `rows` and `max_total_tokens`, a prompt's result does not depend bit for bit on the others.
        max_total_tokens: maximum length of a sequence, to which caches are allocated. By default that of the longest.
        return_state: whether each result has the cache that its sequence ended with, copied to the host
            (`Generation.state`), to look at kept positions and to continue from. Not for stop strings (special tokens
            can be given), `sampler`, offloaded caches, LongRoPE, or several processes.
        room: number of further tokens that a returned state can be continued with, at least.

    Returns:
        A `Generation`, or a list of them for a list of prompts.

    Raises:
        ValueError: a prompt is empty, of an unknown kind, or has an invalid token id, or an option is out of range. For
            a list, the message names all invalid prompts.
        PolicyError: the policy is unknown, or does not support this budget. For a list, the message names the prompts.

    Example:
        >>> params = kvjax.load()  # doctest: +SKIP
        >>> result = kvjax.generate(params, [5, 9, 2] * 16, policy="snapkv:window=8", budget=16, max_new_tokens=8)
        >>> len(result.tokens), result.stop_reason, result.stats.cache_bytes < result.stats.full_cache_bytes
        (8, 'length', True)
    """
    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed, "stop": stop}
    check: Callable[..., Any] = check_request if is_one(prompt) else check_requests
    request = check(params, max_new_tokens, **asked, ignore_eos=ignore_eos, sampler=sampler)
    how: dict[str, Any] = {"mesh": mesh, "progress": progress, "batch_rows": rows, "max_total_tokens": max_total_tokens}
    how |= {"return_state": return_state, "room": room}
    how["chat_template_kwargs"] = chat_template_kwargs
    return Run(params, prompt, policy, budget, request, question, prefill_block, **how).finish()


def iterate(
    params: Params,
    prompts: Sequence[PromptLike],
    policy: str | Policy = "full",
    budget: int | float | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    *,
    question: Sequence[Question] | None = None,
    **options: Unpack[ListOptions],
) -> Iterator[tuple[int, Generation]]:
    """Continue a list of prompts, and yield each result when it has finished.

    Args:
        params, prompts, policy, budget, max_new_tokens, question: as for `generate`.
        options: other options of `generate`.

    Yields:
        The index of a prompt in the list, and its `Generation`, whose statistics are those of the call so far.

    Raises:
        ValueError, PolicyError: as `generate`, before anything runs.

    Example:
        >>> prompts = [[5, 9, 2] * 16, [7, 8] * 24]
        >>> for i, result in kvjax.iterate(params, prompts, "snapkv:window=8", 16, max_new_tokens=8):
        ...     print(i, len(result.tokens))
        0 8
        1 8
    """
    asked: dict[str, Any] = dict(options)
    how = {name: asked.pop(name, None) for name in ("prefill_block", "mesh", "progress", "max_total_tokens")}
    how |= {"return_state": asked.pop("return_state", False), "room": asked.pop("room", 0)}
    how["chat_template_kwargs"] = asked.pop("chat_template_kwargs", None)
    how["batch_rows"] = asked.pop("rows", None)
    request = check_requests(params, max_new_tokens, **asked)
    run = Run(params, prompts, policy, budget, request, question, **how, continuous=True)
    if run.single:
        raise ValueError("prompts is one prompt; give a list of prompts, or call generate")
    return _as_completed(run)


def _as_completed(run: "Run") -> Iterator[tuple[int, Generation]]:
    left = list(range(len(run.rows)))

    def finished() -> Iterator[tuple[int, Generation]]:
        ended = [i for i in left if run.rows[i].stop_reason is not None]
        results = run.generations() if ended else []
        for i in ended:
            left.remove(i)
            yield i, results[i]

    for _ in run.chunks(decoding.CHUNK):
        yield from finished()
    for i in left:
        run.rows[i].stop_reason = run.rows[i].stop_reason or "length"
    yield from finished()


def stream(
    params: Params,
    prompt: PromptLike,
    policy: str | Policy = "full",
    budget: int | float | None = None,
    max_new_tokens: int = 128,
    *,
    question: Question | None = None,
    prefill_block: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    mesh: Mesh | str | None = None,
    progress: Callable[[int, int], Any] | None = None,
    **options: Unpack[RequestOptions],
) -> Iterator[str]:
    """Continue one prompt and yield the text piece by piece.

    The joined pieces equal the `text` of `generate` with the same arguments. The generator returns that `Generation`,
    as the value of `yield from`. Incomplete characters, and text that may begin a stop string, are withheld until they
    are certain.

    Args:
        params, prompt, policy, budget, max_new_tokens: as for `generate`, for a single prompt.
        question, prefill_block, chat_template_kwargs, mesh, progress: as for `generate`.
        options: other options of `generate`.

    Raises:
        ValueError: as `generate`, or the model has no tokenizer.
        PolicyError: as `generate`.

    Example:
        >>> prompt = "Call me Ishmael. " * 3
        >>> pieces = list(kvjax.stream(chat, prompt, "snapkv:window=8", 16, max_new_tokens=8))
        >>> "".join(pieces) == kvjax.generate(chat, prompt, "snapkv:window=8", 16, max_new_tokens=8).text
        True
    """
    request = check_request(params, max_new_tokens, **options)
    if params.tokenizer is None:
        raise ValueError("this model has no tokenizer, so there is no text to stream; call generate with token ids")
    how: dict[str, Any] = {"streamed": True, "mesh": mesh, "progress": progress}
    how["chat_template_kwargs"] = chat_template_kwargs
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


def _one_each(request: Request, count: int) -> list[Request]:
    return [dataclasses.replace(request, seed=seed) for seed in row_seeds(request.seed, range(count))]


def _listed(values: list[Any]) -> str:
    return repr(values) if len(values) <= 8 else f"[{', '.join(map(short, values[:6]))}, … {len(values)} in all]"


def automatic_block(
    params: Params, policy: Policy, shard: Shard, rows: int, longest: int, new_tokens: int
) -> int | None:
    """Tokens of a block where whole prompts would not fit and the policy can prefill in blocks; None for whole prompts.

    Args:
        policy: bound to the model.
        shard: how devices share the model with the policy's cache.
        rows: sequences whose whole prompts are in memory together.
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
    readable = all(policy.layer(spec).reads == "blocks" for spec in specs)
    return BLOCK if readable else None


class Run:
    """One call of `generate` or `stream`: checks the arguments, runs the programs and collects the samples."""

    def __init__(
        self,
        params: Params,
        prompt: Any,
        policy: str | Policy,
        budget: int | float | None,
        request: Request | list[Request],
        question: Any = None,
        prefill_block: int | None = None,
        streamed: bool = False,
        mesh: Mesh | str | None = None,
        progress: Callable[[int, int], Any] | None = None,
        longest: int | None = None,
        batch_rows: int | None = None,
        max_total_tokens: int | None = None,
        continuous: bool = False,
        return_state: bool = False,
        room: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.params, self.progress = params, progress
        self.batch_rows = None if batch_rows is None else amount("rows", batch_rows)
        self.max_total_tokens = None if max_total_tokens is None else amount("max_total_tokens", max_total_tokens)
        self.continuous = continuous
        self.return_state, self.room = flag("return_state", return_state), whole("room", room, 0)
        self.policy = get_policy(policy, budget=budget).for_model(params.config)
        self.mesh = mesh_of(params) if mesh is None else get_mesh(mesh)
        self.shard = policy_shard(self.mesh, params.config, self.policy)
        self.prefill_block = None if prefill_block is None else amount("prefill_block", prefill_block)
        if self.prefill_block is not None:  # what can be checked before prompts are tokenised
            for spec in layer_specs(params.config, 1, 64, 64, params.dtype, block=self.prefill_block):
                check_reads_blocks(self.policy.layer(spec))
        chatting, continued = for_chat(params, prompt, chat_template_kwargs)
        prompts, self.single = token_ids(chatting, prompt, one=streamed, longest=longest, continued=continued)
        questions = [[] for _ in prompts]
        if question is not None:
            if continued:
                raise ValueError(
                    "continue_final_message=True and a question, which starts another answer; omit one of them"
                )
            questions = question_ids(params, question, None if self.single else len(prompts))
            given = ([prompt], [question]) if self.single else (prompt, question)
            pairs = asked_in_chats(chatting, *given, list(zip(prompts, questions, strict=True)))
            prompts, questions = map(list, zip(*pairs, strict=True))
        requests = request if isinstance(request, list) else _one_each(request, len(prompts))
        if len(requests) != len(prompts):
            raise ValueError(
                f"options have {len(requests)} values, but there are {len(prompts)} prompts; give one value for all prompts, or one for each"
            )
        requests[0].sampler.check_prompts(len(prompts), self.shard.data)
        check_same(self.mesh, [*prompts, *questions], requests, self.policy, prefill_block)
        pairs = zip(prompts, questions, requests, strict=True)
        self.rows = [Row(ids, asked, params.tokenizer, own) for ids, asked, own in pairs]
        self._check_budgets()
        if self.return_state:
            self._check_returns_state()
        elif self.room:
            raise ValueError(f"room={self.room} is for states; give return_state=True as well, or leave it out")
        if prefill_block is None:
            longest = max(len(row.prompt) for row in self.rows)
            new = max(map(self._new_tokens, self.rows))
            count = len(self.rows)
            if not requests[0].sampler.is_own:
                count = prefilled_at_once(self.policy, params.config, count, longest)
            self.prefill_block = automatic_block(params, self.policy, self.shard, count, longest, new)
        self._check_lengths()
        for row in self.rows:
            if streamed or row.request.stop:
                row.watch()
        self.prefill_seconds = self.decode_seconds = self.compile_seconds = 0.0
        self.cache_bytes = self.full_cache_bytes = self.host_cache_bytes = self.step_bytes_read = 0
        self.repeated_cache_bytes = 0
        self.selected = self.found = self.fetched_bytes = 0

    def finish(self) -> Generation | list[Generation]:
        """Run to the end. Returns one result, or a list for a list of prompts."""
        for _ in self.chunks(decoding.CHUNK):
            pass
        generations = self.generations()
        return generations[0] if self.single else generations

    def chunks(self, size: int) -> Iterator[None]:
        """Sample tokens for all sequences. Yields after every check on the host."""
        if any(row.request.sampler.on_host for row in self.rows):
            size = 1
        if any(row.request.stop for row in self.rows):
            size = min(size, STREAM_STEPS)
        with lost_processes(self.mesh):
            if self.runs_continuously():
                for _ in through_batches(self):
                    yield
                return
            for group in self.groups():
                yield from self._group_chunks(group, size)

    def generations(self) -> list[Generation]:
        """The results, once all chunks have run."""
        shares = [row.kept_share for row in self.rows if row.kept_share is not None]
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
            kept_shares=tuple(shares) if len(shares) == len(self.rows) else None,
            devices=self.shard.devices,
            head_copies=self.shard.copies,
            slot_devices=self.shard.slots,
            repeated_cache_bytes=self.repeated_cache_bytes,
        )
        return [
            Generation(r.text(), r.tokens, r.logprobs, r.stop_reason or "length", stats, r.state) for r in self.rows
        ]

    def _check_budgets(self) -> None:
        """Raise `PolicyError` for all prompts that the policy does not support."""
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

    def _check_returns_state(self) -> None:
        """Raise an error if this call's caches cannot be returned, because they do not end with the text."""
        check_no_host_cache(self.policy)
        strings = {
            text for row in self.rows for text in row.request.stop if text not in self.params.tokenizer.special_ids
        }
        for reason, what in (
            (strings, f"stop={_listed(sorted(strings))}, since the cache has tokens beyond a stop string"),
            (self.rows[0].request.sampler.is_own, "a sampler of one's own"),
            (jax.process_count() > 1, "several processes"),
            (self.params.config.rope_changes_after is not None, "LongRoPE, whose sequences are prefilled again"),
        ):
            if reason:
                raise ValueError(f"return_state=True is not supported with {what}; leave one of them out")

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
                    else "; policies such as treekv reassign positions within the cache and can continue"
                ),
                stacklevel=4,
            )

    def _new_tokens(self, row: Row) -> int:
        """Maximum number of tokens after prefill."""
        return len(row.read_next) + row.request.max_new_tokens - row.again

    def _total(self, row: Row) -> int:
        return len(row.read_first) + self._new_tokens(row)

    def runs_continuously(self) -> bool:
        """Whether the prompts run through a running batch, see `kvjax.runtime.many`."""
        return not self.rows[0].request.sampler.is_own and runs_continuously(self)

    def groups(self) -> list[list[int]]:
        """Group sequences that can share a batch: they start with the same rotation, and are sampled alike.

        Only LongRoPE has two rotations.
        """
        groups: dict[Any, list[int]] = {}
        for i, row in enumerate(self.rows):
            alike = dataclasses.replace(row.request, seed=0, sampler=Greedy())
            sampled = row.request.sampler.group(len(row.read_next))
            ropes = self.params.config.resolve_ropes(self._given(row))
            groups.setdefault((ropes, alike, sampled), []).append(i)
        size = self.batch_rows or len(self.rows)
        return [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]

    def most_tokens(self, row: Row) -> int:
        """Maximum number of sampled tokens before a sequence ends or needs another rotation.

        With LongRoPE, a sequence that outgrows the original window is prefilled again with the other rotation. Its
        samples then depend neither on `max_new_tokens` nor on other sequences. Hugging Face transformers does the same.
        """
        most, window = row.request.max_new_tokens, self.params.config.rope_changes_after
        if window is None or row.again or self._given(row) > window:
            return most
        return min(most, window + 1 - self._given(row))

    @staticmethod
    def _given(row: Row) -> int:
        return len(row.read_first) + len(row.read_next)

    def engine_for(self, rows: Sequence[Row]) -> Engine:
        """Engine for a group of sequences. The batch is rounded up to what the mesh shards evenly."""
        given = max(map(self._given, rows))
        return Engine(
            self.params,
            self.policy,
            batch=-(-max(len(rows), min(self.batch_rows or 0, len(self.rows))) // self.shard.data) * self.shard.data,
            prompt_len=max(len(row.read_first) for row in rows),
            max_new_tokens=max(map(self._new_tokens, rows)),
            max_total_tokens=given if self.params.config.rope_changes_after else max(map(self._total, rows)),
            block=self.prefill_block,
            mixed=False,
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
        return row.stop_reason is None and len(row.tokens) < row.request.max_new_tokens

    def _chunks_until_done(self, group: list[int], size: int) -> Iterator[None]:
        """Sample until each sequence is done, or has all tokens that this rotation allows."""
        rows = [self.rows[i] for i in group]
        engine = self.engine_for(rows)
        idle = engine.batch - len(rows)
        last = rows[-1]
        rows += [
            Row(last.read_first[:1], last.read_next[:1], None, last.request, stop_reason="length") for _ in range(idle)
        ]
        prompts, seeds = [row.read_first for row in rows], [row.request.seed for row in rows]
        numbers = [*group, *[None] * idle]

        def how(counts: bool = True) -> tuple[Any, Sequence[int]]:
            """Sampler and end tokens of the next call. `stop_ids` end sequences on the host, so that they need no other program."""
            asks = [i if counts and row.stop_reason is None else None for i, row in zip(numbers, rows, strict=True)]
            sampler = last.request.sampler.for_step(asks, [row.tokens for row in rows], self.params.config.vocab_size)
            return sampler, last.request.eos

        rest, new = [row.read_next for row in rows], [self._new_tokens(row) for row in rows]
        with self._timed(engine, "prefill_seconds"):
            state, first = engine.prefill(prompts, new, seeds, *how(not rest[0]), progress=self.progress)
            tokens = on_host(state.token)
        if not last.again:
            self._count_bytes(engine)
        given, room = (rest, bucket(max(map(len, rest)))) if rest[0] else (None, 0)
        most = max(self.most_tokens(row) - row.again for row in rows if row.stop_reason is None)
        if given is None:
            self._collect(rows, tokens[:, None], on_host(first)[:, None], [1] * len(rows))

        steps, before = 0, [len(tokens) - 1 for tokens in rest]  # steps before the first sample of each row
        while (sampled := steps - max(before)) < most and any(row.stop_reason is None for row in rows):
            yield
            if last.request.stop or any(row.stop_reason is not None for row in rows):
                state = dataclasses.replace(state, done=jnp.asarray([row.stop_reason is not None for row in rows]))
            count = min(size, most - max(sampled, 0))
            with self._timed(engine, "decode_seconds"):
                if given is None:
                    state, new, logprobs = engine.decode(state, count, *how())
                else:  # also when they have been processed, so that it is one program
                    state, new, logprobs = engine.answering(state, given, count, *how(), size=room)()
                done, steps = steps, int(state.steps)
            counts = [steps - done - (0 if done or given is None else ahead) for ahead in before]
            self._collect(rows, np.asarray(new), np.asarray(logprobs), counts)
            given = None if given is None else [[] for _ in rows]
        if engine.host_cache_bytes:
            selected, found = hits(state.caches)
            self.selected, self.found = self.selected + selected, self.found + found
            self.fetched_bytes += fetched_bytes(state.caches, steps)
        if self.policy.info.keeps_by_threshold:
            for row, share in zip(rows, kept_shares(self.policy, engine.specs, state.caches), strict=True):
                row.kept_share = float(share)
        yield

    def _count_bytes(self, engine: Engine) -> None:
        self.host_cache_bytes += engine.host_cache_bytes
        self.cache_bytes += engine.cache_bytes
        self.full_cache_bytes += engine.full_cache_bytes
        self.step_bytes_read += engine.step_bytes_read
        self.repeated_cache_bytes += engine.repeated_cache_bytes

    @contextlib.contextmanager
    def _timed(self, engine: Engine, what: str) -> Iterator[None]:
        """Add the run time of the `with` block to `what`, and its compile time to `compile_seconds`."""
        start, before = time.perf_counter(), engine.compile_seconds
        yield
        compiling = engine.compile_seconds - before
        self.compile_seconds += compiling
        setattr(self, what, getattr(self, what) + time.perf_counter() - start - compiling)

    def _collect(self, rows: list[Row], tokens: np.ndarray, logprobs: np.ndarray, counts: Sequence[int]) -> None:
        """Append the next `counts` samples to each sequence, up to its maximum."""
        for row, row_tokens, row_logprobs, count in zip(rows, tokens.tolist(), logprobs.tolist(), counts, strict=True):
            count = min(count, self.most_tokens(row) - len(row.tokens))
            row.extend(row_tokens[:count], row_logprobs[:count])
