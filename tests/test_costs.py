"""What programs read and compute, by the compiler's own count: clocks are not looked at."""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kvjax.cache import layer_specs
from kvjax.config import RopeConfig
from kvjax.models import ModelConfig, abstract, transformer
from kvjax.policies import get_policy
from kvjax.runtime import decoding

pytestmark = pytest.mark.optimised

CONFIG = ModelConfig.uniform("llama", 512, 128, 256, 2, 4, 2, 32, 8192, RopeConfig(1e4, 32))

PASSES = 5.0
"""Times that a step on a CPU goes over the cache, by the compiler's count: keys and values, the copies that its matrix products
take, and the logits of two query heads for each pair: 4.4 where this was written. One more copy of the cache adds 2."""


def nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@functools.cache
def step(name: str, context: int, **settings: Any) -> tuple[Any, int]:
    """One decoding step after so many tokens, compiled; and the bytes of its caches."""
    policy = get_policy(name, **settings)
    specs = layer_specs(CONFIG, 1, context, 64, jnp.float32)
    caches = tuple(jax.eval_shape(policy.layer(spec).init) for spec in specs)
    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    args = abstract(CONFIG), caches, token, token
    return jax.jit(partial(decoding.step, policy, specs), donate_argnums=1).lower(*args).compile(), nbytes(caches)


def test_a_step_reads_the_weights_once_and_no_copies_of_the_cache() -> None:
    (small, few), (large, many) = step("full", 1024 - 64), step("full", 6144 - 64)
    read = [program.cost_analysis()["bytes accessed"] for program in (small, large)]
    passes = (read[1] - read[0]) / (many - few)
    assert passes < PASSES
    assert read[0] - passes * few < 1.25 * nbytes(abstract(CONFIG))


@pytest.mark.parametrize("name", ["treekv", "streaming_llm", "snapkv"])
def test_with_a_budget_the_context_costs_nothing(name: str) -> None:
    """A step after 6000 tokens is the same as one after 1000, in bytes, operations and memory."""
    programs = [step(name, context, budget=256)[0] for context in (1024 - 64, 6144 - 64)]
    costs = [
        (cost["bytes accessed"], cost["flops"], program.memory_analysis().temp_size_in_bytes)
        for program in programs
        for cost in [program.cost_analysis()]
    ]
    assert costs[0] == costs[1]
    assert costs[0][0] < step("full", 6144 - 64)[0].cost_analysis()["bytes accessed"] / 2


def test_only_the_last_position_of_a_prompt_goes_through_the_vocabulary_head() -> None:
    """A larger vocabulary adds 2 D operations per row and token of it, not one for each position."""
    rows, length, more = 2, 128, 1024
    flops = []
    for vocabulary in (CONFIG.vocab_size, CONFIG.vocab_size + more):
        config = dataclasses.replace(CONFIG, vocab_size=vocabulary)
        specs = layer_specs(config, rows, length, 8, jnp.float32)
        program = jax.jit(partial(transformer.prefill, caches=[get_policy("full").layer(spec) for spec in specs]))
        shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, length), (rows,), (rows,))]
        flops.append(program.lower(abstract(config), *shapes).compile().cost_analysis()["flops"])
    assert flops[1] - flops[0] == pytest.approx(2 * rows * CONFIG.hidden_size * more, rel=0.01)
