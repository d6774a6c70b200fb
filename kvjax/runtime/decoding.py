"""The compiled programs of generation: read prompts, at once or in blocks, and decode in one loop on the device.

The loop appends, attends, compresses, samples and stops rows without the host. It fills a buffer of `CHUNK` tokens a call, so
its memory does not depend on how many tokens are decoded in all.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import reduce
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
from kvjax.pallas_kernels.device import target
from kvjax.policies import Policy
from kvjax.policies.base import Layer
from kvjax.policies.capabilities import needs_compression
from kvjax.policies.dealt import dealt
from kvjax.runtime import mesh, replay
from kvjax.runtime.mesh import ALL, ROWS, arrays_of, on_host, placed, state_partitions
from kvjax.runtime.origin import Origin
from kvjax.runtime.program import (
    CONCURRENT_GRAPH_OPTIONS,
    CUDA_GRAPH_OPTIONS,
    MESH_GRAPH_OPTIONS,
    Partition,
    Program,
)
from kvjax.runtime.sampling import Sampler

CHUNK = 256
"""Tokens a call of the decode program can return."""

Specs = tuple[LayerSpec, ...]

Loop = tuple[Any, ...]
"""What a decoding loop carries: the number of steps, the `Decoding` state, and buffers for tokens and log-probabilities."""


@flax.struct.dataclass
class Decoding:
    """Everything that continuing a batch needs: a value that can be saved, copied and resumed.

    Attributes:
        caches: the policy's state of each layer.
        token: each row's latest token, sampled but not yet read.
        pos: that token's position.
        steps: tokens decoded since the prompt.
        done: rows that have sampled an end token.
        seed: what each row's samples depend on, besides the position.
        origin: what made it, so that an engine can tell a state that is not its own. Programs take and return states without it.
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
    """The state of a batch that has read nothing yet; `total` as for `Layer.init`."""
    # On one device nothing need be compiled for that.
    return (_empty if specs[0].shard.mesh is None else begin)(policy, specs, seed, total)


def layers_of(policy: Policy, specs: Sequence[LayerSpec]) -> tuple[Layer[Any], ...]:
    """A bound policy's functions for each layer, with slots dealt where devices share them."""
    return tuple(dealt(policy.layer(spec)) for spec in specs)


