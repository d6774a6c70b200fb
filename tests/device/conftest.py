"""What runs on this machine's GPU or TPU: all tests in this folder, and only if they are asked for by `-m device`."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, and have processes begin with the longest ones, one each."""
    own = [i for i, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    workers = int(getattr(config, "workerinput", {}).get("workercount", 1))
    for i, item in zip(own, begun_with_longest([items[i] for i in own], workers), strict=True):
        item.add_marker(pytest.mark.device)
        items[i] = item


def begun_with_longest(items: list[Any], workers: int) -> list[Any]:
    """Tests in an order in which each of so many processes, which divide them evenly, begins with a long one while there are any."""
    longest = [item for item in items if "test_large_model" in item.nodeid]
    found = [item for item in items if item not in longest]
    for i, item in enumerate(longest):
        found.insert(i * len(items) // workers if i < workers else len(found), item)
    return found


@pytest.fixture(scope="session", autouse=True)
def device() -> Any:
    """The device that users' programs run on; the CPU if JAX_PLATFORMS says so, to try the tests themselves."""
    device = jax.local_devices()[0]
    if device.platform == "cpu" and os.environ.get("JAX_PLATFORMS") != "cpu":
        pytest.skip("JAX finds neither a GPU nor a TPU here")
    return device


@pytest.fixture(scope="session")
def on_cpu(device: Any) -> Callable[[], AbstractContextManager[object]]:
    """Within this context programs are compiled for the CPU, and run there: what the device's are held against."""
    cpu = jax.local_devices(backend="cpu")[0]
    return lambda: jax.default_device(cpu)


@pytest.fixture(autouse=True)
def exact_products():
    """Products of float32 are those of float32, on every device."""
    with jax.default_matmul_precision("highest"):
        yield
