"""The invariants of every policy, checked on each one that is registered."""

import copy
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import (
    TINY,
    Case,
    as_if_alone,
    compiled,
    compositions,
    each,
    every_policy,
    kept,
    make_case,
    most,
    offloads,
    rotate,
    run,
)

import kvjax
from kvjax.cache import LayerCache, Token, host_memory, layer_specs
from kvjax.models.params import count
from kvjax.policies import ByHead, ByLayer, Full, Policy, by_layer, get_policy, offloaded, quantized
from kvjax.policies.families.ragged import Ragged
from kvjax.policies.transforms.coded import CodedCache
from kvjax.policies.transforms.quantize import PackedCache
from kvjax.runtime import decoding
from kvjax.runtime.sampling import Greedy

pytestmark = pytest.mark.rotating
"""Of the slow policies, which are kinds of those of the default tier; golden values and schedules of all are compared in every run."""

TIGHT = every_policy(budget=16) + compositions(budget=16) + offloads(budget=16)
AMPLE = every_policy(budget=4096) + compositions(budget=4096) + offloads(budget=4096)
FRACTION = [p for p in every_policy(budget=0.5) if not isinstance(p, Full)] + compositions(budget=0.5)

STORES = LayerCache, Ragged
"""What keys and values are kept in."""

PROMPTS = [[5, 9, 2, 7, 7, 1] * 9, [3, 1, 4], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8] * 2]
NEW = 12
GREEDY = {"max_new_tokens": NEW, "ignore_eos": True}
"""The same in all tests, so that they share compiled programs; likewise the lengths of `case`."""


def case(seed: int) -> Case:
    """Random inputs of one layer: prompts longer and shorter than the tight budget, as long, and one longer."""
    return make_case(seed, [50, 3, 16, 17], steps=NEW)


# 1. A budget of at least prompt + new tokens gives what the full cache gives.


@each(AMPLE)
def test_ample_budget_is_the_full_cache(policy, tiny):
    expected = kvjax.generate(tiny, PROMPTS, policy="full", **GREEDY)
    for got, want in zip(kvjax.generate(tiny, PROMPTS, policy=policy, **GREEDY), expected, strict=True):
        assert got.tokens == want.tokens
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=2e-5)


# 2. Leaves never change shape or type, equal policies share one program, the cache is donated.


@each(TIGHT + FRACTION)
def test_leaves_keep_shape_and_type(policy):
    inputs = case(0)
    shapes = [
        jax.tree.map(lambda x: (x.shape, x.dtype), s)
        for s in [policy.layer(inputs.spec).init(), *run(policy, inputs)[2]]
    ]
    assert all(s == shapes[0] for s in shapes)


@each(TIGHT)
def test_equal_policies_share_one_program(policy, tiny):
    kvjax.generate(tiny, PROMPTS, policy=policy, **GREEDY)
    before = decoding.prefill.executables, decoding.decode.executables
    same = copy.deepcopy(policy)
    assert same is not policy
    for prompts, seed in ((PROMPTS, 1), ([prompt[:50] for prompt in PROMPTS], 2)):
        kvjax.generate(tiny, prompts, policy=same, seed=seed, **GREEDY)
    assert (decoding.prefill.executables, decoding.decode.executables) == before


def test_temperature_and_seed_do_not_compile_again(tiny):
    options = {"max_new_tokens": 4, "policy": "treekv", "top_p": 0.9}
    first = kvjax.generate(tiny, PROMPTS[0], temperature=0.5, **options)
    assert first.stats.compile_seconds > 0
    again = kvjax.generate(tiny, PROMPTS[0][:40], temperature=1.7, seed=8, **options | {"top_p": 0.3})
    assert again.stats.compile_seconds == 0


@each(TIGHT)
def test_cache_is_donated(policy, tiny):
    specs, args, state = start(policy, tiny)
    program = decoding.decode.compiled(policy, specs, tiny, state, jnp.int32(4), *args)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert program.memory_analysis().alias_size_in_bytes >= held
    decoding.decode(policy, specs, tiny, state, jnp.int32(4), *args)
    assert all(layer.is_deleted() for layer in jax.tree.leaves(state.caches))


