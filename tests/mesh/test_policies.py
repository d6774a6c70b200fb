"""Over a mesh every policy samples the same tokens, and keeps the same ones, as on one device."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import compositions, every_policy, mean_queries
from policies.random_cases import draw_policy

from kvjax import Engine
from kvjax.cache import layer_specs
from kvjax.models import Params
from kvjax.policies import KVzip, Policy, PolicyError, TriAttention
from kvjax.policies.capabilities import as_cache

from .conftest import model

NEW = 24
POLICIES = {f"{i}-{policy.info.name}": policy for i, policy in enumerate(every_policy(16) + compositions(16))}
MESHES = "data=2", "model=2", "model=4", "data=2,model=4"
ALL_DATA = "data=4"


def generated(params: Params, policy: Policy, prompts: Any, mesh: str | None, **options: Any) -> tuple[Any, ...]:
    """Tokens, log-probabilities, and what is kept in each layer: positions, weights and tokens seen."""
    if isinstance(policy, TriAttention):
        policy = dataclasses.replace(policy, profile=mean_queries(params.config))
    engine = Engine(params, policy, batch=len(prompts), prompt_len=50, max_new_tokens=NEW, mesh=mesh, **options)
    state, first = engine.prefill(prompts, [NEW, NEW - 1, NEW - 5, NEW])
    begun = np.asarray(state.token)
    state, tokens, logprobs = engine.decode(state, NEW - 4)
    whole = layer_specs(params.config, len(prompts), 50, NEW, params.dtype, block=options.get("block", 0))
    caches = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state.caches)
    slots = [as_cache(policy.layer(spec), cache) for spec, cache in zip(whole, caches, strict=True)]
    kept = [jax.tree.map(np.asarray, (slot.pos, slot.weight, slot.next, slot.seen)) for slot in slots]
    count = int(state.steps)
    scores = np.column_stack([np.asarray(first), np.asarray(logprobs)[:, :count]])
    return np.column_stack([begun, np.asarray(tokens)[:, :count]]), scores, kept, engine, state


def agree(one: tuple[Any, ...], many: tuple[Any, ...]) -> None:
    """The same tokens and kept sets, and log-probabilities within what another order of sums makes of float32."""
    np.testing.assert_array_equal(many[0], one[0])
    np.testing.assert_allclose(many[1], one[1], atol=1e-5)
    for layer, (got, want) in enumerate(zip(many[2], one[2], strict=True)):
        for name, a, b in zip(("pos", "weight", "next", "seen"), got, want, strict=True):
            near = 1e-4 if name == "weight" else 1e-6  # counts, or fitted
            np.testing.assert_allclose(a, b, rtol=near, err_msg=f"{name} of layer {layer}")


@pytest.mark.parametrize("name", POLICIES)
def test_policy_over_meshes(name, uneven, prompts):
    policy = POLICIES[name]
    one = generated(uneven, policy, prompts, None)
    for mesh in ("model=2", "data=2,model=4"):
        agree(one, generated(uneven, policy, prompts, mesh))


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


@pytest.mark.parametrize("name", ["snapkv", "h2o", "chelsea", "treekv", "catekv"])
def test_reading_in_blocks(name, uneven, prompts):
    policy = next(policy for policy in POLICIES.values() if name in policy.info.name)
    one = generated(uneven, policy, prompts, None, block=16)
    agree(one, generated(uneven, policy, prompts, "data=2,model=4", block=16))


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


@pytest.mark.parametrize("number", range(8))
def test_random_combinations(number, prompts):
    params = model(6, 3, 8)
    policy = drawn(number, params)
    if "offloaded(" in policy.info.name:
        with pytest.raises(PolicyError, match="host's memory"):
            Engine(params, policy, batch=4, prompt_len=50, max_new_tokens=NEW, mesh="model=3")
    else:
        agree(generated(params, policy, prompts, None), generated(params, policy, prompts, "data=2,model=3"))


def bytes_on(state: Any, device: Any) -> int:
    shards = (shard for leaf in jax.tree.leaves(state.caches) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.parametrize("name", ["full", "snapkv", "quest", "adakv"])
def test_bytes_are_dealt(name, uneven, prompts):
    policy = next(policy for policy in POLICIES.values() if policy.info.name == name)
    whole = Engine(uneven, policy, batch=4, prompt_len=50, max_new_tokens=NEW).cache_bytes
    *_, engine, state = generated(uneven, policy, prompts, "data=2,model=4")
    assert engine.shard.devices == 8
    assert engine.shard.heads == (1 if policy.info.joint_heads else 2)
    each = {bytes_on(state, device) for device in jax.devices()}
    assert each == {engine.cache_bytes}
    rows = 4 * 4 * 2  # what does not depend on heads, such as `seen`, is on each of those that share a model
    assert abs(engine.cache_bytes * 2 * engine.shard.heads - whole) <= 4 * rows


def test_states_are_taken_over(uneven, prompts):
    *_, engine, state = generated(uneven, Policy(), prompts, "data=2,model=4")
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
