"""Over a mesh every policy samples the same tokens, and keeps the same ones, as on one device."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from long_share import rotate
from policies.driver import compositions, every_policy
from policies.random_cases import draw_policy
from policies.surrogates import model_inputs

from kvjax import Engine
from kvjax.models import Params
from kvjax.policies import Full, KVzip, Policy, PolicyError, Quest, TreeKV, TriAttention, by_head, by_layer
from kvjax.runtime import decoding

from .conftest import model

NEW = 24
POLICIES = {f"{i}-{policy.info.name}": policy for i, policy in enumerate(every_policy(16) + compositions(16))}
MESHES = "data=2", "model=2", "model=4", "data=2,model=4"
ALL_DATA = "data=4"

SHARDED = {"adakv", "by_head(catekv_consistent, catekv_adaptive)", "full", "quantized(full)", "quest", "snapkv"}
"""Policies whose slots are sharded, one of each way to read and write them; what others do has been seen elsewhere."""


def generated(params: Params, policy: Policy, prompts: Any, mesh: str | None, **options: Any) -> tuple[Any, ...]:
    """Tokens, log-probabilities, and what is kept in each layer: positions, weights and tokens seen."""
    policy = dataclasses.replace(policy, **model_inputs(type(policy), params.config))
    engine = Engine(params, policy, batch=len(prompts), prompt_len=50, max_new_tokens=NEW, mesh=mesh, **options)
    state, first = engine.prefill(prompts, [NEW, NEW - 1, NEW - 5, NEW])
    begun = np.asarray(state.token)
    state, tokens, logprobs = engine.decode(state, NEW - 4)
    kept = [jax.tree.map(np.asarray, (slot.pos, slot.weight, slot.next, slot.seen)) for slot in engine.slots(state)]
    count = int(state.steps)
    scores = np.column_stack([np.asarray(first), np.asarray(logprobs)[:, :count]])
    return np.column_stack([begun, np.asarray(tokens)[:, :count]]), scores, kept, engine, state


def sums(engine: Engine, state: Any) -> int:
    """How many sums over devices the decoding program has."""
    state = dataclasses.replace(state, origin=None)  # which no program takes
    given = engine.policy, engine.specs, engine.weights, state, np.int32(1), *engine.how()
    args = decoding.decode._with_canonical(given)
    return str(jax.make_jaxpr(decoding.decode._whole(*args))(*decoding.decode._shapes(args))).count("= psum")


def agree(one: tuple[Any, ...], many: tuple[Any, ...]) -> None:
    """The same tokens and kept sets, and log-probabilities within what another order of sums makes of float32.

    Of what is quantised, a number halfway between two levels may fall to either.
    """
    np.testing.assert_array_equal(many[0], one[0])
    np.testing.assert_allclose(many[1], one[1], atol=3e-4 if one[3].policy.info.memory == "quantized" else 1e-5)
    for layer, (got, want) in enumerate(zip(many[2], one[2], strict=True)):
        for name, a, b in zip(("pos", "weight", "next", "seen"), got, want, strict=True):
            near = 1e-4 if name == "weight" else 1e-6  # counts, or fitted, with errors of the largest
            atol = 1e-5 * np.abs(b).max() if name == "weight" else 0
            np.testing.assert_allclose(a, b, rtol=near, atol=atol, err_msg=f"{name} of layer {layer}")


@pytest.mark.rotating  # `test_every_mesh` and `test_policy_along_sequence` have one of each kind in every run
@pytest.mark.parametrize("name", POLICIES)
def test_policy_over_meshes(name, uneven, prompts):
    policy = POLICIES[name]
    one = generated(uneven, policy, prompts, None)
    for mesh in ("model=2", "data=2,model=4"):
        many = generated(uneven, policy, prompts, mesh)
        agree(one, many)
        _, _, _, engine, state = many
        if engine.shard.devices == engine.shard.heads:
            told = any(layer.reduces_heads for layer in engine.layers)
            assert (sums(engine, state) > 2 * engine.config.num_layers + 1) == told, "beside the model's own"


@pytest.mark.parametrize(
    "name",
    [
        name if POLICIES[name].info.name in SHARDED else pytest.param(name, marks=pytest.mark.mesh_long)
        for name in POLICIES
    ],
)
def test_policy_along_sequence(name, uneven, prompts):
    policy = POLICIES[name]
    one, many = (generated(uneven, policy, prompts, mesh) for mesh in (None, "sequence=2"))
    agree(one, many)
    engine = many[3]
    sharded = [each[3].cache_bytes - engine.repeated_cache_bytes for each in (one, many)]
    assert sharded[0] / 2 <= sharded[1] <= 2 * sharded[0] / 3  # slots are rounded up
    assert bool(engine.sharded_caches) == (engine.cache_bytes < one[3].cache_bytes)
    assert policy.info.name not in SHARDED or engine.sharded_caches >= uneven.config.num_layers


@pytest.mark.mesh_long
@pytest.mark.parametrize("mesh", ["sequence=4", "data=2,model=2,sequence=2"])
@pytest.mark.parametrize("name", POLICIES)
def test_policy_over_meshes_with_sequence(name, mesh, uneven, prompts):
    agree(generated(uneven, POLICIES[name], prompts, None), generated(uneven, POLICIES[name], prompts, mesh))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["full", "tova", "chunkkv", "treekv"])
def test_every_mesh(name, mesh, uneven, prompts):
    policy = next(policy for policy in POLICIES.values() if policy.info.name == name)
    agree(generated(uneven, policy, prompts, None), generated(uneven, policy, prompts, mesh))


@pytest.mark.parametrize(
    "policy",
    [KVzip(budget=16, chunk=9, sinks=2, plus=True), KVzip(budget=16, chunk=9, sinks=2, scope="model")],
    ids=str,
)
def test_second_readings(policy, uneven, prompts):
    """Rows of one group of devices may have more parts than the others', and devices with the same heads have parts of a projection."""
    agree(generated(uneven, policy, prompts, None), generated(uneven, policy, prompts, "data=2,model=4"))