@each(TIGHT)
def test_steps_copy_no_cache(policy, tiny):
    """Slots are written in place. (Nothing of the size of a layer's keys is copied, on the device or on the host.)"""
    specs, args, state = start(policy, tiny)
    program = decoding.decode.compiled(policy, specs, tiny, state, jnp.int32(4), *args).as_text()
    stores = *STORES, PackedCache, CodedCache
    caches = jax.tree.leaves(state.caches, is_leaf=lambda x: isinstance(x, stores))
    keys = [jax.tree.leaves(slots.k)[0] for slots in caches if isinstance(slots, stores)]
    types = {
        f"{ {'uint8': 'u8', 'float8_e4m3fn': 'f8e4m3fn'}.get(str(x.dtype), 'f32') }[{','.join(map(str, x.shape))}]"
        for x in keys
    }
    assert types
    for array in types:
        assert array in program
        # A transpose that is copied is what a gather gave, as where tokens are clustered: some of XLA's emitters lay it out again.
        assert not re.search(
            rf"= {re.escape(array)}\S* copy\((?!%transpose\S*\), metadata=\{{op_name=\"\S*/gather\")", program
        )


@functools.cache
def all_rotated(seed: int) -> np.ndarray:
    """The keys of `case(seed)` with the rotary embedding of their places, [B, S, K, H]."""
    inputs = case(seed)
    turned = np.empty(inputs.k.shape)
    for row, pos, head in np.ndindex(*inputs.k.shape[:3]):
        turned[row, pos, head] = rotate(inputs.spec.rope, inputs.k[row, pos, head], pos)
    return turned


# 3. Kept slots hold exactly the keys and values of the positions they claim; weights sum to what they stand for.


@each(TIGHT + FRACTION)
def test_slots_hold_what_they_claim(policy):
    inputs = case(21)
    info = policy.info
    by_part = isinstance(policy, ByHead | ByLayer)  # each part has keys in its own way
    # Of 255 steps between the least and greatest of a group, no more than half a one.
    exact, rounding = info.memory != "quantized", 0.5 * max(np.ptp(inputs.k), np.ptp(inputs.v)) / 255
    if "fp8" in info.name:  # a sixteenth
        rounding = max(np.abs(inputs.k).max(), np.abs(inputs.v).max()) / 16
    if "turboquant" in info.name:  # a tenth of a vector of 8 numbers, more or less
        rounding = 0.2 * max(np.linalg.norm(x, axis=-1).max() for x in (inputs.k, inputs.v))
    turned = all_rotated(21)
    for state in run(policy, inputs)[2]:
        slots = jax.tree.map(np.asarray, policy.layer(inputs.spec).view(state))
        live = slots.weight > 0
        row, head, slot = np.nonzero(slots.weight)
        assert (slots.pos[row, head, slot] >= 0).all()
        assert (slots.pos[row, head, slot] < slots.seen[row]).all()
        if not info.refits_values:  # a mean of tokens, see test_merged_slots_hold_all_tokens
            alone = slots.weight[row, head, slot] <= 1
            assert alone.all() or info.merges
            row, head, slot = row[alone], head[alone], slot[alone]
        pos = slots.pos[row, head, slot]
        keys, held_keys = inputs.k[row, pos, head], slots.k[row, head, slot]
        values, held_values = inputs.v[row, pos, head], slots.v[row, head, slot]
        if by_part:
            nearer = [np.abs(each - held_keys).max(axis=-1) for each in (keys, turned[row, pos, head])]
            keys = np.where((nearer[0] <= nearer[1])[:, None], keys, turned[row, pos, head])
        elif info.positions == "original":
            keys = turned[row, pos, head]
        np.testing.assert_allclose(held_keys, keys, atol=1e-5 if exact else 1.5 * rounding)
        if not (info.adds_dropped_values or info.refits_values):
            np.testing.assert_allclose(held_values, values, rtol=0, atol=0 if exact else rounding)
        assert (np.sum(live, axis=-1) <= slots.seen[:, None]).all()
        assert (slots.pos[~live] == -1).all()
        assert info.refits_values or (np.sum(slots.weight, axis=-1) <= slots.seen[:, None]).all()


