"""Tests of policies compile many small programs and run each a few times."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Programs as JAX makes them, without the optimisations of the compiler's backend, which take half of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
