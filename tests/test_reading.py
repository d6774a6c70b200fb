"""Prompts of many tokens are prefilled a few rows at a time: the same states, in less memory."""

import jax
import numpy as np
import pytest
from policies.driver import compositions, every_policy

from kvjax.cache import layer_specs
from kvjax.config import RopeConfig
from kvjax.models import ModelConfig
from kvjax.policies import Policy, get_policy
from kvjax.runtime import decoding, reading
from kvjax.runtime.engine import Engine

FITTED = {"attention_matching": 5e-3}
"""Relative tolerance where a policy solves least squares, which magnifies rounding."""

FAST = "full", "snapkv", "treekv", "kvzip", "quest"
EVERY = [
    pytest.param(policy, id=policy.info.name, marks=() if policy.info.name in FAST else pytest.mark.slow)
    for policy in every_policy(16) + compositions(16)
]


@pytest.mark.rotating  # one policy of each family is among the default tests
@pytest.mark.parametrize("policy", EVERY)
def test_groups_of_rows_leave_what_all_rows_leave(policy: Policy, tiny, monkeypatch) -> None:
    policy = policy.bind(tiny.config)
    specs = layer_specs(tiny.config, 6, 50, 8, tiny.dtype)
    lengths = np.asarray([50, 3, 33, 20, 41, 8], np.int32)
    tokens = np.random.default_rng(0).integers(0, 64, (6, specs[0].prompt_len)).astype(np.int32)

    def read() -> tuple[tuple[int, ...], list[np.ndarray]]:
        program = jax.jit(lambda *arrays: reading.read_prompts(policy, specs, tiny, *arrays))
        steps = program.trace(tokens, lengths, lengths + 8).jaxpr.eqns
        groups = tuple(each.params["length"] for each in steps if each.primitive.name == "scan")
        return groups, [np.asarray(leaf) for leaf in jax.tree.leaves(program(tokens, lengths, lengths + 8))]

    _, want = read()
    monkeypatch.setattr(reading, "GROUP_TOKENS", 3 * specs[0].prompt_len)
    groups, got = read()
    assert 2 in groups
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=FITTED.get(policy.info.name, 1e-6))


def test_memory_does_not_grow_with_rows_but_for_the_cache(tiny, monkeypatch) -> None:
    def peak(rows: int) -> int:
        decoding.prefill.forget()
        engine = Engine(tiny.config, "full", dtype="float32", batch=rows, prompt_len=512, max_new_tokens=32)
        memory = engine.compile()
        return memory.prefill - memory.weights - memory.cache

    monkeypatch.setattr(reading, "GROUP_TOKENS", 512)
    one, eight = peak(1), peak(8)
    assert eight < 1.5 * one
    monkeypatch.setattr(reading, "GROUP_TOKENS", 8 * 512)
    assert peak(8) > 3 * eight
    decoding.prefill.forget()


def test_the_loop_keeps_no_copies_of_weights(tiny, monkeypatch) -> None:
    """XLA computes what depends on weights alone before a loop, if it may: float32 copies of all of them, on a CPU."""
    monkeypatch.setattr(reading, "GROUP_TOKENS", 512)
    decoding.prefill.forget()
    engine = Engine(tiny.config, "full", batch=4, prompt_len=256, max_new_tokens=32)
    program = engine.executables()[0].as_text()
    decoding.prefill.forget()
    before_the_loop = program[program.index("ENTRY") :]
    assert "bf16[96,48]" in before_the_loop
    assert "f32[96,48]" not in before_the_loop.replace("bf16[96,48]", "")
    assert "f32[48,96]" not in before_the_loop.replace("bf16[48,96]", "")


@pytest.mark.parametrize(
    ("rows", "length", "wanted"), [(1, 10**6, 1), (8, 16_384, 2), (6, 10_000, 3), (7, 16_384, 1), (64, 64, 64)]
)
def test_rows_at_a_time_divide_the_rows(rows, length, wanted) -> None:
    assert reading._together(rows, length) == wanted


def test_offloaded_caches_are_prefilled_together(tiny, monkeypatch) -> None:
    """A loop cannot stack arrays of host memory."""
    monkeypatch.setattr(reading, "GROUP_TOKENS", 1)
    policy = get_policy("offloaded(clusterkv:24)").bind(tiny.config)
    specs = layer_specs(tiny.config, 4, 40, 8, tiny.dtype)
    lengths = np.full(4, 40, np.int32)
    tokens = np.zeros((4, specs[0].prompt_len), np.int32)
    logits, _ = jax.eval_shape(lambda *x: reading.read_prompts(policy, specs, tiny, *x), tokens, lengths, lengths + 8)
    assert logits.shape == (4, 64)


@pytest.mark.slow
@pytest.mark.rotating
def test_a_tpu_holds_the_cache_once(monkeypatch) -> None:
    """What one row at a time needs beside weights and cache is little, though there are eight of it."""
    from kvjax.runtime import absent_tpu

    rope = RopeConfig(theta=10000.0, dim=128)
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "num_layers": 4, "max_position": 4096}
    config = ModelConfig.uniform(family="llama", num_heads=8, num_kv_heads=8, head_dim=128, rope=rope, **sizes)
    try:
        mesh = absent_tpu.mesh("v5e")
    except RuntimeError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(reading, "GROUP_TOKENS", 2048)
    memory = absent_tpu.memory_of(Engine(config, "full", batch=8, prompt_len=2048, max_new_tokens=64, mesh=mesh))
    assert memory.prefill - memory.weights - memory.cache < memory.cache / 8