MERGING = [p for p in TIGHT + FRACTION if p.info.merges]


@each(MERGING)
def test_merged_slots_hold_all_tokens(policy):
    """Nothing is dropped: weights sum to the tokens seen, and weighted values to the sum of all values."""
    inputs = case(21)
    for state in run(policy, inputs)[2]:
        slots = jax.tree.map(np.asarray, policy.layer(inputs.spec).view(state))
        np.testing.assert_array_equal(slots.weight.sum(axis=-1), np.stack([slots.seen] * 2, axis=-1))
        for row, seen in enumerate(slots.seen):
            held = np.einsum("kc,kch->kh", slots.weight[row], slots.v[row])
            np.testing.assert_allclose(held, inputs.v[row, :seen].sum(axis=0), atol=1e-4)
    assert slots.weight.max() > 1


@each(TIGHT)
def test_budget_is_kept(policy):
    """A policy that compresses once in `every` tokens holds up to so many more in between."""
    inputs = case(22)
    for i, state in enumerate(run(policy, inputs)[2]):
        for length, row in zip(inputs.lengths, kept(policy, inputs, state), strict=True):
            for head, held in enumerate(row):
                assert 0 < len(held) <= most(policy, inputs.spec, head, length, i)


WHOLE = [quantized(Full(), bits=8, group=4, residual=16).bind(TINY), offloaded(by_layer([Full(), Full()])).bind(TINY)]


@each(TIGHT + WHOLE)
def test_the_newest_token_is_never_lost(policy):
    """It has a slot of its own when a query attends, in every head, however full the cache is."""
    inputs = case(22)
    layer, states = policy.layer(inputs.spec), run(policy, inputs)[2]
    append = jax.jit(lambda state, token: layer.view(layer.append(state, token)))
    rows = np.arange(len(inputs.lengths))
    for i, state in enumerate(states[:-1]):
        pos = inputs.lengths + i
        token = Token(*(x[rows, pos] for x in (inputs.q, inputs.k, inputs.v)), pos, inputs.spec.rope)
        held = append(state, token)
        mine = (np.asarray(held.pos) == pos[:, None, None]) & np.asarray(held.live)
        assert (mine.sum(axis=-1) == 1).all()


@pytest.mark.slow
@each([p for p in TIGHT + FRACTION if "offloaded" not in p.info.name])
def test_rows_without_a_token_do_not_change(policy):
    """Rows that take tokens at random times go bit for bit through the states of rows that take one in every step."""
    inputs = case(24)
    _, step = compiled(policy, inputs.spec)
    random, rows = np.random.default_rng(24), np.arange(len(inputs.lengths))

    def following(state, taken, live):
        pos = np.minimum(inputs.lengths + taken, inputs.q.shape[1] - 1)
        return step(state, inputs.q[rows, pos], inputs.k[rows, pos], inputs.v[rows, pos], pos, live)[1]

    states = run(policy, inputs)[2][:1]
    for i in range(inputs.steps):
        states.append(following(states[-1], i, np.ones(len(rows), bool)))
    state, taken = states[0], np.zeros(len(rows), int)
    while taken.min() < inputs.steps:
        live = (random.random(len(rows)) < 0.5) & (taken < inputs.steps)
        state = following(state, taken, live)
        taken += live
        for got, *of_steps in zip(*map(jax.tree.leaves, (state, *states)), strict=True):
            wanted = np.stack([of_steps[step][row] for row, step in enumerate(taken)])
            np.testing.assert_array_equal(got, wanted)


# 4. A ragged batch gives row by row what each row gives alone; padding and free slots never matter.


@each(TIGHT, later=True)  # by layers alone, `test_rows_have_budgets_of_their_own` sees it too
def test_rows_are_independent(policy, tiny):
    fits = policy.info.refits_values  # least squares, which make differences of other shapes' rounding larger
    as_if_alone(tiny, PROMPTS, policy=policy, atol=1e-4 if fits else 2e-5, **GREEDY)