@pytest.mark.parametrize("name", rotate(["snapkv", "h2o", "chelsea", "treekv", "catekv"], always=["snapkv", "treekv"]))
def test_reading_in_blocks(name, uneven, prompts):
    policy = next(policy for policy in POLICIES.values() if name in policy.info.name)
    one = generated(uneven, policy, prompts, None, block=16)
    agree(one, generated(uneven, policy, prompts, "data=2,model=4", block=16))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("model=2", {"sets": "heads"}),
        ("model=2", {"sets": "union", "block": 16}),
        *(
            pytest.param(mesh, {"sets": sets, "keep_prompt": True, "block": 16}, marks=pytest.mark.mesh_long)
            for mesh in ("model=2", "data=2,model=4", "sequence=2")
            for sets in ("union", "heads")
        ),
    ],
    ids=str,
)
def test_layers_that_choose_together(mesh, options, uneven, prompts):
    """TriAttention's shared sets, with whole prompts and in blocks."""
    block = options.get("block")
    policy = TriAttention(budget=16, every=4, window=4, **{k: v for k, v in options.items() if k != "block"})
    one, many = (generated(uneven, policy, prompts, where, block=block) for where in (None, mesh))
    agree(one, many)
    kept = {tuple(sorted(p[p >= 0].tolist())) for pos, *_ in one[2] for p in pos[0]}
    assert len(kept) == (1 if options["sets"] == "union" else uneven.config.num_kv_heads)


def test_a_store_of_its_own_along_sequence(uneven, prompts):
    """ShadowKV's values are sharded; what it rebuilds keys from, and its exact cache, are not."""
    policy = next(policy for policy in POLICIES.values() if policy.info.name == "shadowkv")
    one, many = (generated(uneven, policy, prompts, mesh) for mesh in (None, "sequence=2"))
    agree(one, many)
    values = 2 * 4 * 2 * 64 * 16 * 4  # layers, rows, heads, slots, channels, bytes
    assert many[3].cache_bytes == one[3].cache_bytes - values // 2


@pytest.mark.parametrize("mesh", ["sequence=4", "data=2,model=2,sequence=2"])
def test_full_along_sequence(mesh, uneven, prompts):
    agree(generated(uneven, Policy(), prompts, None), generated(uneven, Policy(), prompts, mesh))


