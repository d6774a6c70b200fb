"""The programs of a running batch, whose rows begin and end at their own times.

`admit` prefills whole prompts and writes them into free rows of the running batch. With chunked prefill, `read_block`
prefills a prompt in a batch of one row, which `insert` writes into a free row. `serve` decodes all rows that have something
to do. A row's tokens do not depend on the other rows, nor on the row that it was given.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.models import Params, transformer
from kvjax.models.sharding import partitions
from kvjax.policies import Policy
from kvjax.runtime.compression import after_block
from kvjax.runtime.decoding import (
    CHUNK,
    Loop,
    Specs,
    admit_options,
    decode_loop,
    empty_caches,
    gpu_options_of,
    insert_options,
    of_steps,
    prefill_options,
    sample_token,
)
from kvjax.runtime.mesh import ALL, ROWS, state_partitions
from kvjax.runtime.program import Partition, Program
from kvjax.runtime.reading import layers_of, read_prompts
from kvjax.runtime.sampling import Sampler
from kvjax.runtime.top_tokens import MOST, top_tokens


@flax.struct.dataclass
class Request:
    """What a row must do. R rows.

    Attributes:
        seed: sampling seed.
        limit: number of tokens at which the row ends, with prompt, given and sampled ones.
        ends: end tokens, -1 for none.
        sampler: how tokens are sampled, with one number per row in each array.
        given: tokens to process after the prompt, before any is sampled.
        given_count: number of given tokens.
        tops: how many of the most likely tokens of each step are reported, up to `MOST`. None if the batch reports none.
    """

    seed: UInt32[Array, " R"]
    limit: Int[Array, " R"]
    ends: Int[Array, "R E"]
    sampler: Sampler
    given: Int[Array, "R G"]
    given_count: Int[Array, " R"]
    tops: Int[Array, " R"] | None = None


TopTokens = tuple[Int[Array, "..."], Float[Array, "..."]] | None
"""Ids and log-probabilities of the most likely tokens. None if the batch reports none."""


@flax.struct.dataclass
class Rows:
    """State of a running batch.

    Attributes:
        caches: the policy's state for each layer.
        token: latest token of each row, not yet in the cache.
        pos: position of that token.
        live: whether the row has something to do. The others do not change.
        first: number of prompt tokens of each row, which is the position of the first given token.
        request: what each row must do.
    """

    caches: tuple[Any, ...]
    token: Int[Array, " B"]
    pos: Int[Array, " B"]
    live: Bool[Array, " B"]
    first: Int[Array, " B"]
    request: Request


@flax.struct.dataclass
class Reading:
    """Prompts that were prefilled, or are being prefilled in blocks. R rows.

    Attributes:
        caches: the policy's state for each layer.
        logits: logits after the last token.
        pos: number of tokens so far.
    """

    caches: tuple[Any, ...]
    logits: Float[Array, "R V"]
    pos: Int[Array, " R"]


def _empty(policy: Policy, specs: Specs, request: Request, logits: Float[Array, "1 V"]) -> tuple[Rows, Reading]:
    rows = request.seed.shape[0]
    nothing = jnp.zeros((rows,), jnp.int32)
    caches = empty_caches(policy, specs, None)
    state = Rows(caches, nothing, jnp.copy(nothing), jnp.zeros((rows,), bool), jnp.copy(nothing), request)
    single = tuple(dataclasses.replace(spec, batch=1) for spec in specs)
    return state, _begin(policy, single, jnp.zeros((1,), jnp.int32), logits)


def _read(
    policy: Policy,
    specs: Specs,
    params: Params,
    tokens: Int[Array, "R T"],
    lengths: Int[Array, " R"],
    total: Int[Array, " R"],
) -> Reading:
    logits, caches = read_prompts(policy, specs, params, tokens, lengths, total)
    return Reading(caches, logits, lengths)


def _begin(policy: Policy, specs: Specs, total: Int[Array, " R"], logits: Float[Array, "R V"]) -> Reading:
    return Reading(empty_caches(policy, specs, total), logits, jnp.zeros_like(total))


def _read_block(
    policy: Policy,
    specs: Specs,
    params: Params,
    reading: Reading,
    tokens: Int[Array, "R S"],
    count: Int[Array, " R"],
    total: Int[Array, " R"],
) -> Reading:
    layers = layers_of(policy, specs)
    logits, caches = transformer.read_block(params, reading.caches, tokens, reading.pos, count, total, layers)
    logits = jnp.where((count > 0)[:, None], logits, reading.logits)
    return Reading(after_block(layers, caches), logits, reading.pos + count)


def _copy(policy: Policy, specs: Specs, reading: Reading) -> Reading:
    return jax.tree.map(jnp.copy, reading)


def _begun(reading: Reading, request: Request) -> tuple[Rows, Int[Array, " R"], Float[Array, " R"], TopTokens]:
    """Rows that begin with prefilled prompts, and their first tokens."""
    pos = reading.pos
    token, logprob = sample_token(reading.logits, request.sampler, request.seed, pos)
    tops = None if request.tops is None else top_tokens(reading.logits, jnp.max(request.tops))
    first = pos + request.given_count
    ended = (first == pos) & (jnp.any(token[:, None] == request.ends, axis=1) | (first + 1 >= request.limit))
    return Rows(reading.caches, token, pos, ~ended, pos, request), token, logprob, tops


def _written(rows: Rows, new: Rows, i: Int[Array, ""] | int, to: Int[Array, " R"]) -> Rows:
    """The batch after row i of `new` has been written into row `to[i]`."""

    def write(old: Array, new: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(new, i, 1).astype(old.dtype)
        return jax.lax.dynamic_update_slice_in_dim(old, own, to[i], axis=0)

    return jax.tree.map(write, rows, new)


def _insert(
    policy: Policy, specs: Specs, rows: Rows, reading: Reading, request: Request, to: Int[Array, " 1"]
) -> tuple[Rows, Int[Array, " 1"], Float[Array, " 1"], TopTokens]:
    new, token, logprob, tops = _begun(reading, request)
    return _written(rows, new, 0, to), token, logprob, tops


def _admit(
    policy: Policy,
    specs: Specs,
    params: Params,
    rows: Rows,
    last: Float[Array, "M V"],
    tokens: Int[Array, "R T"],
    lengths: Int[Array, " R"],
    request: Request,
    to: Int[Array, " R"],
    count: Int[Array, ""],
) -> tuple[Rows, Float[Array, "M V"], Int[Array, " R"], Float[Array, " R"], TopTokens]:
    read = tokens.shape[0]
    reader = tuple(dataclasses.replace(spec, batch=read) for spec in specs)
    reading = _read(policy, reader, params, tokens, lengths, request.limit)
    new, token, logprob, tops = _begun(reading, request)
    if read == 1:
        rows = _written(rows, new, 0, to)
    else:  # one row after another: a scatter of whole rows is slower
        rows = jax.lax.fori_loop(0, count, lambda i, rows: _written(rows, new, i, to), rows)
    return rows, jax.lax.dynamic_update_slice(last, reading.logits, (0, 0)), token, logprob, tops


def _again(
    policy: Policy,
    specs: Specs,
    rows: Rows,
    last: Float[Array, "M V"],
    at: Int[Array, " 1"],
    index: Int[Array, ""],
) -> Reading:
    taken, _ = _take(policy, specs, rows, at)
    return dataclasses.replace(taken, logits=jax.lax.dynamic_slice_in_dim(last, index, 1))


def _take(policy: Policy, specs: Specs, rows: Rows, at: Int[Array, " R"]) -> tuple[Reading, Int[Array, " R"]]:
    taken = jax.tree.map(lambda x: jnp.take(x, at, axis=0), rows)
    logits = jnp.zeros((at.shape[0], 1), jnp.float32)
    return Reading(taken.caches, logits, taken.pos), taken.pos - taken.first


def _serve(
    policy: Policy,
    specs: Specs,
    params: Params,
    rows: Rows,
    count: Int[Array, ""],
    stop: Bool[Array, " B"],
    hold: Bool[Array, " B"],
    leave: Int[Array, ""],
) -> tuple[
    Rows, Int[Array, "B M"], Float[Array, "B M"], Int[Array, " B"], Bool[Array, " B"], Int[Array, ""], TopTokens
]:
    rows = dataclasses.replace(rows, live=rows.live & ~stop)
    batch, begun = rows.token.shape[0], rows.live
    buffers = jnp.zeros((batch, CHUNK), jnp.int32), jnp.zeros((batch, CHUNK), jnp.float32)
    if rows.request.tops is not None:
        wide = jnp.zeros((batch, CHUNK, MOST), jnp.int32)
        buffers += wide, wide.astype(jnp.float32)
    row = jnp.arange(batch, dtype=jnp.int32)

    def continues(loop: Loop) -> Bool[Array, " B"]:
        return loop[1].live & ~hold

    def should_continue(loop: Loop) -> Array:
        i, rows, *_ = loop
        left = jnp.sum(begun & ~rows.live, dtype=jnp.int32)
        return (i < count) & jnp.any(continues(loop)) & ((leave == 0) | (left < leave))

    def token(loop: Loop) -> Array:
        rows, request = loop[1], loop[1].request
        ahead = rows.pos - rows.first
        index = jnp.minimum(ahead, request.given.shape[1] - 1)[:, None]
        given = jnp.take_along_axis(request.given, index, axis=1)[:, 0]
        return jnp.where(ahead < request.given_count, given, rows.token)

    def sample(loop: Loop, logits: Array, live: Bool[Array, " B"]) -> Loop:
        i, rows, filled, *buffers = loop
        request, pos = rows.request, rows.pos + 1
        found = sample_token(logits, request.sampler, request.seed, pos)
        new = found[0]
        if request.tops is not None:
            found += top_tokens(logits, jnp.max(jnp.where(live, request.tops, 0)))
        counts = live & (pos - rows.first >= request.given_count)
        column = jnp.where(counts, filled, CHUNK)  # out of bounds: dropped
        ended = counts & (jnp.any(new[:, None] == request.ends, axis=1) | (pos + 1 >= request.limit))
        rows = dataclasses.replace(
            rows, token=jnp.where(live, new, rows.token), pos=jnp.where(live, pos, rows.pos), live=rows.live & ~ended
        )
        buffers = [old.at[row, column].set(x, mode="drop") for old, x in zip(buffers, found, strict=True)]
        return i + 1, rows, filled + counts.astype(jnp.int32), *buffers

    start = jnp.zeros((), jnp.int32), rows, jnp.zeros((batch,), jnp.int32), *buffers
    steps, rows, filled, tokens, logprobs, *tops = decode_loop(
        policy, specs, params, should_continue, token, sample, start, continues
    )
    return rows, tokens, logprobs, filled, rows.live, steps, (tops[0], tops[1]) if tops else None


def _rows_partitions(policy: Policy, specs: Specs) -> Any:
    return Rows(state_partitions(policy, specs), ROWS, ROWS, ROWS, ROWS, ROWS)  # pyright: ignore[reportArgumentType]


def _reading_partitions(policy: Policy, specs: Specs) -> Any:
    return Reading(state_partitions(policy, specs), ROWS, ROWS)  # pyright: ignore[reportArgumentType]


def _over_mesh(arguments: Any, results: Any) -> Any:
    """Partitions of a program, from functions of its policy and specs (or partitions) for its arguments and results."""

    def partition(policy: Policy, specs: Specs, *arrays: Any) -> Partition | None:
        if specs[0].shard.mesh is None:
            return None

        def found(each: Any) -> Any:
            if each is partitions:
                return partitions(arrays[0])
            return each if isinstance(each, PartitionSpec) else each(policy, specs)

        inputs = tuple(map(found, arguments))
        outputs = tuple(map(found, results)) if isinstance(results, tuple) else found(results)
        return specs[0].shard, inputs, outputs

    return partition


empty = Program(_empty, static=2, partition=_over_mesh((ROWS, ROWS), (_rows_partitions, _reading_partitions)))
"""`empty(policy, specs, request, logits)`: a batch without live rows, and a reading of nothing, which empties a row."""

read = Program(
    _read,
    static=2,
    gpu_options=prefill_options,
    partition=_over_mesh((partitions, ROWS, ROWS, ROWS), _reading_partitions),
)
"""`read(policy, specs, params, tokens, lengths, total)`: prefill whole right-padded prompts.

