"""The compiled programs of generation: prefill, chunked prefill, and a decoding loop on the device.

The loop appends, attends, compresses, samples and stops sequences without the host. Each call fills a buffer of `CHUNK`
tokens, so its memory does not depend on the number of new tokens.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax._util.any_rank import any_rank
from kvjax._util.arguments import shown
from kvjax.cache import LayerSpec, Shard, bucket
from kvjax.models import Params, transformer
from kvjax.models.sharding import is_of_one_process, partitions
from kvjax.pallas_kernels.projection.types import FEW_ROWS
from kvjax.policies import Policy
from kvjax.runtime import mesh
from kvjax.runtime.compression import WAIT, Compression, after_block, compressed, group_size, observed_together
from kvjax.runtime.mesh import ALL, ROWS, arrays_of, on_host, placed, state_partitions
from kvjax.runtime.origin import Origin
from kvjax.runtime.program import (
    CONCURRENT_GRAPH_OPTIONS,
    CUDA_GRAPH_OPTIONS,
    MESH_GRAPH_OPTIONS,
    Options,
    Partition,
    Program,
    matmul_options,
)
from kvjax.runtime.reading import layers_of, read_prompts
from kvjax.runtime.sampling import Sampler, Sampling

CHUNK = 256
"""Maximum number of tokens that one call of the decode program returns."""

Specs = tuple[LayerSpec, ...]

Loop = tuple[Any, ...]
"""State of a decoding loop: number of steps, `Decoding`, and buffers for tokens and log-probabilities."""


@flax.struct.dataclass
class Decoding:
    """State of a batch during decoding. It can be saved, copied and resumed.

    Attributes:
        caches: the policy's state for each layer.
        token: latest token of each sequence, sampled but not yet in the cache.
        pos: position of that token.
        steps: decode steps since the prompt.
        done: whether each sequence has sampled an end token.
        seed: sampling seed of each sequence. Samples depend on it and on the position.
        origin: identifies the engine that made the state, which refuses the states of others. Programs take and return
            states without it.
    """

    caches: tuple[Any, ...]
    token: Int[Array, " B"]
    pos: Int[Array, " B"]
    steps: Int[Array, ""]
    done: Bool[Array, " B"]
    seed: UInt32[Array, " B"]
    origin: Origin | None = flax.struct.field(pytree_node=False, default=None)


@any_rank
def empty(policy: Policy, specs: Specs, seed: UInt32[Array, " B"], total: Int[Array, " B"] | None = None) -> Decoding:
    """State of a batch with empty caches. `total` is as for `CacheLayer.init`."""
    # On one device this needs no compilation.
    return (_empty if specs[0].shard.mesh is None else begin)(policy, specs, seed, total)


def padded(
    prompts: Sequence[Sequence[int]] | Int[np.ndarray, "B S"], size: int | None = None
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Right-pad prompts to `size`, or to a common bucket. Returns tokens [B, T] and lengths [B], on the host."""
    tokens = np.zeros((len(prompts), bucket(max(map(len, prompts))) if size is None else size), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.asarray([len(prompt) for prompt in prompts], np.int32)


def started(executable: Any, *args: Any) -> Decoding:
    """Shapes and shardings of the state that a `prefill` program returns, for compiling the programs that continue from it.

    Args:
        executable: `prefill.compiled(*args)`.
        args: arguments that it was compiled for; shapes are enough.
    """
    state, _ = prefill.shapes(*args)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, executable.output_shardings[0]
    )


def saved(policy: Policy, specs: Specs, state: Decoding) -> Decoding:
    """Copy a state to the host, unsharded. See `Engine.save`."""
    rest = jax.tree.map(on_host, dataclasses.replace(state, caches=()))
    return dataclasses.replace(rest, caches=mesh.saved(policy, specs, state.caches))


def resumed(policy: Policy, specs: Specs, state: Decoding) -> Decoding:
    """Put a saved state on the devices of these specs. See `Engine.resume`."""
    if not isinstance(state.caches, tuple | list):
        raise ValueError(f"the caches of this state are {shown(state.caches)}; give a state as `Engine.save` made it")
    caches = mesh.resumed(policy, specs, state.caches)
    rows, kinds = specs[0].whole.batch, {"token": "int32", "pos": "int32", "done": "bool", "seed": "uint32"}
    wanted: dict[str, Any] = {name: jax.ShapeDtypeStruct((rows,), kind) for name, kind in kinds.items()}
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    check_like(dataclasses.replace(state, caches=()), Decoding(caches=(), steps=number, **wanted))
    state = dataclasses.replace(state, caches=caches)
    if specs[0].shard.mesh is None:
        return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), state)
    return placed(specs[0].shard, _state_partitions(policy, specs), state)