@pytest.mark.parametrize("name", ["full", "snapkv", "quest"])
def test_reading_in_blocks_along_sequence(name, uneven, prompts):
    policy = next(policy for policy in POLICIES.values() if name == policy.info.name)
    one = generated(uneven, policy, prompts, None, block=16)
    agree(one, generated(uneven, policy, prompts, "data=2,model=2,sequence=2", block=16))


@pytest.mark.mesh_long
@pytest.mark.parametrize("name", POLICIES)
def test_reading_in_blocks_of_every_policy(name, uneven, prompts):
    policy = POLICIES[name]
    try:
        one = generated(uneven, policy, prompts, None, block=16)
    except PolicyError as error:
        if "chunked prefill is not supported" not in str(error):
            raise
        pytest.skip("reads prompts whole")
    agree(one, generated(uneven, policy, prompts, "data=2,sequence=4", block=16))


@pytest.mark.parametrize(
    "name",
    [
        "full",
        "by_head(full, duoattention_streaming)",
        *(
            pytest.param(name, marks=pytest.mark.mesh_long)
            for name in ("adakv", "clusterkv", "quantized(full)", "turboquant(full)")
        ),
    ],
)
def test_saved_on_one_mesh_and_resumed_on_another(name, uneven, prompts):
    """The whole way through one device, and each mesh: what comes is what would have come."""
    policy = next(policy for policy in POLICIES.values() if name == policy.info.name)
    meshes = None, "sequence=4", "data=2,model=2,sequence=2", "model=2"
    engines = [Engine(uneven, policy, batch=4, prompt_len=50, max_new_tokens=NEW, mesh=mesh) for mesh in meshes]
    state, _ = engines[0].prefill(prompts)
    state, expected, _ = engines[0].decode(state, 16)
    state, _ = engines[1].prefill(prompts)
    found = []
    for engine, following in zip(engines[1:] + engines[:1], [*engines[2:], engines[0], engines[0]], strict=True):
        state, tokens, _ = engine.decode(state, 4)
        found.append(np.asarray(tokens)[:, :4])
        state = following.resume(engine.save(state))
    np.testing.assert_array_equal(np.concatenate(found, axis=1), np.asarray(expected)[:, :16])
    other = Engine(uneven, policy, batch=4, prompt_len=200, max_new_tokens=4 * NEW, mesh="sequence=2")
    with pytest.raises(ValueError, match="layer 0 of this state has "):
        other.resume(engines[0].save(state))


def drawn(number: int, params: Params) -> Policy:
    """A random combination of policies that can serve this model and the longest prompt."""
    for seed in itertools.count(100 * number):
        try:
            policy = draw_policy(seed).bind(params.config)
            Engine(params, policy, batch=4, prompt_len=50, max_new_tokens=NEW)
        except PolicyError:
            continue
        return policy
    raise AssertionError


@pytest.mark.parametrize("mesh", ["data=2,model=3", pytest.param("model=3,sequence=2", marks=pytest.mark.mesh_long)])
@pytest.mark.parametrize("number", rotate(range(8), always=[0, 1]))
def test_random_combinations(number, mesh, prompts):
    params = model(6, 3, 8)
    policy = drawn(number, params)
    if "offloaded(" in policy.info.name:
        with pytest.raises(PolicyError, match="host memory"):
            Engine(params, policy, batch=4, prompt_len=50, max_new_tokens=NEW, mesh="model=3")
    else:
        agree(generated(params, policy, prompts, None), generated(params, policy, prompts, mesh))


def test_a_nested_combination_along_sequence(uneven, prompts):
    """Of heads of one layer some have a cache that is sharded, others one that is not, and of layers, too."""
    heads = by_head({"all": Full(), "tree": TreeKV(budget=16, sinks=2, block=4)}, [["all", "tree"], ["tree", "all"]])
    policy = by_layer([heads, Quest(budget=16, page=4, dense_layers=0)])
    one, many = (generated(uneven, policy, prompts, mesh) for mesh in (None, "sequence=2"))
    agree(one, many)
    assert many[3].sharded_caches == 2