@each(FRACTION)
def test_rows_have_budgets_of_their_own(policy):
    """A fraction is of each row's own length: a layer keeps and gives for a row what it would beside copies of itself."""
    inputs = case(23)
    state, outputs, _ = run(policy, inputs)
    batch = len(inputs.lengths)
    for i, held in enumerate(kept(policy, inputs, state)):
        copies = inputs.rows([i] * batch)
        alone, alone_outputs, _ = run(policy, copies)
        assert kept(policy, copies, alone) == [held] * batch
        np.testing.assert_allclose(alone_outputs, outputs[:, [i] * batch], atol=2e-5)


@each(TIGHT + FRACTION)
def test_padding_is_never_read(policy):
    inputs = case(31)
    clean, poisoned = run(policy, inputs), run(policy, inputs, padding=np.nan)
    np.testing.assert_array_equal(clean[1], poisoned[1])
    assert kept(policy, inputs, clean[0]) == kept(policy, inputs, poisoned[0])


def poison(x):
    """Slots with NaN where they are free; anything else as it is."""
    if not isinstance(x, STORES):
        return x
    free = ~x.live[..., None]
    k, v = (jax.device_put(jnp.where(free, jnp.nan, host_memory.to_device(y)), y.sharding) for y in (x.k, x.v))
    return x.replace(k=k, v=v)


@each(TIGHT + FRACTION)
def test_free_slots_are_never_read(policy):
    inputs = case(32)
    _, step = compiled(policy, inputs.spec)
    states = run(policy, inputs)[2]
    rows = np.arange(len(inputs.lengths))
    for i, state in enumerate(states[:-1]):
        other = jax.tree.map(poison, state, is_leaf=lambda x: isinstance(x, STORES))
        pos = inputs.lengths + i
        args = inputs.q[rows, pos], inputs.k[rows, pos], inputs.v[rows, pos], pos
        np.testing.assert_array_equal(step(state, *args)[0], step(other, *args)[0])


FREED = [p for p in every_policy(budget=16) if p.info.memory == "freed"]
SEES = [p for p in FREED if not any(name in p.info.name for name in ("streaming", "cam", "random"))]
"""Those whose choice depends on what they read, and not on positions alone."""


@each(SEES, often=True)
def test_rows_choose_for_themselves(policy):
    """Rows of equal length and different text keep different tokens; of equal text, the same."""
    inputs = make_case(41, [50, 50, 50, 50], NEW)
    same = np.asarray([0, 1, 2, 0])
    inputs = Case(inputs.q[same], inputs.k[same], inputs.v[same], inputs.lengths, NEW)
    _, _, states = run(policy, inputs)
    for state in (states[0], states[-1]):
        rows = kept(policy, inputs, state)
        assert rows[0] == rows[3]
        assert rows[0] != rows[1]
        assert rows[1] != rows[2]


@each(FREED, often=True)
def test_padding_is_never_kept(policy):
    """No position beyond what a row has read, however much padding the batch has; and no slot that stands for none."""
    inputs = case(42)
    for i, state in enumerate(run(policy, inputs)[2]):
        for length, heads in zip(inputs.lengths, kept(policy, inputs, state), strict=True):
            assert all(held and min(held) >= 0 and max(held) < length + i for held in heads)


@each(FREED, often=True)
def test_nothing_leaks_into_the_next_prompt(policy):
    """A prompt read after another gives what it gave before."""
    before = run(policy, case(44))[1]
    run(policy, case(43))
    np.testing.assert_array_equal(run(policy, case(44))[1], before)


# 5. The bytes predicted are the bytes held, and the compiler agrees.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@each(TIGHT + AMPLE + FRACTION)
def test_bytes_are_predicted(policy, dtype):
    """What each layer's prefill would return, by its shapes alone; `test_compiler_agrees_on_bytes` looks at what really runs."""
    held, rows = 0, jax.ShapeDtypeStruct((3,), jnp.int32)
    for spec in layer_specs(TINY, 3, 54, NEW, dtype):
        q, k = (jax.ShapeDtypeStruct((3, spec.prompt_len, heads, 16), dtype) for heads in (4, 2))
        state = jax.eval_shape(compiled(policy, spec)[0], q, k, k, rows)
        held += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    shapes = {"batch": 3, "prompt_len": 54, "max_new_tokens": NEW, "dtype": dtype}
    assert held == policy.nbytes(TINY, **shapes) + policy.host_nbytes(TINY, **shapes)


