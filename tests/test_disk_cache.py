"""Compiled programs on disk."""

import jax
import jax.numpy as jnp
import pytest

from kvjax.runtime import disk_cache
from kvjax.runtime.program import Program


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where programs would be kept; JAX's settings are afterwards as they were."""
    names = "jax_compilation_cache_dir", "jax_compilation_cache_max_size", "jax_persistent_cache_min_compile_time_secs"
    before = {name: jax.config.values[name] for name in names}
    monkeypatch.setattr(disk_cache, "cache_directory", lambda: tmp_path)
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield tmp_path / "compiled"
    for name, value in before.items():
        jax.config.update(name, value)
    disk_cache.compilation_cache.reset_cache()


def compiled() -> None:
    jnp.add(jnp.ones(3), 1)  # as a user's own program, before any of kvjax's
    Program(lambda x: jnp.cos(x) * 2.5, static=0)(jnp.ones(7))


def test_programs_are_kept_on_disk(folder, monkeypatch):
    monkeypatch.delenv(disk_cache.VARIABLE)
    compiled()
    assert any(folder.iterdir())


@pytest.mark.parametrize("said", ["0", "off", "False"])
def test_unless_the_user_refuses(folder, monkeypatch, said):
    monkeypatch.setenv(disk_cache.VARIABLE, said)
    compiled()
    assert not folder.exists()


def test_a_place_of_the_users_own_stays(folder, tmp_path, monkeypatch):
    monkeypatch.delenv(disk_cache.VARIABLE)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    compiled()
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "mine")
    assert not folder.exists()
