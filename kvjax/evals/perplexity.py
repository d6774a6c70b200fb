"""Perplexity of a text: in windows with the full cache, or streamed token by token through any policy's cache."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.models import Params
from kvjax.models.sharding import get_shard, partitions
from kvjax.policies import Policy, get_policy
from kvjax.runtime import decoding
from kvjax.runtime.engine import Engine
from kvjax.runtime.logprobs import token_logprobs
from kvjax.runtime.mesh import ALL, ROWS, first_row, on_host, on_mesh, repeated_row, state_partitions
from kvjax.runtime.processes import broadcast, from_first, is_first
from kvjax.runtime.program import Partition, Program

from .budgets import bytes_held
from .checkpoint import Checkpoint
from .report import model_fingerprint

CHUNK = 512
"""Tokens per call of the compiled loop."""


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Log-probabilities of a text's tokens, in order, and the perplexity.

    Attributes:
        logprobs: natural logarithms, one for every predicted token.
        cache_bytes: bytes of the cache on one device; 0 if no cache was used.

    Example:
        >>> result = kvjax.evals.Perplexity(np.log([0.5, 0.25]))
        >>> round(result.perplexity, 3)
        2.828
    """

    logprobs: np.ndarray
    cache_bytes: int = 0

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood per token, in nats."""
        return -float(np.mean(self.logprobs, dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll)

    def part(self, start: int, stop: int | None = None) -> "Perplexity":
        """The perplexity of some of the predicted tokens."""
        return Perplexity(self.logprobs[start:stop], self.cache_bytes)


def windowed(
    params: Params,
    tokens: Sequence[int],
    window: int,
    windows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    stride: int | None = None,
    mesh: Mesh | str | None = None,
) -> Perplexity:
    """Full-cache perplexity over windows of a text, from its start.

    Each window of `window` tokens is independent: its first token is not predicted, the other `window - 1` are. A last, shorter
    window is excluded.

    Args:
        windows: number of windows; by default all.
        stride: tokens from the start of one window to that of the next; by default windows do not overlap. If they overlap, only tokens
            that the previous window does not contain are scored, each from a longer context.
        progress: called with the number of windows done and in all.
        mesh: devices to run over, as for `kvjax.Engine`. Windows are sharded along "data".

    Raises:
        ValueError: the text has fewer tokens than requested, or the stride is not between 1 and the window.

    Example:
        >>> result = kvjax.evals.windowed(params, [5, 9, 2] * 8, window=8)
        >>> len(result.logprobs)  # three windows, each without its first token
        21
    """
    step = window if stride is None else stride
    if not 1 <= step <= window:
        raise ValueError(f"stride={stride} of windows of {window} tokens; give 1 to {window}")
    available = max(0, (len(tokens) - window) // step + 1)
    count = available if windows is None else windows
    if count < 1 or count > available:
        raise ValueError(f"{count} windows of {window} tokens asked of a text of {len(tokens)}, which has {available}")
    params, mesh = on_mesh(params, mesh)
    rows, scores = get_shard(mesh, params.config).data, []
    for first in range(0, count, rows):
        chosen = range(first, min(first + rows, count))
        # Padded with the last window, so that every device has one.
        texts = [tokens[i * step : i * step + window] for i in [*chosen, *[chosen[-1]] * (rows - len(chosen))]]
        found = on_host(token_logprobs(params, jnp.asarray(np.asarray(texts, np.int32))))
        for i, row in zip(chosen, found, strict=False):
            scores.append(row[-(step if i and step < window else window - 1) :])
        if progress is not None:
            progress(len(scores), count)
    return Perplexity(np.concatenate(scores))


def streaming(
    params: Params,
    tokens: Sequence[int],
    policy: str | Policy,
    budget: int | float | None = None,
    progress: Callable[[int, int], None] | None = None,
    checkpoint: Path | None = None,
    mesh: Mesh | str | None = None,
) -> Perplexity:
    """Perplexity of one text of any length, read token by token into a cache that starts empty.

    Every token is predicted from the current cache, as in generation: memory does not depend on the length (TreeKV, section 5.2,
    Table 1).

    Args:
        progress: called with the number of tokens read and in all.
        checkpoint: a file to save the state to every minute. The run resumes from it, on any devices, and removes it at the end. Of several
            processes only the first has the file.
        mesh: devices to run over, as for `kvjax.Engine`. There is one text, which devices along "data" repeat.

    Raises:
        ValueError: the text has fewer than two tokens, or the checkpoint is of another run.
        PolicyError: the policy is unknown or cannot work with this budget.

    Example:
        >>> result = kvjax.evals.streaming(params, [5, 9, 2] * 8, "streaming_llm:16")
        >>> len(result.logprobs)  # all tokens but the first
        23
    """
    if len(tokens) < 2:
        raise ValueError(f"a text of {len(tokens)} tokens has nothing to predict; give 2 or more")
    policy = get_policy(policy, budget=budget)
    params, mesh = on_mesh(params, mesh, policy)
    rows = get_shard(mesh, params.config).data
    engine = Engine(params, policy, batch=rows, prompt_len=0, max_new_tokens=len(tokens), mesh=mesh)
    begun = engine.begin()
    text, first, before = np.asarray([tokens] * rows, np.int32), 0, np.zeros((1, 0), np.float32)
    cache_bytes = bytes_held(policy, params.config, 0, len(tokens), params.dtype)
    if checkpoint is None:
        return Perplexity(read(engine, begun.caches, text, first, progress)[0][0], cache_bytes)
    digest = hashlib.sha256(text[:1].tobytes()).hexdigest()
    saved = Checkpoint(checkpoint, {"model": model_fingerprint(params), "policy": repr(engine.policy), "text": digest})

    def whole(caches: Any) -> tuple[Any, ...]:
        return first_row(engine.policy, engine.specs, engine.save(dataclasses.replace(begun, caches=caches)).caches)

    if (found := _resumed(saved, whole(begun.caches), mesh)) is not None:
        caches, first, before = found
        caches = repeated_row(engine.policy, engine.specs, caches)
        begun = engine.resume(dataclasses.replace(begun, caches=caches))

    def save(caches: Any, position: int, scores: Sequence[np.ndarray]) -> None:
        if broadcast(mesh, np.asarray(saved.due)):
            kept = whole(caches)
            if is_first(mesh):
                saved.save(kept, position, np.concatenate([before, *(each[:1] for each in scores)], axis=1))

    rest = read(engine, begun.caches, text, first, progress, save)[0]
    if is_first(mesh):
        saved.remove()
    return Perplexity(np.concatenate([before[0], rest[0]]), cache_bytes)


def _resumed(saved: Checkpoint, like: Any, mesh: Mesh | None) -> tuple[Any, int, Float[np.ndarray, "1 T"]] | None:
    """The result of `saved.load` in the first process that shares a mesh, sent to all."""
    found: Any = None

    def reached() -> int | None:
        nonlocal found
        found = saved.load(like)
        return None if found is None else found[1]

    position = from_first(mesh, reached)
    if position is None:
        return None
    caches, _, scores = found or (like, position, np.zeros((1, position), np.float32))
    caches, scores = broadcast(mesh, (caches, scores))
    return caches, position, scores


def read(
    engine: Engine,
    caches: tuple[Any, ...],
    tokens: Int[np.ndarray, "B T"],
    first: int,
    progress: Callable[[int, int], None] | None = None,
    save: Callable[[Any, int, Sequence[np.ndarray]], None] | None = None,
    shift: Int[np.ndarray, " B"] | int = 0,
) -> tuple[Float[np.ndarray, "B S"], Int[np.ndarray, "B S"]]:
    """Read texts one token at a time into caches that contain what precedes position `first`.

    Args:
        caches: the policy's state of each layer. Their buffers are donated.
        tokens: whole texts, of one length.
        first: position of the first token to read; the last token is predicted, not read.
        progress: called with the number of tokens read and in all.
        save: called with the caches, the position, and the log-probabilities so far, in pieces [B, …], after each piece but the last.
        shift: position minus column in `tokens`, for texts whose beginning is not in `tokens`.

    Returns:
        For each of the S = T - first - 1 tokens after `first`, its log-probability and the top-1 token.
    """
    last, scores, best = tokens.shape[1] - 1, [], []
    for start in range(first, last, CHUNK):
        count = min(CHUNK, last - start)
        inputs, targets = np.zeros((2, len(tokens), CHUNK), np.int32)
        inputs[:, :count], targets[:, :count] = (
            tokens[:, start : start + count],
            tokens[:, start + 1 : start + count + 1],
        )
        texts = jnp.asarray(inputs), jnp.asarray(targets)
        pos = np.full(len(tokens), start) + shift
        run = engine.ready(stream, caches, *texts, jnp.asarray(pos, jnp.int32), jnp.asarray(count, jnp.int32))
        caches, *found = run()
        for kept, new in zip((scores, best), found, strict=True):
            kept.append(on_host(new)[:, :count])
        if save is not None and start + count < last:
            save(caches, start + count, scores)
        if progress is not None:
            progress(start + count - first, last - first)
    return np.concatenate(scores, axis=1), np.concatenate(best, axis=1)


def compile_read(engine: Engine, caches: Any) -> None:
    """Compile the program that `read` runs.

    Args:
        caches: shapes of the policy's state of each layer, as `engine.reading()[1].caches` has them.
    """
    texts, pos, count = (
        jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((engine.batch, CHUNK), (engine.batch,), ())
    )
    engine.ready(stream, caches, texts, texts, pos, count)


def _stream_chunk(
    policy: Policy,
    specs: decoding.Specs,
    params: Params,
    caches: tuple[Any, ...],
    inputs: Int[Array, "B M"],
    targets: Int[Array, "B M"],
    start: Int[Array, " B"],
    count: Int[Array, ""],
) -> tuple[tuple[Any, ...], Float[Array, "B M"], Int[Array, "B M"]]:
    """Read `count` tokens, the first at each text's position `start`.

    Returns the caches, the log-probability of each next token, and the top-1 token.
    """

    def read_token(i: Array, carry: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        caches, scores, best = carry
        logits, caches = decoding.step(policy, specs, params, caches, inputs[:, i], start + i)
        chosen = jnp.take_along_axis(logits, targets[:, i][:, None], axis=-1)[:, 0]
        scores = scores.at[:, i].set(chosen - jax.nn.logsumexp(logits, axis=-1))
        return caches, scores, best.at[:, i].set(jnp.argmax(logits, axis=-1).astype(jnp.int32))

    buffers = jnp.zeros(inputs.shape, jnp.float32), jnp.zeros(inputs.shape, jnp.int32)
    return jax.lax.fori_loop(0, count, read_token, (caches, *buffers))


def _sharded(policy: Policy, specs: decoding.Specs, params: Params, *_: Any) -> Partition | None:
    """How `stream` is sharded over the devices of a mesh."""
    shard = specs[0].shard
    if shard.mesh is None:
        return None
    caches = state_partitions(policy, specs)
    return shard, (partitions(params), caches, ROWS, ROWS, ROWS, ALL), (caches, ROWS, ROWS)


stream = Program(_stream_chunk, static=2, donate=(3,), partition=_sharded, canonical=decoding.of_steps)
"""`stream(policy, specs, params, caches, inputs, targets, start, count)`: the compiled loop of `read`."""