@each(TIGHT)
def test_compiler_agrees_on_bytes(policy, tiny):
    specs, args, state = start(policy, tiny)
    memory = decoding.decode.compiled(policy, specs, tiny, state, jnp.int32(4), *args).memory_analysis()
    weights, cache = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (tiny, state.caches))
    on_host = sum(leaf.nbytes for leaf in jax.tree.leaves(state.caches) if host_memory.on_host(leaf))
    assert on_host == policy.host_nbytes(tiny.config, 3, 54, NEW, jnp.float32)
    assert cache - on_host == policy.nbytes(tiny.config, 3, 54, NEW, jnp.float32)
    others = memory.argument_size_in_bytes - weights - cache
    assert 0 <= others < 256  # token, position, counters, end ids
    assert memory.temp_size_in_bytes < cache + tiny.dtype.itemsize * count(tiny)  # the weights as floats


def test_memory_does_not_grow_with_decoded_tokens(tiny):
    """A tight budget: the decode program for 32 times as many tokens is the same size to the byte."""
    policy = kvjax.TreeKV(budget=16, sinks=2)
    sizes = []
    for new_tokens in (1000, 32_000):
        specs, args, state = start(policy, tiny, new_tokens)
        memory = decoding.decode.compiled(policy, specs, tiny, state, jnp.int32(4), *args).memory_analysis()
        sizes.append((memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes))
    assert sizes[0] == sizes[1]


# 6. State is a value: save, restore, fork, continue.


@each(TIGHT)
def test_state_round_trips(policy, tiny, tmp_path):
    specs, args, state = start(policy, tiny)

    def proceed(state):
        return decoding.decode(policy, specs, tiny, state, jnp.int32(6), *args)

    leaves, tree = jax.tree.flatten(state)
    np.savez(tmp_path / "state.npz", *map(np.asarray, leaves))
    fork = jax.tree.map(jnp.copy, state)
    state, tokens, logprobs = proceed(state)
    with np.load(tmp_path / "state.npz") as saved:
        restored = [jax.device_put(saved[f"arr_{i}"].view(leaf.dtype), leaf.sharding) for i, leaf in enumerate(leaves)]
    restored = jax.tree.unflatten(tree, restored)
    for other in (fork, restored):
        _, other_tokens, other_logprobs = proceed(other)
        np.testing.assert_array_equal(tokens, other_tokens)
        np.testing.assert_array_equal(logprobs, other_logprobs)


def inputs_of(policy: Policy, params, new_tokens: int = NEW):
    """Specs, the prefill program's prompt arguments, and what both programs want last."""
    lengths = np.asarray([len(p) for p in PROMPTS], np.int32)
    specs = layer_specs(params.config, 3, int(lengths.max()), new_tokens, params.dtype)
    tokens = np.zeros((3, specs[0].prompt_len), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    args = Greedy(), jnp.asarray([-1], jnp.int32)  # as `generate` calls them, so that programs are shared
    return (
        specs,
        args,
        (jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(lengths + new_tokens), jnp.zeros(3, jnp.uint32)),
    )


def start(policy: Policy, params, new_tokens: int = NEW):
    """The state after reading the prompts, and what the decode program wants besides it."""
    specs, args, prompt = inputs_of(policy, params, new_tokens)
    state, _ = decoding.prefill(policy, specs, params, *prompt, *args)
    return specs, args, state


def test_a_budget_of_one_token_is_not_all_tokens(tiny):
    """1 and 1.0 are equal in Python, so that what is cached by policy could mix them up."""
    sizes = [kvjax.Engine(tiny, "knorm:dense_layers=0", budget, prompt_len=200).cache_bytes for budget in (1, 1.0, 1)]
    assert sizes[0] == sizes[2] < sizes[1]
    one, every, again = (by_layer([get_policy("knorm", budget=budget)] * 2) for budget in (1, 1.0, 1))
    assert one != every
    assert (one, hash(one)) == (again, hash(again))
