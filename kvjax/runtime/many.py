"""Lists of prompts through running batches: as many rows as fit the memory, and prompts of like sizes together."""

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from rich.filesize import decimal

from kvjax.cache import Shard, bucket
from kvjax.config import MLPConfig, ModelConfig, MoEConfig
from kvjax.models import Params
from kvjax.models.sharding import along_data, bytes_per_device
from kvjax.pallas_kernels.projection.types import FEW_ROWS
from kvjax.policies import Policy, PolicyError
from kvjax.policies.unbound import check_no_host_cache
from kvjax.runtime.batch import Batch, Job, default_read_sizes, tokens_together
from kvjax.runtime.kept_state import kept
from kvjax.runtime.memory import memory_limit
from kvjax.runtime.reading import rows_together
from kvjax.runtime.row import Row
from kvjax.runtime.scheduler import Schedulers, Ticket

log = logging.getLogger(__name__)

MOST_ROWS = 256
"""Maximum number of rows of a batch."""

AT_ONCE = 16_384
"""Up to this many tokens, padded prompts of a list always run together, as one batch that starts and stops together."""

ALIKE = 0.75
"""Longer lists do so too if the padded prompts have this share of tokens, and if all caches and the prefill fit."""

EXPERT_TOKENS = 4096
"""Maximum number of tokens whose experts' hidden units are in memory together."""

PREFILL_FACTOR = 3
"""Bytes that prefill needs per token, divided by those of the residual stream, its norm and the MLP; measured with
Llama-3.1-8B's shape on an H100.
"""

STEPS = 16
"""Decode steps of a call. Where texts end at strings, which the host finds, it is half of it."""

APART = 4
"""Prompts whose lengths differ by this factor are in different batches, if together fewer rows would fit, or with `PADDED`."""

PADDED = 1.25
"""They are so as well if padding would make them this many times as long together, since prompts are padded to lengths that
follow from the longest one.
"""

JOBS = 8
"""Maximum number of programs that are compiled at a time."""

SHARE = 0.95
"""Share of the memory that is used at most."""


Part = tuple[Params, Mesh | None]
"""Weights, and the devices that they are on."""


class Run(Protocol):
    """What is needed of a call of `generate`, see `kvjax.runtime.generation.Run`. Times and bytes are added to it."""

    params: Params
    policy: Policy
    rows: list[Row]
    single: bool
    mesh: Any
    shard: Shard
    prefill_block: int | None
    continuous: bool
    batch_rows: int | None
    return_state: bool
    room: int
    max_total_tokens: int | None
    progress: Callable[[int, int], Any] | None
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    cache_bytes: int
    full_cache_bytes: int
    step_bytes_read: int
    repeated_cache_bytes: int


def runs_continuously(run: Run) -> bool:
    """Whether prompts of a call run through a running batch, instead of in batches that start and stop together."""
    if run.return_state:
        return True
    if run.single or not _can_run_continuously(run.policy, run.params.config):
        return False
    if run.policy.info.keeps_by_threshold:  # to know what each sequence keeps at its end
        return True
    first = run.rows[0].request
    alike = all(dataclasses.replace(row.request, seed=first.seed) == first for row in run.rows)
    if run.continuous or run.batch_rows is not None or run.max_total_tokens is not None or not alike:
        return True
    lengths = [len(row.prompt) for row in run.rows]
    padded = len(lengths) * max(lengths)
    return padded > AT_ONCE and not (sum(lengths) >= ALIKE * padded and _all_fit(run, max(lengths)))


def _can_run_continuously(policy: Policy, config: ModelConfig) -> bool:
    """Whether a running batch supports the policy and the model, in this process."""
    if jax.process_count() > 1 or config.rope_changes_after is not None:
        return False
    try:
        check_no_host_cache(policy)
    except PolicyError:
        return False
    return True