`total` is the final length of each sequence, including new tokens.
"""

begin = Program(_begin, static=2, partition=_over_mesh((ROWS, ROWS), _reading_partitions))
"""`begin(policy, specs, total, logits)`: begin to prefill in blocks. `logits` gives the shape of those to come."""

read_block = Program(
    _read_block,
    static=2,
    donate=(3,),
    gpu_options=prefill_options,
    partition=_over_mesh((partitions, _reading_partitions, ROWS, ROWS, ROWS), _reading_partitions),
)
"""`read_block(policy, specs, params, reading, tokens, count, total)`: prefill the next block [R, S]. The old reading is used up."""

copy = Program(_copy, static=2, partition=_over_mesh((_reading_partitions,), _reading_partitions))
"""`copy(policy, specs, reading)`: another reading with the same content."""

insert = Program(
    _insert,
    static=2,
    donate=(2,),
    gpu_options=insert_options,
    partition=_over_mesh((_rows_partitions, _reading_partitions, ROWS, ROWS), (_rows_partitions, ROWS, ROWS, ROWS)),
    canonical=of_steps,
)
"""`insert(policy, specs, rows, reading, request, to)`: write a prefilled prompt into row `to`, and sample its first token.

The reading remains, so that it can be inserted again with another seed. Returns the batch (the old one is used up), the
first token, its log-probability, and the most likely tokens. These mean nothing in rows with given tokens.
"""

admit = Program(
    _admit,
    static=2,
    donate=(3, 4),
    gpu_options=admit_options,
    partition=_over_mesh(
        (partitions, _rows_partitions, ROWS, ROWS, ROWS, ROWS, ROWS, ALL), (_rows_partitions, ROWS, ROWS, ROWS, ROWS)
    ),
)
"""`admit(policy, specs, params, rows, last, tokens, lengths, request, to, count)`: prefill whole right-padded prompts, write
the first `count` of them into rows `to`, and sample their first tokens.

