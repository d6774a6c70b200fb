"""`Batch`: a running batch on the devices, into whose free rows prompts are inserted while the others continue.

    batch = Batch(params, "rkv", 1024, rows=64, prompt_len=8192, max_new_tokens=1024)
    first = batch.admit([Job(prompt_ids, max_new_tokens=512)], [3])
    call = batch.serve(32)

Nothing here waits for the device. `kvjax.runtime.scheduler` decides what happens when.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.cache import LayerSpec, bucket
from kvjax.config import ModelConfig
from kvjax.models import Params
from kvjax.models.sharding import bytes_per_device
from kvjax.pallas_kernels.device import target
from kvjax.policies import Policy
from kvjax.policies.layer import held_bytes
from kvjax.policies.unbound import check_no_host_cache
from kvjax.runtime import decoding
from kvjax.runtime import rows as programs
from kvjax.runtime.engine import Engine, blocks, program_bytes
from kvjax.runtime.kept_share import KeptPositions, kept_positions, kept_shares
from kvjax.runtime.mesh import on_host, resumed, saved
from kvjax.runtime.prefixes import Anchor, Prefixes, blocks_from_start, has_fractions, keys_of
from kvjax.runtime.rows import Reading, Request, Rows
from kvjax.runtime.sampling import Grammar, Greedy, Masked, Sampler, Sampling, checked_bits
from kvjax.runtime.small_blocks import block_bytes, leave_small_blocks
from kvjax.runtime.top_tokens import MOST as MOST_TOPS

READ_PARTS = 1, 2, 4, 6, 8
"""Eighths of the longest prompt that prompts are padded to when they are read whole. There is a program for each."""

LEAST_READ = 128
"""Such sizes are rounded up to a multiple of it."""

TOGETHER = 2_048
"""Tokens that are enough for matmuls to keep a GPU busy. Short prompts of a list are read together up to it."""

MOST_TOGETHER = 8
"""Maximum number of prompts that are read together."""

FILLED_SHARE = 32
"""Where many prompts wait, rows are filled a group at a time. A group has one row for every `FILLED_SHARE` rows of the batch.

Larger groups make calls of `serve` longer, and let more prompts be read together. Half a group of rows is empty on average,
which is 1.6 % of a large batch.
"""


class Begun(NamedTuple):
    """The cache of a sequence that has ended, see `Batch.copy_row`.

    Attributes:
        caches: the policy's state for each layer, on the host, with one row.
        tokens: number of tokens processed.
    """

    caches: tuple[Any, ...]
    tokens: int


@dataclasses.dataclass(frozen=True)
class Job:
    """What to do for one prompt.

    Attributes:
        prompt: token ids of the prompt.
        max_new_tokens: maximum number of tokens to sample.
        given: token ids that are processed one by one after the prompt has been compressed.
        seed: sampling seed, 0 to 2**32 - 1.
        ends: token ids that end the sequence.
        sampler: how tokens are sampled, with one number for each option.
        grammar: restricts the tokens, for batches with `masked`. It serves this job alone.
        share: with whom it may share stored states of prompts, for batches with `prefixes`: jobs with equal values, such
            as text. None shares none.
        begun: a cache of the prompt's first tokens, which is continued, for batches with `block`.
        tops: how many of the most likely tokens of each step to report, for batches with `tops`.
        stop: takes each sampled token, and returns whether the sequence ends with it. It serves this job alone. The cache has
            then read no further. Meanwhile calls are one step long for all rows, and the device waits for the host after each.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    given: Sequence[int] = ()
    seed: int = 0
    ends: Sequence[int] = ()
    sampler: Greedy | Sampling = Greedy()  # noqa: RUF009 - has no fields
    grammar: Grammar | None = None
    share: str | None = None
    begun: Begun | None = None
    tops: int = 0
    stop: Callable[[int], bool] | None = None

    @property
    def total(self) -> int:
        """Number of tokens at which the sequence ends, with prompt, given and sampled ones."""
        return len(self.prompt) + len(self.given) + self.max_new_tokens