def check_state(state: Any) -> None:
    """Raise unless `state` is a decoding state whose arrays still exist.

    Raises:
        ValueError: `state` is not a decoding state.
        RuntimeError: a program has reused the state's memory.
    """
    if not isinstance(state, Decoding):
        what = "a tuple whose first element is the state" if isinstance(state, tuple) else shown(state)
        raise ValueError(
            f"state is {what}; give the state that `prefill`, `begin`, `decode`, `extend` or `resume` returned"
        )
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        raise RuntimeError(
            "this state has been used up by `decode`, `extend` or `answering`, which reuse its memory; use the state that they returned, or "
            "copy a state first: jax.tree.map(jnp.copy, state)"
        )


def check_like(state: Decoding, wanted: Decoding) -> None:
    """Raise `ValueError` unless the arrays of two states have the same names, types and shapes."""
    have, want = arrays_of(state), arrays_of(wanted)
    if have != want:
        other, own = (min(a - b, default="nothing else") for a, b in ((have, want), (want, have)))
        raise ValueError(
            f"this state has {other}, but those of this engine have {own}; give the state of an engine with the same model, policy, budget and sizes"
        )


def step(
    policy: Policy,
    specs: Specs,
    params: Params,
    caches: tuple[Any, ...],
    token: Int[Array, " B"],
    pos: Int[Array, " B"],
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """Process one token per sequence. Returns the next token's logits [B, V] and the compressed caches."""
    layers = layers_of(policy, specs)
    logits, caches = transformer.decode_step(params, caches, token, pos, layers)
    carry = observed_together(layers, caches)
    return logits, tuple(compressed(layer, cache, carry) for layer, cache in zip(layers, caches, strict=True))


def reordered(state: Any, rows: Int[Array, " B"]) -> Any:
    """A state, or caches, whose row i is a copy of row `rows[i]`. The first axis of each array is that of the rows."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip") if x.ndim else jnp.copy(x), state)


def decode_loop(
    policy: Policy,
    specs: Specs,
    params: Params,
    should_continue: Callable[[Loop], Array],
    token: Callable[[Loop], Array],
    sample: Callable[[Loop, Array, Any], Loop],
    start: Loop,
    live: Callable[[Loop], Array] | None = None,
) -> Loop:
    """Run decode steps while `should_continue` holds. Each step processes `token(loop)`, and `sample` consumes the logits.

    Only rows that are `live` process a token; `sample` gets which. None if all rows do. Layers that compress only when
    they are full are checked in an outer loop. A condition inside each step would make the host wait for the device
    once per layer, which cost about a fifth of a step (Chelsea, H200).

    With `live`, rows that are due wait for others, up to `WAIT` steps, so that a group is compressed at a time.
    While they wait they do not change. Each row thus goes through the states that it goes through alone.
    """
    compression = Compression(policy, specs)
    layers = compression.layers

    def body(loop: Loop, waiting: Any = None) -> Loop:
        i, state, *buffers = loop
        there = None if live is None else live(loop) if waiting is None else live(loop) & ~waiting
        logits, caches = transformer.decode_step(params, state.caches, token(loop), state.pos, layers, there)
        return sample((i, state.replace(caches=compression.each_step(caches)), *buffers), logits, there)

    def due(loop: Loop) -> Array:
        rows = compression.due(loop[1].caches)
        return rows if live is None else rows & live(loop)

    def until_full(loop: Loop) -> Loop:
        # At least one step: a layer that is full even after compression waits for the next step, as in `step`.
        begun = loop[0]

        def not_full(carry: tuple[Loop, Array, Array]) -> Array:
            now, full, waited = carry
            compress = jnp.any(full)
            if live is not None:
                enough = jnp.minimum(jnp.sum(live(now), dtype=jnp.int32), group_size(specs[0].batch))
                compress &= (jnp.sum(full, dtype=jnp.int32) >= enough) | (waited > WAIT)
            return should_continue(now) & ((now[0] == begun) | ~compress)

        def one(carry: tuple[Loop, Array, Array]) -> tuple[Loop, Array, Array]:
            now, full, waited = carry
            now = body(now, None if live is None else full)
            full = due(now)
            return now, full, waited + jnp.any(full).astype(jnp.int32)

        none = jnp.zeros((specs[0].batch,), bool)
        (i, state, *buffers), _, _ = jax.lax.while_loop(not_full, one, (loop, none, jnp.zeros((), jnp.int32)))
        there = None if live is None else live((i, state, *buffers))
        return i, state.replace(caches=compression.when_full(state.caches, there)), *buffers

    return jax.lax.while_loop(should_continue, until_full if compression.lazy else body, start)


def prefill_options(policy: Policy, specs: Specs, params: Params, *_: Any) -> Options:
    """XLA options for prefill on a GPU."""
    return matmul_options(params)


def insert_options(policy: Policy, specs: Specs, *_: Any) -> Options:
    """XLA options for inserting a row on a GPU.

    Loops of samplers are part of the CUDA graph. Otherwise the host would wait for all earlier work before each of them.
    """
    return CUDA_GRAPH_OPTIONS if specs[0].shard.mesh is None else {}


def admit_options(policy: Policy, specs: Specs, params: Params, *_: Any) -> Options:
    """XLA options for prefilling and inserting rows on a GPU, see `insert_options`."""
    return matmul_options(params) | insert_options(policy, specs)


def gpu_options_of(policy: Policy, specs: Specs, params: Params, *_: Any) -> Options:
    """XLA options for the loop on a GPU.

    Concurrent kernels are disabled if layers run psum or pmax in addition to the model's own ordered all-reduces.
    Devices that start two collectives in different orders would deadlock. For the same reason, collectives join the
    CUDA graph only if devices shard heads and nothing else. Over several devices, concurrency with layers that compress
    when full is untested, so it is disabled too.
    """
    layers, shard = layers_of(policy, specs), specs[0].shard
    lazy = any(layer.when == "when_full" for layer in layers)
    whole = is_of_one_process(shard.mesh) and shard.devices == shard.heads and not jax.__version__.startswith("0.10.")
    whole &= os.environ.get("NCCL_GRAPH_MIXING_SUPPORT") == "0"
    ordered = (lazy and shard.mesh is not None) or (whole and any(layer.reduces_heads for layer in layers))
    graph = MESH_GRAPH_OPTIONS if whole else CUDA_GRAPH_OPTIONS
    matmuls = matmul_options(params) if specs[0].batch > FEW_ROWS else {}
    return graph | matmuls | ({} if ordered else CONCURRENT_GRAPH_OPTIONS)


def empty_caches(policy: Policy, specs: Specs, total: Int[Array, " B"] | None) -> tuple[Any, ...]:
    """Each layer's state of an empty cache, in arrays of its own.

    Programs donate a state's arrays, and `CacheLayer.init` may return the same array twice.
    """
    return jax.tree.map(jnp.copy, tuple(layer.init(total) for layer in layers_of(policy, specs)))


def _empty(policy: Policy, specs: Specs, seed: UInt32[Array, " B"], total: Int[Array, " B"] | None) -> Decoding:
    nothing = jnp.zeros(seed.shape, jnp.int32)
    return Decoding(
        caches=empty_caches(policy, specs, total),
        token=nothing,
        pos=jnp.zeros_like(nothing),
        steps=jnp.zeros((), jnp.int32),
        done=jnp.zeros(seed.shape, bool),
        seed=jnp.copy(seed),
    )


def _prefill(
    policy: Policy,
    specs: Specs,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    total: Int[Array, " B"],
    seed: UInt32[Array, " B"],
    sampler: Sampler,
    ends: Int[Array, " E"],
) -> tuple[Decoding, Float[Array, " B"]]:
    logits, caches = read_prompts(policy, specs, params, tokens, lengths, total)
    token, logprob = sample_token(logits, sampler, seed, lengths)
    state = Decoding(caches, token, lengths, jnp.zeros((), jnp.int32), jnp.isin(token, ends), seed)
    return state, logprob


def _decode(
    policy: Policy,
    specs: Specs,
    params: Params,
    state: Decoding,
    count: Int[Array, ""],
    sampler: Sampler,
    ends: Int[Array, " E"],
) -> tuple[Decoding, Int[Array, "B M"], Float[Array, "B M"]]:
    given = jnp.zeros((state.token.shape[0], 0), jnp.int32)
    return _answer(policy, specs, params, state, given, jnp.zeros_like(state.pos), count, sampler, ends)


def _answer(
    policy: Policy,
    specs: Specs,
    params: Params,
    state: Decoding,
    given: Int[Array, "B G"],
    lengths: Int[Array, " B"],
    count: Int[Array, ""],
    sampler: Sampler,
    ends: Int[Array, " E"],
) -> tuple[Decoding, Int[Array, "B M"], Float[Array, "B M"]]:
    rows, size = given.shape
    buffers = jnp.zeros((rows, size + CHUNK), jnp.int32), jnp.zeros((rows, size + CHUNK), jnp.float32)
    row = jnp.arange(rows, dtype=jnp.int32)
    state = dataclasses.replace(state, done=state.done & (lengths == 0))
    before = jnp.maximum(lengths, 1) - 1  # steps before the first sample that counts
    steps = count + specs[0].shard.max_over_data(jnp.max(before)) if size else count

    def should_continue(loop: Loop) -> Array:
        i, state, _, _ = loop
        return (i < steps) & ~jnp.all(state.done)

    def token(loop: Loop) -> Array:
        i, state, _, _ = loop
        return jnp.where(i < lengths, given[:, jnp.minimum(i, size - 1)], state.token) if size else state.token

    def sample(loop: Loop, logits: Array, live: None) -> Loop:
        i, state, tokens, logprobs = loop
        token, logprob = sample_token(logits, sampler, state.seed, state.pos + 1)
        counts = i >= before
        column = jnp.where(counts, i - before, size + CHUNK)  # out of bounds: dropped
        state = state.replace(
            token=token,
            pos=state.pos + 1,
            steps=state.steps + 1,
            done=state.done | (counts & jnp.isin(token, ends)),
        )
        tokens = tokens.at[row, column].set(token, mode="drop")
        return i + 1, state, tokens, logprobs.at[row, column].set(logprob, mode="drop")

    start = jnp.zeros((), jnp.int32), state, *buffers
    _, *ended = decode_loop(policy, specs, params, should_continue, token, sample, start)
    return _gathered(specs[0].shard, *ended)


def _gathered(
    shard: Shard, state: Decoding, tokens: Int[Array, "B M"], logprobs: Float[Array, "B M"]
) -> tuple[Decoding, Int[Array, "_ M"], Float[Array, "_ M"]]:
    """Gather a loop's results. Devices with other rows may have finished earlier, when those rows were done."""
    state = dataclasses.replace(state, steps=shard.max_over_data(state.steps))
    return state, shard.gather_over_data(tokens), shard.gather_over_data(logprobs)


def _state_partitions(policy: Policy, specs: Specs) -> Decoding:
    """Partitions of a state over a mesh."""
    caches = state_partitions(policy, specs)
    return Decoding(caches=caches, token=ROWS, pos=ROWS, steps=ALL, done=ROWS, seed=ROWS)  # pyright: ignore[reportArgumentType]


def _beginning(policy: Policy, specs: Specs, *_: Any) -> Partition | None:
    """Partitions of `begin`."""
    shard = specs[0].shard
    return None if shard.mesh is None else (shard, (ROWS, ROWS), _state_partitions(policy, specs))


def _reading(policy: Policy, specs: Specs, params: Params, *_: Any) -> Partition | None:
    """Partitions of `prefill`."""
    if specs[0].shard.mesh is None:
        return None
    state = _state_partitions(policy, specs)
    return specs[0].shard, (partitions(params), ROWS, ROWS, ROWS, ROWS, ALL, ALL), (state, ROWS)


def _going_on(rest: tuple[PartitionSpec, ...], results: tuple[PartitionSpec, ...]) -> Callable[..., Partition | None]:
    """Partitions of a program that continues from a state, given those of its other arguments and results."""

    def sharded(policy: Policy, specs: Specs, params: Params, *_: Any) -> Partition | None:
        if specs[0].shard.mesh is None:
            return None
        state = _state_partitions(policy, specs)
        return specs[0].shard, (partitions(params), state, *rest), (state, *results)

    return sharded


def _extend(
    policy: Policy,
    specs: Specs,
    params: Params,
    state: Decoding,
    tokens: Int[Array, "B S"],
    count: Int[Array, " B"],
    total: Int[Array, " B"],
    sampler: Sampler,
    ends: Int[Array, " E"],
) -> tuple[Decoding, Float[Array, " B"]]:
    layers, reads = layers_of(policy, specs), count > 0
    logits, caches = transformer.read_block(params, state.caches, tokens, state.pos, count, total, layers)
    caches, pos = after_block(layers, caches), state.pos + count
    token, logprob = sample_token(logits, sampler, state.seed, pos)
    token, done = jnp.where(reads, token, state.token), jnp.where(reads, jnp.isin(token, ends), state.done)
    return dataclasses.replace(state, caches=caches, token=token, pos=pos, done=done), logprob


def sample_token(
    logits: Float[Array, "B V"], sampler: Sampler, seed: UInt32[Array, " B"], pos: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Sample a token for position `pos` of each row. Returns tokens and their log-probabilities.

    These are before filters, and before temperature unless the sampler is `scaled`.
    """
    token = sampler(logits, seed, pos)
    if isinstance(sampler, Sampling) and sampler.scaled:
        logits = sampler.tempered(logits)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1)


def of_steps(policy: Policy, specs: tuple[LayerSpec, ...]) -> tuple[Policy, tuple[LayerSpec, ...]]:
    """Static arguments that matter to token-by-token programs. The size of prefill blocks does not."""
    if all(spec.block <= 1 for spec in specs):
        return policy, specs
    return policy, tuple(dataclasses.replace(spec, block=1) if spec.block > 1 else spec for spec in specs)


begin = Program(_empty, static=2, partition=_beginning)
"""`begin(policy, specs, seed, total)`: state with empty caches, see `empty`."""

prefill = Program(_prefill, static=2, gpu_options=prefill_options, partition=_reading)
"""`prefill(policy, specs, params, tokens, lengths, total, seed, sampler, ends)`: prefill right-padded prompts and sample the first token.

`total` is the final length of each sequence, including new tokens. If a layer declares replays, parts of the prompts
are processed again before it chooses what to keep, see `kvjax.runtime.replay`. Returns the `Decoding` state and the
first tokens' log-probabilities.
"""

decode = Program(
    _decode,
    static=2,
    donate=(3,),
    gpu_options=gpu_options_of,
    partition=_going_on((ALL, ALL, ALL), (ALL, ALL)),
    canonical=of_steps,
)
"""`decode(policy, specs, params, state, count, sampler, ends)`: sample up to `count` <= `CHUNK` more tokens per sequence.

Stops early when all sequences are done. Returns the new state, and tokens and log-probabilities in buffers of `CHUNK`
columns. The growth of `state.steps` is the number of filled columns. The old state's memory is reused, so copy the
state first to fork it.
"""

answer = Program(
    _answer,
    static=2,
    donate=(3,),
    gpu_options=gpu_options_of,
    partition=_going_on((ROWS, ROWS, ALL, ALL, ALL), (ALL, ALL)),
    canonical=of_steps,
)
"""`answer(policy, specs, params, state, given, lengths, count, sampler, ends)`: append given tokens to the caches, then sample.

Row b processes `given[b, :lengths[b]]` from the state's position on. They replace the state's sampled token. A row without
given tokens goes on as in `decode`. What is kept of earlier tokens was chosen before they came. Rows with fewer given tokens begin to sample
earlier and sample more. The program stops when the row with the most given tokens has sampled `count` <= `CHUNK`
tokens, or when all rows are done. Returns the new state (the old state's memory is reused), and tokens and
log-probabilities, with each row's samples from column 0. The number of samples in row b is the growth of `state.steps`
minus `max(lengths[b], 1) - 1`.
"""

extend = Program(
    _extend,
    static=2,
    donate=(3,),
    gpu_options=prefill_options,
    partition=_going_on((ROWS, ROWS, ROWS, ALL, ALL), (ROWS,)),
)
"""`extend(policy, specs, params, state, tokens, count, total, sampler, ends)`: prefill one right-padded block [B, S] of a longer text.

Row b processes `count[b]` tokens from the state's position on, which replace its sampled token, and samples the next
token. A row with count 0 does not change. Memory is that of the caches and of S tokens. Returns the new state (the old
state's memory is reused) and the sampled tokens' log-probabilities. `total` is as for `prefill`.
"""