def bytes_on(state: Any, device: Any) -> int:
    shards = (shard for leaf in jax.tree.leaves(state.caches) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.parametrize("name", ["full", "snapkv", "quest"])
def test_bytes_are_sharded(name, uneven, prompts):
    policy = next(policy for policy in POLICIES.values() if policy.info.name == name)
    whole = Engine(uneven, policy, batch=4, prompt_len=50, max_new_tokens=NEW).cache_bytes
    *_, engine, state = generated(uneven, policy, prompts, "data=2,model=4")
    assert engine.shard.devices == 8
    assert engine.shard.heads == 2
    each = {bytes_on(state, device) for device in jax.devices()}
    assert each == {engine.cache_bytes}
    rows = 4 * 4 * 2  # what does not depend on heads, such as `seen`, is on each of those that share a model
    assert abs(engine.cache_bytes * 2 * engine.shard.heads - whole) <= 4 * rows


@pytest.mark.parametrize("name", ["by_head(full, duoattention_streaming)", "adakv"])
def test_unequal_heads_come_to_equal_bytes(name, uneven, prompts):
    """Heads that keep everything, of which a layer has one and the other two, and a store that heads share, have their slots on all devices that
    share a model.
    """
    policy = next(policy for policy in POLICIES.values() if policy.info.name == name)
    one, many = (generated(uneven, policy, prompts, mesh) for mesh in (None, "data=2,model=4"))
    agree(one, many)
    engine = many[3]
    assert (engine.shard.heads, engine.shard.copies, engine.shard.slots) == (1, 1, 4)
    assert {bytes_on(many[4], device) for device in jax.devices()} == {engine.cache_bytes}
    whole, same = one[3].cache_bytes // 2, engine.repeated_cache_bytes
    assert engine.cache_bytes == same + (whole - same) // 3  # 96 slots, 32 on each


@pytest.mark.parametrize("mesh", ["data=2,model=4", "model=2,sequence=4"])
def test_states_are_taken_over(mesh, uneven, prompts):
    *_, engine, state = generated(uneven, Policy(), prompts, mesh)
    leaves = jax.tree.leaves(state.caches)
    _, program = engine.executables(state)
    assert program.memory_analysis().alias_size_in_bytes >= sum(
        leaf.addressable_shards[0].data.nbytes for leaf in leaves
    )
    engine.decode(state, 1)
    assert all(leaf.is_deleted() for leaf in leaves)


def test_what_devices_tell_each_other(uneven, prompts):
    """In a step two sums a layer, one for the embedding, and the logits; along rows nothing."""
    *_, engine, state = generated(uneven, Policy(), prompts, "data=2,model=4")
    _, program = engine.executables(state)
    text = program.as_text()
    assert (
        text.count(" all-reduce(") == 2 * uneven.config.num_layers + 1 + 1
    )  # and how many steps there were, at the end
    assert text.count(" all-gather(") == 1 + 2  # tokens and their log-probabilities, at the end
    assert "all-to-all" not in text
    assert "collective-permute" not in text
    slots = Engine(uneven, Policy(), batch=4, prompt_len=50, max_new_tokens=NEW, mesh="sequence=2")
    text = slots.executables()[1].as_text()
    assert text.count(" all-reduce(") == 2 * uneven.config.num_layers + 1
    assert text.count(" all-gather(") == uneven.config.num_layers + 1  # attention of a layer, and the logits
    rows = Engine(uneven, Policy(), batch=4, prompt_len=50, max_new_tokens=NEW, mesh=ALL_DATA)
    state, _ = rows.prefill(prompts)
    text = rows.executables(state)[1].as_text()
    assert text.count(" all-reduce(") == 1
    assert text.count(" all-gather(") == 2


def test_rows_end_at_their_own_time(uneven, prompts):
    """Devices whose rows are done stop; the others go on."""
    engine = Engine(uneven, Policy(), batch=4, prompt_len=50, max_new_tokens=NEW, mesh="data=2,model=2")
    state, _ = engine.prefill(prompts)
    state = state.replace(done=jnp.asarray([True, True, False, True]))
    state, tokens, _ = engine.decode(state, 9)
    assert int(state.steps) == 9
    alone = Engine(uneven, Policy(), batch=4, prompt_len=50, max_new_tokens=NEW)
    other, _ = alone.prefill(prompts)
    _, expected, _ = alone.decode(other, 9)
    np.testing.assert_array_equal(np.asarray(tokens)[2, :9], np.asarray(expected)[2, :9])
    assert np.asarray(state.pos).tolist() == [50, 3, 42, 29]