def padded(
    prompts: Sequence[Sequence[int]] | Int[np.ndarray, "B S"], size: int | None = None
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Prompts of any lengths as one array, padded on the right to `size` or a common bucket, and their lengths."""
    tokens = np.zeros((len(prompts), bucket(max(map(len, prompts))) if size is None else size), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(tokens), jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)


def started(executable: Any, *args: Any) -> Decoding:
    """Shapes and places of the state that a `prefill` program returns, for compiling what goes on from it.

    Args:
        executable: `prefill.compiled(*args)`.
        args: what it was compiled for; shapes are enough.
    """
    state, _ = prefill.shapes(*args)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, executable.output_shardings[0]
    )


def saved(policy: Policy, specs: Specs, state: Decoding) -> Decoding:
    """A state on the host, as one device has it; see `Engine.save`."""
    rest = jax.tree.map(on_host, dataclasses.replace(state, caches=()))
    return dataclasses.replace(rest, caches=mesh.saved(policy, specs, state.caches))


def resumed(policy: Policy, specs: Specs, state: Decoding) -> Decoding:
    """What `saved` gave, where these programs go on from it; see `Engine.resume`."""
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
    """Raise unless this is a state, and no program has used it up.

    Raises:
        ValueError: it is something else.
        RuntimeError: a program has taken over its arrays.
    """
    if not isinstance(state, Decoding):
        what = "a tuple, of which the state is the first" if isinstance(state, tuple) else shown(state)
        raise ValueError(
            f"state is {what}; give the state that `prefill`, `begin`, `decode`, `extend` or `resume` returned"
        )
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        raise RuntimeError(
            "this state has been used up by `decode`, `extend` or `answering`, which go on in its memory; use the state that they returned, or "
            "copy a state first: jax.tree.map(jnp.copy, state)"
        )


def check_like(state: Decoding, wanted: Decoding) -> None:
    """Raise `ValueError` unless a state has arrays of these names, types and shapes."""
    have, want = arrays_of(state), arrays_of(wanted)
    if have != want:
        other, own = (min(a - b, default="nothing else") for a, b in ((have, want), (want, have)))
        raise ValueError(
            f"this state has {other}, and those of this engine {own}; give one of an engine of the same model, policy, budget and sizes"
        )


def step(
    policy: Policy,
    specs: Specs,
    params: Params,
    caches: tuple[Any, ...],
    token: Int[Array, " B"],
    pos: Int[Array, " B"],
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """Read one token per row; the next one's logits, and the caches within their budgets again."""
    layers = layers_of(policy, specs)
    logits, caches = transformer.decode_step(params, caches, token, pos, layers)
    return logits, tuple(layer.compress(cache) for layer, cache in zip(layers, caches, strict=True))


def _loop(
    layers: Sequence[Layer[Any]],
    params: Params,
    should_continue: Callable[[Loop], Array],
    token: Callable[[Loop], Array],
    sample: Callable[[Loop, Array], Loop],
    start: Loop,
) -> Loop:
    """Steps while `should_continue` says so, of which each reads `token` and has `sample` make of its logits what it will.

    Where layers compress only when they are full, a loop within runs until one of them is: within a step, every layer would make
    the host wait for the device to tell whether it is (with Chelsea on an H200 that took about a fifth of a step).
    """
    lazy = [i for i, layer in enumerate(layers) if layer.traits.compression == "when_full"]
    eager = [i for i, layer in enumerate(layers) if layer.traits.compression == "every_step"]

    def full(loop: Loop) -> Array:
        # Over layers first: over rows first, XLA would ask every layer by a kernel of its own.
        return jnp.any(reduce(jnp.logical_or, [needs_compression(layers[i], loop[1].caches[i]) for i in lazy]))

    def compress_eager(caches: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(layers[i].compress(cache) if i in eager else cache for i, cache in enumerate(caches))

    def compress_lazy(caches: Sequence[Any]) -> tuple[Any, ...]:
        # One after the other, as each takes memory, also where a GPU runs side by side what does not depend on each other. Elsewhere nothing
        # does, and waiting only costs memory: `benchmarks.fits` of Chelsea tells.
        caches, before, waits = list(caches), None, target().platform == "gpu"
        for i in lazy:
            caches[i] = layers[i].compress(_after(before, caches[i]))
            if waits:
                before = caches[i]
        return tuple(caches)

    def body(loop: Loop) -> Loop:
        i, state, *buffers = loop
        logits, caches = transformer.decode_step(params, state.caches, token(loop), state.pos, layers)
        return sample((i, state.replace(caches=compress_eager(caches)), *buffers), logits)

    def until_full(loop: Loop) -> Loop:
        # A step at least: what is full still, once it has been compressed, waits for the next one, as it does in `step`.
        begun = loop[0]
        i, state, *buffers = jax.lax.while_loop(
            lambda now: should_continue(now) & ((now[0] == begun) | ~full(now)), body, loop
        )
        return i, state.replace(caches=compress_lazy(state.caches)), *buffers

    return jax.lax.while_loop(should_continue, until_full if lazy else body, start)


def _after(before: Any, cache: Any) -> Any:
    """A cache that is there once another one is; what of them is in the host's memory stays out of it."""
    leaves, tree = jax.tree.flatten(cache)
    own = [i for i, leaf in enumerate(leaves) if _on_device(leaf)]
    others = list(filter(_on_device, jax.tree.leaves(before)))
    if others:
        there, _ = jax.lax.optimization_barrier(([leaves[i] for i in own], others))
        for i, leaf in zip(own, there, strict=True):
            leaves[i] = leaf
    return tree.unflatten(leaves)


def _on_device(x: Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Device


def _gpu_options(policy: Policy, specs: Specs) -> dict[str, str]:
    """How a GPU runs the loop.

    Not side by side where layers add up over devices beside the model's own sums, which follow one another: devices that begin two of them
    in different order would wait for each other for ever. For that reason sums are part of the graph only where all devices share heads,
    and none rows or slots. Over several devices layers that compress only when they are full are left out, too: that has not been tried.
    """
    layers, shard = layers_of(policy, specs), specs[0].shard
    lazy = any(layer.traits.compression == "when_full" for layer in layers)
    whole = is_of_one_process(shard.mesh) and shard.devices == shard.heads and not jax.__version__.startswith("0.10.")
    whole &= os.environ.get("NCCL_GRAPH_MIXING_SUPPORT") == "0"
    ordered = (lazy and shard.mesh is not None) or (whole and any(layer.traits.sums_heads for layer in layers))
    graph = MESH_GRAPH_OPTIONS if whole else CUDA_GRAPH_OPTIONS
    return graph if ordered else graph | CONCURRENT_GRAPH_OPTIONS


def _empty(policy: Policy, specs: Specs, seed: UInt32[Array, " B"], total: Int[Array, " B"] | None) -> Decoding:
    nothing = jnp.zeros(seed.shape, jnp.int32)
    return Decoding(
        # Copied, since arrays of a state may be one and the same, and the programs take them over.
        caches=jax.tree.map(jnp.copy, tuple(layer.init(total) for layer in layers_of(policy, specs))),
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
    layers = layers_of(policy, specs)
    read = replay.prefill if replay.replays(layers) else transformer.prefill
    logits, caches = read(params, tokens, lengths, total, layers)
    token, logprob = _sample(logits, sampler, seed, lengths)
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
    rows = state.token.shape[0]
    buffers = jnp.zeros((rows, CHUNK), jnp.int32), jnp.zeros((rows, CHUNK), jnp.float32)

    def should_continue(loop: Loop) -> Array:
        i, state, _, _ = loop
        return (i < count) & ~jnp.all(state.done)

    def sample(loop: Loop, logits: Array) -> Loop:
        i, state, tokens, logprobs = loop
        token, logprob = _sample(logits, sampler, state.seed, state.pos + 1)
        state = state.replace(
            token=token,
            pos=state.pos + 1,
            steps=state.steps + 1,
            done=state.done | jnp.isin(token, ends),
        )
        return i + 1, state, tokens.at[:, i].set(token), logprobs.at[:, i].set(logprob)

    start = jnp.zeros((), jnp.int32), state, *buffers
    _, *ended = _loop(layers_of(policy, specs), params, should_continue, lambda loop: loop[1].token, sample, start)
    return _gathered(specs[0].shard, *ended)


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
    state = dataclasses.replace(state, done=jnp.zeros_like(state.done))
    longest = specs[0].shard.max_over_data(jnp.max(lengths))

    def should_continue(loop: Loop) -> Array:
        i, state, _, _ = loop
        return (i < longest + count - 1) & ~jnp.all(state.done)

    def read(loop: Loop) -> Array:
        i, state, _, _ = loop
        return jnp.where(i < lengths, given[:, jnp.minimum(i, size - 1)], state.token)

    def sample(loop: Loop, logits: Array) -> Loop:
        i, state, tokens, logprobs = loop
        token, logprob = _sample(logits, sampler, state.seed, state.pos + 1)
        sampled = i + 1 - lengths  # of what each row samples after its last given token, this is the how-manyth
        column = jnp.where(sampled < 0, size + CHUNK, sampled)  # out of range, hence dropped, while a row still reads
        state = state.replace(
            token=token,
            pos=state.pos + 1,
            steps=state.steps + 1,
            done=state.done | ((sampled >= 0) & jnp.isin(token, ends)),
        )
        tokens = tokens.at[row, column].set(token, mode="drop")
        return i + 1, state, tokens, logprobs.at[row, column].set(logprob, mode="drop")

    start = jnp.zeros((), jnp.int32), state, *buffers
    _, *ended = _loop(layers_of(policy, specs), params, should_continue, read, sample, start)
    return _gathered(specs[0].shard, *ended)


def _gathered(
    shard: Shard, state: Decoding, tokens: Int[Array, "B M"], logprobs: Float[Array, "B M"]
) -> tuple[Decoding, Int[Array, "_ M"], Float[Array, "_ M"]]:
    """What a loop ends with. Devices with other rows may have ended sooner, as those rows were done."""
    state = dataclasses.replace(state, steps=shard.max_over_data(state.steps))
    return state, shard.gather_over_data(tokens), shard.gather_over_data(logprobs)


def _state_partitions(policy: Policy, specs: Specs) -> Decoding:
    """How a state is dealt to a mesh's devices."""
    caches = state_partitions(policy, specs)
    return Decoding(caches=caches, token=ROWS, pos=ROWS, steps=ALL, done=ROWS, seed=ROWS)  # pyright: ignore[reportArgumentType]


def _beginning(policy: Policy, specs: Specs, *_: Any) -> Partition | None:
    """How `begin` is dealt."""
    shard = specs[0].shard
    return None if shard.mesh is None else (shard, (ROWS, ROWS), _state_partitions(policy, specs))


def _reading(policy: Policy, specs: Specs, params: Params, *_: Any) -> Partition | None:
    """How `prefill` is dealt."""
    if specs[0].shard.mesh is None:
        return None
    state = _state_partitions(policy, specs)
    return specs[0].shard, (partitions(params), ROWS, ROWS, ROWS, ROWS, ALL, ALL), (state, ROWS)


def _going_on(rest: tuple[PartitionSpec, ...], results: tuple[PartitionSpec, ...]) -> Callable[..., Partition | None]:
    """How a program is dealt that goes on from a state, with these other arguments and results."""

    def dealt(policy: Policy, specs: Specs, params: Params, *_: Any) -> Partition | None:
        if specs[0].shard.mesh is None:
            return None
        state = _state_partitions(policy, specs)
        return specs[0].shard, (partitions(params), state, *rest), (state, *results)

    return dealt


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
    pos = state.pos + count
    token, logprob = _sample(logits, sampler, state.seed, pos)
    token, done = jnp.where(reads, token, state.token), jnp.where(reads, jnp.isin(token, ends), state.done)
    return dataclasses.replace(state, caches=caches, token=token, pos=pos, done=done), logprob


def _sample(
    logits: Float[Array, "B V"], sampler: Sampler, seed: UInt32[Array, " B"], pos: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """A token per row for position `pos`, and its log-probability under the model itself (before temperature and filters)."""
    token = sampler(logits, seed, pos)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1)


def of_steps(policy: Policy, specs: tuple[LayerSpec, ...]) -> tuple[Policy, tuple[LayerSpec, ...]]:
    """What matters to programs that run token by token: whether prompts were read in blocks, but not in blocks of which size."""
    return policy, tuple(dataclasses.replace(spec, block=1) if spec.block > 1 else spec for spec in specs)


begin = Program(_empty, static=2, partition=_beginning)
"""`begin(policy, specs, seed, total)`: the state of rows that have read nothing yet; see `empty`."""

prefill = Program(_prefill, static=2, partition=_reading)
"""`prefill(policy, specs, params, tokens, lengths, total, seed, sampler, ends)`: read right-padded prompts and sample the first token.

`total` is how many tokens each row will reach with its new ones. Where a layer wants it, parts of the prompts are read again before
it chooses what to keep, see `kvjax.runtime.replay`. Returns the `Decoding` state and the first tokens' log-probabilities.
"""

decode = Program(
    _decode,
    static=2,
    donate=(3,),
    gpu_options=_gpu_options,
    partition=_going_on((ALL, ALL, ALL), (ALL, ALL)),
    canonical=of_steps,
)
"""`decode(policy, specs, params, state, count, sampler, ends)`: sample up to `count` <= `CHUNK` more tokens per row.

Stops early when all rows are done. Returns the new state (the old one's buffers are reused: copy it first to fork it), and
tokens and log-probabilities in buffers of `CHUNK`; `state.steps` tells how many columns are filled.
"""

answer = Program(
    _answer,
    static=2,
    donate=(3,),
    gpu_options=_gpu_options,
    partition=_going_on((ROWS, ROWS, ALL, ALL, ALL), (ALL, ALL)),
    canonical=of_steps,
)
"""`answer(policy, specs, params, state, given, lengths, count, sampler, ends)`: read given tokens into the caches, then sample.

Row b reads `given[b, :lengths[b]]`, at least one token, at the state's positions and in place of the state's sampled token;
whatever is kept of the past was chosen before they came. Then it samples: rows with fewer given tokens begin sooner and sample
more, until the one with the most has sampled `count` <= `CHUNK`, or all are done. Returns the new state (the old one's buffers
are reused), and tokens and log-probabilities, each row's samples from column 0; row b has sampled as many as `state.steps` grew by,
less `lengths[b] - 1`.
"""

extend = Program(_extend, static=2, donate=(3,), partition=_going_on((ROWS, ROWS, ROWS, ALL, ALL), (ROWS,)))
"""`extend(policy, specs, params, state, tokens, count, total, sampler, ends)`: read a block of a text [B, S], right-padded, into the caches.

Row b reads `count[b]` tokens at the state's positions, in place of its sampled token, and samples the one that follows; a row that
reads none stays as it is. Of memory it takes the caches, and what S tokens need. Returns the new state (the old one's buffers are
reused), and the sampled tokens' log-probabilities. `total` is as for `prefill`.
"""
