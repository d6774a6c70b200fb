"""Memory sizes and what fits in them."""

import jax.numpy as jnp
import pytest
from policies.driver import TINY

from kvjax.config import RopeConfig
from kvjax.models import ModelConfig, Params
from kvjax.policies import Full, Policy, PolicyError, StreamingLLM, TreeKV, get_policy, policies
from kvjax.runtime import memory as memory_module
from kvjax.runtime.memory import largest_cache, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5kb", 1500),
        ("1e9", 10**9),
        ("42", 42),
        ("3B", 3),
        ("16G", 16 * 10**9),
        ("4Gi", 4 * 2**30),
        ("2tib", 2**41),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "8 apples", "-1GB", "1e", "8GBs", "nan", "inf", "1e999"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a memory size; write a number and a unit"):
        parse_bytes(text)


@pytest.mark.parametrize("memory", [100_000, 1_000_000, 12_345_678])
@pytest.mark.parametrize("policy", [Full(), StreamingLLM(budget=8), TreeKV(budget=0.5)])
def test_the_largest_cache_fits_and_the_next_does_not(tiny: Params, policy: Policy, memory: int) -> None:
    def nbytes(slots: int) -> int:
        sized = policy if isinstance(policy, Full) else get_policy(policy, budget=slots)
        return memory_module.sequence_bytes(sized, tiny.config, slots)

    slots = largest_cache(policy, tiny.config, memory)
    step = 128 if slots >= 2048 else 32
    assert slots % 32 == 0
    assert 0 < nbytes(slots) <= memory < nbytes(slots + step)


@pytest.mark.parametrize("memory", [0, 1000])
def test_nothing_fits(tiny: Params, memory: int) -> None:
    assert largest_cache(Full(), tiny.config, memory) == 0
    assert largest_cache(TreeKV(), tiny.config, memory) == 0
    assert largest_cache(TreeKV(sinks=1000, budget=2000), tiny.config, 100_000) == 0


WIDE = ModelConfig.uniform("llama", 64, 48, 96, 2, 8, 8, 128, 256, RopeConfig(theta=10000.0, dim=128))
"""A layer of it takes as much memory for a token as one of Llama-3.1-8B."""


@pytest.mark.parametrize(("config", "memory"), [(TINY, 10**7), (WIDE, 8 * 10**9)], ids=["small", "large"])
def test_a_cache_that_fits_is_found_in_a_few_looks(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    """Each traces all layers: twenty of them for every policy are what `kvjax inspect --memory` would wait for."""
    looked, look = [], memory_module.sequence_bytes
    monkeypatch.setattr(memory_module, "sequence_bytes", lambda *given: looked.append(given) or look(*given))
    for cls in policies().values():
        policy, before = cls(), len(looked)
        try:
            policy.bind(config)
        except PolicyError:
            continue
        found = largest_cache(policy, config, memory)
        assert len(looked) - before <= 9, policy
        sizes = [found, found + (128 if found >= 2048 else 32)]
        fits, more = (
            look(get_policy(policy, budget=n) if "budget" in vars(policy) else policy, config, n, jnp.bfloat16)
            for n in sizes
        )
        assert fits <= memory < more, policy
