"""What runs on this machine's GPU or TPU: all tests in this folder, and only if they are asked for by `-m device`."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.device)


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