`last` has room for the logits after each prompt, of this program or of one that reads more prompts. Returns the batch and
the logits (the old ones are used up), and then what `insert` does.

One program reads and inserts, and returns no new large arrays: the batch and the logits keep their memory. If addresses
changed, XLA would update the whole CUDA graph, which takes the host longer than a short prompt takes the GPU.
"""

again = Program(_again, static=2, partition=_over_mesh((_rows_partitions, ROWS, ROWS, ALL), _reading_partitions))
"""`again(policy, specs, rows, last, at, index)`: a reading to insert again, of a prompt of the last call of `admit`.

It is in row `at`, which must not have decoded yet. `last` are the logits that `admit` returned, and `index` is its place in
them.
"""

take = Program(_take, static=2, partition=_over_mesh((_rows_partitions, ROWS), (_reading_partitions, ROWS)))
"""`take(policy, specs, rows, at)`: copies of rows `at`, without logits, and the number of tokens after each prompt."""

serve = Program(
    _serve,
    static=2,
    donate=(3,),
    gpu_options=gpu_options_of,
    partition=_over_mesh(
        (partitions, _rows_partitions, ALL, ROWS, ROWS, ALL), (_rows_partitions, ROWS, ROWS, ROWS, ROWS, ALL, ROWS)
    ),
    canonical=of_steps,
)
"""`serve(policy, specs, params, rows, count, stop, hold, leave)`: up to `count` <= `CHUNK` decode steps of all live rows.

Rows in `stop` end before the first step. Rows in `hold` take no part. The program also returns once `leave` rows have ended,
not counting those in `stop`, unless `leave` is 0.

Returns the batch (the old one is used up), and tokens and log-probabilities in buffers of `CHUNK` columns. Then follow
the number of columns that each row has filled, the rows that are still live, the number of steps, and the most likely
tokens of each column.
"""
