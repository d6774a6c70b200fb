"""The tests of programs over a mesh: eight virtual devices, and a model whose sizes they do not divide."""

from typing import Any

import jax
import numpy as np
import pytest

from kvjax.config import RopeConfig
from kvjax.models import ModelConfig, Params, init

DEVICES = 8
"""Which `-m mesh` has a CPU be."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/mesh/" in item.path.as_posix() and not item.get_closest_marker("mesh_long"):
            item.add_marker(pytest.mark.mesh)


def model(num_heads: int, num_kv_heads: int, head_dim: int, **changes: Any) -> Params:
    """A random Llama of 2 layers, with 61 tokens and an MLP of 100."""
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 100, "num_layers": 2}
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    rope = RopeConfig(theta=10000.0, dim=head_dim)
    return init(
        ModelConfig.uniform(family="llama", max_position=256, rope=rope, **sizes | heads | changes), jax.random.key(1)
    )


@pytest.fixture(scope="session")
def uneven() -> Params:
    """4 query heads on 2 KV heads."""
    return model(4, 2, 16)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Longer and shorter than the budgets, and as many as two groups of devices can share."""
    random = np.random.default_rng(0)
    return [random.integers(0, 61, size).tolist() for size in (50, 3, 33, 20)]