def prefilled_at_once(policy: Policy, config: ModelConfig, rows: int, longest: int) -> int:
    """How many of a list's prompts must fit the memory with all of their keys and values, if each is prefilled whole.

    Args:
        rows: number of prompts.
        longest: tokens of the longest prompt.
    """
    return min(rows, max(AT_ONCE // longest, 1)) if _can_run_continuously(policy, config) else rows


def _all_fit(run: Run, longest: int) -> bool:
    """Estimate of whether the caches of all sequences fit beside the weights and the prefill of a group of prompts."""
    count, config, limit = len(run.rows), run.params.config, memory_limit(run.shard)
    if count > MOST_ROWS or run.shard.data > 1:
        return False
    if limit is None:
        return True
    batch = _batch(run, (run.params, run.mesh), run.rows, count)
    if run.prefill_block:
        tokens = count * run.prefill_block
    else:
        tokens = longest * rows_together(batch.policy, batch.specs, count, longest)
    itemsize = run.params.dtype.itemsize
    hidden = max(_units(kind.mlp, tokens) for kind in config.kinds) // run.shard.model
    prefill = PREFILL_FACTOR * (3 * config.hidden_size * tokens + 2 * hidden) * itemsize
    # Some policies keep all keys and values of the prompts until they compress.
    compresses = batch.row_bytes < config.cache_bytes(longest, itemsize) // run.shard.heads
    whole = config.cache_bytes_per_token(itemsize) * tokens if compresses else 0
    return bytes_per_device(run.params) + count * batch.row_bytes + prefill + whole <= SHARE * limit


def _units(mlp: MLPConfig | MoEConfig, tokens: int) -> int:
    """Hidden units of a layer that are in memory together while it reads this number of tokens."""
    return mlp.active_width * (min(tokens, EXPERT_TOKENS) if isinstance(mlp, MoEConfig) else tokens)


def through_batches(run: Run) -> Iterator[list[int]]:
    """Run all sequences of a call. Yields the indices of those that have new tokens."""
    parts = along_data(run.shard, run.params)
    for group in _groups(run, parts[0]):
        batches = _batches_for(run, parts, [run.rows[i] for i in group])
        try:
            yield from _through(run, batches, group)
        finally:  # also where the caller stops, or a prompt fails
            for batch in batches:
                batch.free()


def _through(run: Run, batches: Sequence[Batch], group: Sequence[int]) -> Iterator[list[int]]:
    watched = any(run.rows[i].growing is not None for i in group)

    def keep(batch: Batch, ticket: Ticket, row: int) -> None:
        job, of = ticket.job, run.rows[owners[ticket]]
        if run.return_state:
            of.state = kept(batch, row, [*job.prompt, *job.given], ticket.tokens)
        if run.policy.info.keeps_by_threshold:
            of.kept_share = batch.kept_share(row)

    on_end = keep if run.return_state or run.policy.info.keeps_by_threshold else None
    scheduler = Schedulers(batches, steps=STEPS // 2 if watched else STEPS, on_end=on_end)
    # The longest answers begin first, so that the last rows do not run alone for long. Among equal limits, long prompts
    # begin first, as a guess at which answers are long.
    order = sorted(group, key=lambda i: (-run.rows[i].request.max_new_tokens, -len(run.rows[i].prompt)))
    owners: dict[Ticket, int] = {scheduler.submit(_job(run.rows[i])): i for i in order}
    begun = time.perf_counter()
    while scheduler.busy:
        waiting = scheduler.waiting
        changed = scheduler.turn()
        now = time.perf_counter()
        if waiting > scheduler.waiting:
            run.prefill_seconds += now - begun
        else:
            run.decode_seconds += now - begun
        begun = now
        for ticket in changed:
            row, new = run.rows[owners[ticket]], len(ticket.tokens)
            if ticket.error is not None:
                raise ticket.error
            row.extend(ticket.tokens[len(row.tokens) : new], ticket.logprobs[len(row.tokens) : new])
            if row.stop_reason is not None and ticket.ended is None:
                scheduler.cancel(ticket)
            elif ticket.ended == "length" and row.stop_reason is None:
                row.stop_reason = "length"
        if run.progress is not None and any(ticket.ended is not None for ticket in changed):
            run.progress(sum(row.stop_reason is not None for row in run.rows), len(run.rows))
        if changed:
            yield [owners[ticket] for ticket in changed]


def _job(row: Row) -> Job:
    request = row.request
    return Job(row.prompt, request.max_new_tokens, row.question, request.seed, request.ends, request.sampler)


def _groups(run: Run, part: Part) -> list[list[int]]:
    """Indices of sequences that share a batch, those with short prompts first.

    All are one batch unless a batch for the longest prompts has too few rows for the others, or pads them too much.
    """
    order = sorted(range(len(run.rows)), key=lambda i: len(run.rows[i].prompt))
    groups: list[list[int]] = []
    for i in order:
        if groups and len(run.rows[i].prompt) <= APART * max(len(run.rows[groups[-1][0]].prompt), 128):
            groups[-1].append(i)
        else:
            groups.append([i])
    joined = [groups[0]]
    for group in groups[1:]:
        both = joined[-1] + group
        first, second, rows = ([run.rows[i] for i in each] for each in (joined[-1], group, both))
        short_enough = _padded(run, rows) <= PADDED * (_padded(run, first) + _padded(run, second))
        if short_enough and _fits(run, part, rows) >= min(len(rows), MOST_ROWS // 8):
            joined[-1] = both
        else:
            joined.append(group)
    return joined


def _fits(run: Run, part: Part, rows: Sequence[Row]) -> int:
    """Estimate of how many rows of a batch fit, before anything is compiled."""
    limit = memory_limit(run.shard)
    if limit is None:
        return MOST_ROWS
    free = SHARE * limit - bytes_per_device(part[0])
    return max(int(free // _batch(run, part, rows, 1).row_bytes) - 1, 0)


def _lengths(run: Run, rows: Sequence[Row]) -> tuple[int, int]:
    """Maximum lengths in tokens that a batch for these sequences has: of a prompt, and of what follows it."""
    new = max(len(row.question) + row.request.max_new_tokens for row in rows) + run.room
    longest = max(len(row.prompt) for row in rows)
    return longest if run.max_total_tokens is None else max(run.max_total_tokens - new, longest), new


def _padded(run: Run, rows: Sequence[Row]) -> int:
    """Number of tokens that prefill processes for these sequences in one batch, padding included."""
    lengths = sorted(len(row.prompt) for row in rows)
    if run.prefill_block:
        return sum(lengths)
    sizes = np.asarray(default_read_sizes(bucket(_lengths(run, rows)[0])))
    return int(sizes[np.searchsorted(sizes, lengths)].sum())


def _batch(run: Run, part: Part, rows: Sequence[Row], count: int) -> Batch:
    """A batch of `count` rows for these sequences."""
    longest, new = _lengths(run, rows)
    kinds = {name for row in rows for name in row.request.sampler.filters}
    params, mesh = part
    return Batch(
        params,
        run.policy,
        rows=count,
        prompt_len=longest,
        max_new_tokens=new,
        block=run.prefill_block,
        given=max(len(row.question) for row in rows),
        ends=max(max(len(row.request.ends) for row in rows), 1),
        sampling=kinds,
        read_together=tokens_together(),
        mixed=len({bucket(len(row.prompt)) for row in rows}) > 1,
        mesh=mesh,
    )


def _even(count: int) -> int:
    """A number of rows that GPUs multiply without padding, if there are many."""
    return count - count % 8 if count > FEW_ROWS else count


def _batches_for(run: Run, parts: Sequence[Part], rows: Sequence[Row]) -> list[Batch]:
    """A batch for each part of the devices, with as many rows as fit the memory, or as were asked for.

    Their programs are compiled.
    """
    limit, wanted = memory_limit(run.shard), -(-len(rows) // len(parts))
    if run.batch_rows is None:
        count = min(wanted, MOST_ROWS, _even(_fits(run, parts[0], rows)))
    else:
        count = min(wanted, -(-run.batch_rows // len(parts)))
    if count < 1:
        one = _batch(run, parts[0], rows, 1).row_bytes
        raise ValueError(
            f"a cache of {decimal(one)} by {run.policy.info.name} for one sequence, its prefill and weights of "
            f"{decimal(bytes_per_device(parts[0][0]))} exceed the {decimal(limit or 0)} of memory here; give shorter prompts, fewer new tokens, "
            "a smaller budget, or another policy"
        )
    while True:
        batches, begun = [_batch(run, part, rows, count) for part in parts], time.perf_counter()
        lengths, jobs = [len(row.prompt) for row in rows], min(os.cpu_count() or 1, JOBS)
        peak = max(batch.compile(lengths, jobs) for batch in batches)
        run.compile_seconds += time.perf_counter() - begun
        over = 0 if limit is None or run.batch_rows is not None else peak - SHARE * limit
        if over <= 0 or count == 1:
            break
        count = _even(max(count - 1 - int(over // batches[0].row_bytes), 1))
    batch = batches[0]
    log.info(
        "%d prompts through %d rows of %s by %s; peak memory %s",
        len(rows),
        count * len(batches),
        decimal(batch.row_bytes),
        run.policy.info.name,
        decimal(peak),
    )
    run.cache_bytes += batch.row_bytes * count
    run.full_cache_bytes += batch.engine.full_cache_bytes
    run.step_bytes_read += batch.engine.step_bytes_read
    run.repeated_cache_bytes += batch.engine.repeated_cache_bytes
    return batches
