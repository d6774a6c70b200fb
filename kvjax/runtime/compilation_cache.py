"""Compiled programs on disk, beside the default model."""

import contextlib
import os
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from kvjax.conversion.default_model import cache_directory

VARIABLE = "KVJAX_COMPILATION_CACHE"

_LIMIT = 2 * 2**30
"""Bytes of compiled programs to keep; beyond it the least recently used go."""


def keep_compiled_programs() -> None:
    """Have JAX keep compiled programs on disk, so that the next process need not compile them again.

    Does nothing if JAX has been given a place already (`JAX_COMPILATION_CACHE_DIR`), or if the folder cannot be made.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    folder = cache_directory() / "compiled"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", _LIMIT)
        compilation_cache.reset_cache()  # JAX looks for the folder once, and remembers if there was none


def keep_unless_refused() -> None:
    """`keep_compiled_programs`, unless the environment variable `KVJAX_COMPILATION_CACHE` says 0, no, off or false."""
    if os.environ.get(VARIABLE, "").lower() not in ("0", "no", "off", "false"):
        keep_compiled_programs()


@contextlib.contextmanager
def not_kept() -> Iterator[None]:
    """Within it, programs are neither written to JAX's cache on disk nor read from it.

    For a device that is not here: its programs can be written, but not read again (JAX 0.10 and 0.12 warn and compile anew).
    """
    enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once whether it is enabled, and remembers; the files stay
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