class First(NamedTuple):
    """First tokens of R inserted rows, on the device. Meaningless in rows with given tokens.

    Attributes:
        token, logprob: tokens and their log-probabilities, [R].
        tops: ids and log-probabilities of the most likely tokens, [R, `MOST`] each; None in batches without `tops`.
    """

    token: Any
    logprob: Any
    tops: Any = None


class Call(NamedTuple):
    """Results of one call of `Batch.serve`, on the device. B rows, M columns.

    Attributes:
        tokens, logprobs: sampled tokens, [B, M], and their log-probabilities under the model.
        filled: how many columns each row has filled, [B].
        live: rows that continue, [B].
        steps: number of steps.
        tops: ids and log-probabilities of the most likely tokens, [B, M, `MOST`] each; None in batches without `tops`.
    """

    tokens: Any
    logprobs: Any
    filled: Any
    live: Any
    steps: Any
    tops: Any = None


def default_read_sizes(longest: int) -> list[int]:
    """The lengths in tokens that whole prompts are padded to, where the longest has `longest` tokens."""
    parts = (-(-longest * part // (8 * LEAST_READ)) * LEAST_READ for part in READ_PARTS)
    return sorted({min(size, longest) for size in parts})


class Batch:
    """A running batch.

    Nothing is allocated before the first row is inserted.

    Attributes:
        admits: whether prompts are prefilled whole, by `admit`, and not in blocks, by `reading` and `insert`.
        group: number of rows to fill at a time, where many prompts wait.
        reused: number of tokens of the prompt begun last whose state was stored.

    Args:
        model, policy, budget, dtype, mesh: as for `kvjax.Engine`. The policy must not be `offloaded`, and the mesh must
            not have an axis "data".
        rows: number of rows.
        prompt_len: maximum prompt length in tokens.
        max_new_tokens: maximum number of tokens after a prompt, given and sampled together.
        max_total_tokens: as for `kvjax.Engine`.
        block: block size for chunked prefill; None prefills whole prompts.
        given: maximum number of given tokens of a job.
        ends: maximum number of end tokens of a job.
        sampling: which options of sampling jobs have, such as "temperature", "top_p". Without any, jobs are greedy.
        scaled_logprobs: whether log-probabilities are those of logits / temperature.
        masked: whether jobs may have grammars.
        tops: whether jobs may ask for the most likely tokens.
        anchor: where the blocks of chunked prefill are counted from. With "end", as in `kvjax.generate`, the first block may be
            shorter; with "start", the last but one, see `kvjax.runtime.prefixes.blocks_from_start`.
        prefixes: maximum number of states of prompts' beginnings that are stored on the device, besides the rows. They need
            chunked prefill with anchor "start".
        prefix_host_bytes: maximum size of the states that are moved to host memory when the device has no more room for them.
        read_sizes: lengths that whole prompts are padded to. Each needs a program. By default five, in eighths of the longest
            prompt. More sizes waste less time on padding.
        read_together: maximum number of tokens, padding included, of short prompts that are read together. GPUs multiply few
            tokens at a fraction of their speed. The number of prompts is at most `group`. It follows from their padded
            length, and missing ones are replaced by copies. So results do not depend on how many wait. By default each is
            read alone.
        mixed: whether prompts may be much shorter than `prompt_len`, see `LayerSpec`. Without it, a batch of one row may
            need less memory.

    Raises:
        ValueError, PolicyError: as for `kvjax.Engine`.

    Example:
        >>> from kvjax.runtime.batch import Batch, Job
        >>> from kvjax.runtime.scheduler import Scheduler
        >>> batch = Batch(params, "snapkv:16,window=8", rows=2, prompt_len=48, max_new_tokens=8)
        >>> scheduler = Scheduler(batch, steps=8)
        >>> ticket = scheduler.submit(Job([5, 9, 2] * 16, 4))
        >>> while scheduler.busy:
        ...     _ = scheduler.turn()
        >>> len(ticket.tokens), ticket.ended
        (4, 'length')
    """

    def __init__(
        self,
        model: Params | ModelConfig,
        policy: str | Policy = "full",
        budget: int | float | None = None,
        *,
        rows: int,
        prompt_len: int,
        max_new_tokens: int,
        max_total_tokens: int | None = None,
        block: int | None = None,
        given: int = 0,
        ends: int = 8,
        sampling: Collection[str] = (),
        scaled_logprobs: bool = False,
        masked: bool = False,
        tops: bool = False,
        anchor: Anchor = "end",
        prefixes: int = 0,
        prefix_host_bytes: int = 0,
        read_sizes: Sequence[int] | None = None,
        read_together: int = 0,
        mixed: bool = True,
        dtype: Any = None,
        mesh: Mesh | str | None = None,
    ) -> None:
        self.engine = Engine(
            model,
            policy,
            budget,
            batch=rows,
            prompt_len=prompt_len,
            max_new_tokens=max_new_tokens,
            max_total_tokens=max_total_tokens,
            block=block,
            mixed=mixed,
            dtype=dtype,
            mesh=mesh,
        )
        check_no_host_cache(self.engine.policy)
        if self.engine.shard.data > 1:
            raise ValueError(
                "mesh: a running batch has no axis 'data'; make a batch for each index of it, with `kvjax.models.sharding.along_data`"
            )
        self.policy, self.rows = self.engine.policy, rows
        # Several rows have slots for prompts of any length, so each is prefilled into as many.
        self.specs = tuple(dataclasses.replace(spec, mixed=mixed or rows > 1) for spec in self.engine.specs)
        self.reader = tuple(dataclasses.replace(spec, batch=1) for spec in self.specs)
        self.given, self.ends = bucket(given, 16) or 1, ends
        self.sampling, self.scaled_logprobs, self.masked = frozenset(sampling), scaled_logprobs, masked
        self.tops = tops
        if prefixes and not (self.engine.block and anchor == "start"):
            raise ValueError(
                f"prefixes={prefixes}, but states are stored only between blocks that are counted from the start; give block, and anchor='start'"
            )
        self.anchor: Anchor = anchor
        self.prefixes, self._fractions = Prefixes(prefixes, prefix_host_bytes), has_fractions(self.policy)
        self.reused = 0
        longest = self.reader[0].prompt_len
        self.read_sizes = sorted(
            {min(size, longest) for size in (*(read_sizes or default_read_sizes(longest)), longest)}
        )
        self.admits, self.read_tokens = not self.engine.block, read_together
        self.group = max(rows // FILLED_SHARE, 1) if self.admits else 1
        self._shorter: dict[int, bool] = {}
        self._nothing: Any = None
        self._last = self._no_last()
        self._between: list[Any] = []  # keeps small blocks of memory apart
        self.state: Rows | None = None

    @property
    def weights(self) -> Params:
        """The weights."""
        return self.engine.weights

    def update(self, params: Params) -> None:
        """Use other weights of the same shape and type from the next call on. Nothing is compiled again.

        Raises:
            ValueError: as `Engine.of`.
        """
        self.engine = self.engine.of(params)
        self.prefixes.clear()

    def check(self, job: Job) -> None:
        """Raise `ValueError` if a job does not fit this batch."""
        spec, after = self.specs[0], len(job.given) + job.max_new_tokens
        for name, number, least, most, option in (
            ("prompt has", len(job.prompt), 1, spec.prompt_len, "prompt_len"),
            ("given and new tokens are", after, 1, spec.new_tokens, "max_new_tokens"),
            ("given tokens are", len(job.given), 0, self.given, "given"),
            ("end tokens are", len(job.ends), 0, self.ends, "ends"),
            ("grammars are", int(job.grammar is not None), 0, int(self.masked), "masked"),
            ("begun caches are", int(job.begun is not None), 0, int(self.engine.block > 0), "block"),
            ("tokens in a begun cache are", job.begun.tokens if job.begun else 0, 0, len(job.prompt) - 1, "prompt"),
            ("most likely tokens are", job.tops, 0, self.most_tops, "tops"),
        ):
            if not least <= number <= most:
                raise ValueError(
                    f"a job's {name} {number}, but this batch is for {least} to {most}; give fewer, or make a batch with larger {option}"
                )

    @property
    def most_tops(self) -> int:
        """Maximum number of most likely tokens that a job may ask for."""
        return min(MOST_TOPS, self.engine.config.vocab_size) if self.tops else 0

    def admit(self, jobs: Sequence[Job], rows: Sequence[int], allowed: Sequence[Any] = ()) -> First:
        """Prefill the prompts of some jobs, whole and at once, write them into rows, and sample their first tokens.

        Args:
            jobs: at most as many as `together` says, all with the same padded length.
            rows: the row of each.
            allowed: for each, what `allowed` returned for the first token, or None without a grammar.

        Raises:
            ValueError: a job does not fit this batch.
        """
        for job in jobs:
            self.check(job)
        if self.state is None:
            self.reset()
        size, most = self.together(jobs[0])
        copies = most - len(jobs)
        padded = [*jobs, *[jobs[0]] * copies]
        tokens = np.zeros((most, size), np.int32)
        for own, job in zip(tokens, padded, strict=True):
            own[: len(job.prompt)] = job.prompt
        self.state, self._last, *first, tops = programs.admit(
            self.policy,
            self.specs,
            self.weights,
            self.state,
            self._last,
            tokens,
            _numbers([len(job.prompt) for job in padded]),
            self._request(padded, allowed),
            _numbers([*rows, *[0] * copies]),
            np.asarray(len(jobs), np.int32),
        )
        return First(*_on_the_way(first), tops=tops)

    def again(self, row: int, index: int = 0) -> Reading:
        """A reading of a prompt of the last call of `admit`, for `insert` to write it into other rows.

        Args:
            row: the row that it was written into, which must not have decoded yet.
            index: its place among the jobs of that call.
        """
        return programs.again(
            self.policy, self.specs, self.state, self._last, _numbers([row]), np.asarray(index, np.int32)
        )

    def together(self, job: Job) -> tuple[int, int]:
        """Number of tokens of a prompt that are read at a time, with padding, and how many prompts are read together.

        Raises:
            ValueError: the job does not fit this batch.
        """
        self.check(job)
        if not self.admits:
            return self.engine.block, 1
        size = self.read_size(len(job.prompt))
        return size, self._most(size)

    def _most(self, size: int) -> int:
        """How many prompts padded to `size` tokens are read together."""
        return max(min(self.read_tokens // size, MOST_TOGETHER, self.group), 1)

    def read_size(self, length: int) -> int:
        """Number of places that a prompt of `length` tokens is padded to when it is read whole."""
        most = self.reader[0].prompt_len
        size = next(size for size in self.read_sizes if size >= length)
        if size == most:
            return most
        if size not in self._shorter:
            self._shorter[size] = _reads_shorter(self.policy, self.reader, self.weights, size)
        return size if self._shorter[size] else most

    def reading(self, job: Job) -> Iterator[tuple[Reading, bool]]:
        """Prefill a job's prompt block by block. Yields a reading after each block, and whether it is complete."""
        self.check(job)
        if job.begun is not None:
            yield from self._go_on(job, job.begun)
            return
        size, total = self.engine.block, _numbers([job.total])
        if self.anchor == "start":
            parts = blocks_from_start(job.prompt, size)
        else:
            parts = [part for (part,) in blocks([job.prompt], size)]
        keys: list[bytes] = []
        if self.prefixes.most and job.share is not None:
            keys = keys_of(parts, size, job.share, job.total if self._fractions else None)
        done, reading, keep = self.prefixes.plan(keys)
        self.reused = done * size
        if reading is None:
            logits = np.zeros((1, self.engine.config.vocab_size), np.float32)
            reading = programs.begin(self.policy, self.reader, total, logits)
        else:  # the next block uses its reading up
            reading = programs.copy(self.policy, self.reader, reading)
        for i, part in enumerate(parts[done:], done + 1):
            given = decoding.padded([part], size)
            reading = programs.read_block(self.policy, self.reader, self.weights, reading, *given, total)
            if i == keep:
                self.prefixes.put(keys[i - 1], programs.copy(self.policy, self.reader, reading))
            yield reading, i == len(parts)

    def _go_on(self, job: Job, begun: Begun) -> Iterator[tuple[Reading, bool]]:
        """Prefill what follows in a begun cache."""
        size, total = self.engine.block, _numbers([job.total])
        self.reused = begun.tokens
        caches = resumed(self.policy, self.reader, begun.caches)
        logits: Any = np.zeros((1, self.engine.config.vocab_size), np.float32)
        # Copies, as the next block uses them up. To put an array compiles nothing, unlike `jnp.array`.
        reading = jax.device_put(Reading(caches, logits, _numbers([begun.tokens])), may_alias=False)
        parts = blocks_from_start(job.prompt[begun.tokens :], size)
        for i, part in enumerate(parts, 1):
            given = decoding.padded([part], size)
            reading = programs.read_block(self.policy, self.reader, self.weights, reading, *given, total)
            yield reading, i == len(parts)

    def reset(self) -> None:
        """Begin with empty rows. The memory of the rows before is freed first."""
        self._free_rows()
        state, self._nothing = programs.empty(self.policy, self.specs, self._request([]), self._no_logits())
        self.state = state
        if not self._between:
            devices = state.pos.sharding.addressable_devices
            self._between = leave_small_blocks(self._largest_of_calls, devices)

    def free(self) -> None:
        """Free the memory of all rows and stored states."""
        self._free_rows()
        self._between.clear()
        self.prefixes.clear()

    def _free_rows(self) -> None:
        state, self.state = self.state, None
        for leaf in jax.tree.leaves((state, self._nothing, self._last)):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        self._nothing, self._last = None, self._no_last()

    def insert(self, reading: Reading, job: Job, row: int, allowed: Any = None) -> First:
        """Write a prefilled prompt into a row, and sample its first token. The reading can be inserted again.

        Args:
            reading: the prompt.
            job: what to do.
            row: the row.
            allowed: what `allowed` returned for the first token, if the job has a grammar.
        """
        if self.state is None:
            self.reset()
        request, to = self._request([job], [allowed]), _numbers([row])
        self.state, *first, tops = programs.insert(self.policy, self.specs, self.state, reading, request, to)
        return First(*_on_the_way(first), tops=tops)

    def allowed(self, job: Job, tokens: Sequence[int]) -> Any:
        """Bits of the tokens that a job's grammar allows after those that it has sampled. To be called once for each token.

        Raises:
            ValueError: the grammar returned no bits, or none that is set.
        """
        assert job.grammar is not None
        return checked_bits(job.grammar(tokens), self.engine.config.vocab_size, "the grammar of a job")

    def restrict(self, allowed: Mapping[int, Any]) -> None:
        """Set which tokens some rows may sample in the next step. Other rows are not restricted.

        Args:
            allowed: for each row, what `allowed` returned.
        """
        assert self.state is not None
        bits = self._all_allowed(self.rows)
        for row, own in allowed.items():
            bits[row] = own
        request = self.state.request
        sampler: Any = request.sampler
        request = dataclasses.replace(request, sampler=dataclasses.replace(sampler, allowed=bits))
        self.state = dataclasses.replace(self.state, request=request)

    def release(self, row: int) -> None:
        """Empty a row that has ended, so that attention does not read its tokens any longer."""
        self.insert(self._nothing, _NOTHING, row)

    def copy_row(self, row: int) -> tuple[tuple[Any, ...], int, int]:
        """Copy a row's caches to the host, once it has ended and before it is given away.

        Returns:
            The caches, unsharded, with one row; the number of tokens that they have processed; and how many of them came
                after the prompt.
        """
        reading, after = programs.take(self.policy, self.specs, self.state, _numbers([row]))
        caches = saved(self.policy, self.reader, reading.caches)
        return caches, int(on_host(reading.pos)[0]), int(on_host(after)[0])

    def kept_share(self, row: int) -> float:
        """Share of its tokens that a row keeps, see `kept_shares`, once it has ended and before it is given away."""
        reading, _ = programs.take(self.policy, self.specs, self.state, _numbers([row]))
        return float(kept_shares(self.policy, self.reader, reading.caches)[0])

    def kept_positions(self, row: int) -> KeptPositions:
        """Which tokens a row keeps, on the way to the host. The row may go on, and is not changed.

        On a mesh, its caches are copied to the host first.
        """
        assert self.state is not None
        caches, tokens = self.state.caches, self.state.pos
        if self.engine.shard.mesh is not None:
            reading, _ = programs.take(self.policy, self.specs, self.state, _numbers([row]))
            caches, tokens, row = saved(self.policy, self.reader, reading.caches), on_host(reading.pos), 0
        whole = [spec.whole for spec in self.reader]
        return KeptPositions(*_on_the_way(kept_positions(self.policy, whole, caches, tokens, _numbers([row]))))

    def serve(self, count: int, stop: Collection[int] = (), *, hold: Collection[int] = (), leave: int = 0) -> Call:
        """Decode up to `count` steps of all live rows; see `kvjax.runtime.rows.serve`.

        Args:
            count: maximum number of steps.
            stop: rows that end before the first step.
            hold: rows that take no part. If all live rows are held, the call has no step.
            leave: the call returns once this many rows have ended, not counting those in `stop`; 0 for no such limit.
        """
        self.state, *call, tops = programs.serve(
            self.policy,
            self.specs,
            self.weights,
            self.state,
            np.asarray(count, np.int32),
            self._among_rows(stop),
            self._among_rows(hold),
            np.asarray(leave, np.int32),
        )
        return Call(*_on_the_way(call), tops=tops)

    def _among_rows(self, some: Collection[int]) -> Any:
        found = np.zeros(self.rows, bool)
        found[list(some)] = True
        return found

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's cache on each device."""
        return sum(held_bytes(layer)[0] for layer in decoding.layers_of(self.policy, self.reader))

    def compile(self, lengths: Collection[int], jobs: int = 1, *, samples: bool = False) -> int:
        """Compile all programs that prompts of these lengths need.

        Args:
            lengths: lengths of the prompts.
            jobs: number of programs to compile at a time.
            samples: whether prompts may have several samples.

        Returns:
            Peak device memory in bytes while the batch runs: by XLA's memory analysis, with the small blocks of a GPU.
        """
        shape = jax.ShapeDtypeStruct
        requests = jax.tree.map(_shape, self._request([_NOTHING]))
        state, reading = programs.empty.shapes(self.policy, self.specs, self._request([]), self._no_logits())
        one, count = shape((1,), jnp.int32), shape((), jnp.int32)
        weights, held = bytes_per_device(self.weights), self.row_bytes * self.rows
        reading = jax.tree.map(_shape, reading)
        if not self.admits:
            model, block = (self.policy, self.reader, self.weights), shape((1, self.engine.block), jnp.int32)
            read: list[tuple[Any, tuple[Any, ...]]] = [(programs.read_block, (*model, reading, block, one, one))]
            beside = [held]
            if self.prefixes.most:
                read.append((programs.copy, (self.policy, self.reader, reading)))
                beside.append(held + weights)
        else:
            sizes = sorted({self.together(Job(range(length), 1)) for length in lengths})
            read = [(programs.admit, self._admit_shapes(state, *size)) for size in sizes]
            beside = [0] * len(read)
            if samples:
                read.append((programs.again, (self.policy, self.specs, state, _shape(self._last), one, count)))
                beside.append(weights)
        serve = self.policy, self.specs, self.weights, state, count, *[shape((self.rows,), bool)] * 2, count
        decode = [
            (programs.serve, serve),
            (programs.insert, (self.policy, self.specs, state, reading, requests, one)),
        ]
        with ThreadPoolExecutor(jobs) as pool:
            found = list(pool.map(lambda each: program_bytes(each[0].compiled(*each[1])), [*decode, *read]))
        # Rows besides the batch: the empty one, prompts that are read or wait for a row, and stored states.
        waiting = 1 if not self.admits else self._most(min(self.read_sizes)) if samples else 0
        others = self.row_bytes * (1 + waiting + self.prefixes.most)
        reading = [each + more for each, more in zip(found[2:], beside, strict=True)]
        if target().platform == "gpu":
            others += block_bytes(self._largest_of_calls)
        return others + max(found[0], weights + found[1] - self.row_bytes, *reading)

    @property
    def _largest_of_calls(self) -> int:
        """Size in bytes of the largest array that a call takes from the host or returns to it."""
        prompts = max(self._most(size) * size for size in self.read_sizes)
        results = self.rows * decoding.CHUNK * (MOST_TOPS if self.tops else 1)
        return 4 * max(prompts, results, self._all_allowed(self.rows).size if self.masked else 0)

    def _no_logits(self) -> Any:
        return np.zeros((1, self.engine.config.vocab_size), np.float32)

    def _no_last(self) -> Any:
        """Room for the logits after all prompts that are read together."""
        return np.zeros((self._most(min(self.read_sizes)), self.engine.config.vocab_size), np.float32)

    def _admit_shapes(self, state: Any, size: int, most: int) -> tuple[Any, ...]:
        """Arguments of `admit`, as shapes, for `most` prompts padded to `size`."""
        shape = jax.ShapeDtypeStruct
        numbers, count = shape((most,), jnp.int32), shape((), jnp.int32)
        requests = jax.tree.map(_shape, self._request([_NOTHING] * most))
        tokens, last = shape((most, size), jnp.int32), _shape(self._last)
        return self.policy, self.specs, self.weights, state, last, tokens, numbers, requests, numbers, count

    def _request(self, jobs: Sequence[Job], allowed: Sequence[Any] = ()) -> Request:
        """The jobs as arrays; without jobs, one row each that asks for nothing. `allowed` has bits of the first jobs, or None."""
        count = len(jobs) or self.rows
        given: Any = np.zeros((count, self.given), np.int32)
        ends: Any = np.full((count, self.ends), -1, np.int32)  # arrays are NumPy's: programs take them faster
        for i, job in enumerate(jobs):
            given[i, : len(job.given)] = job.given
            ends[i, : len(job.ends)] = job.ends
        seeds: Any = np.asarray([job.seed for job in jobs] or [0] * count, np.uint32)
        return Request(
            seed=seeds,
            limit=_numbers([job.total for job in jobs] or [0] * count),
            ends=ends,
            sampler=self._masked(self._sampler([job.sampler for job in jobs] or [Greedy()] * count), count, allowed),
            given=given,
            given_count=_numbers([len(job.given) for job in jobs] or [0] * count),
            tops=_numbers([job.tops for job in jobs] or [0] * count) if self.tops else None,
        )

    def _masked(self, sampler: Sampler, count: int, allowed: Sequence[Any]) -> Sampler:
        if not self.masked:
            return sampler
        bits = self._all_allowed(count)
        for own, each in zip(bits, allowed, strict=False):
            if each is not None:
                own[:] = each
        return Masked(sampler, bits)

    def _all_allowed(self, count: int) -> Any:
        return np.full((count, -(-self.engine.config.vocab_size // 32)), 0xFFFFFFFF, np.uint32)

    def _sampler(self, samplers: Sequence[Greedy | Sampling]) -> Sampler:
        """One sampler with a number per row for each option that jobs of this batch have."""
        if not self.sampling:
            return Greedy()

        def numbers(name: str, none: int | float, dtype: Any) -> Any:
            if name not in self.sampling and name != "temperature":
                return None
            found = (getattr(sampler, name, None) for sampler in samplers)
            return np.asarray([none if number is None else number for number in found], dtype)

        return Sampling(
            temperature=numbers("temperature", 0.0, np.float32),
            top_k=numbers("top_k", np.iinfo(np.int32).max, np.int32),
            top_p=numbers("top_p", 1.0, np.float32),
            min_p=numbers("min_p", 0.0, np.float32),
            scaled=self.scaled_logprobs,
        )


_NOTHING = Job((), 0)


def tokens_together() -> int:
    """Value of `read_together` for many prompts that wait at once, on this device. A CPU gains nothing from it."""
    return 0 if target().platform == "cpu" else TOGETHER


def _numbers(values: Sequence[int]) -> Any:
    return np.asarray(values, np.int32)


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _on_the_way(arrays: Sequence[Any]) -> list[Any]:
    """Begin to copy arrays to the host."""
    for array in arrays:
        array.copy_to_host_async()
    return list(arrays)


def _reads_shorter(policy: Policy, specs: tuple[LayerSpec, ...], weights: Params, size: int) -> bool:
    """Whether a prompt of fewer places than `prompt_len` leaves a state of the same shapes."""
    found = []
    for places in (size, specs[0].prompt_len):
        tokens, one = jax.ShapeDtypeStruct((1, places), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        found.append(programs.read.shapes(policy, specs, weights, tokens, one, one))
    return jax.tree.structure(found[0]) == jax.tree.structure(found[1]) and all(
        a.shape == b.shape for a, b in zip(*map(jax.tree.leaves, found), strict=True)
    )
