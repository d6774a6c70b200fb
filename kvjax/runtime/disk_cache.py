"""Caches compiled programs on disk, in the directory of the default model."""

import contextlib
import os
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from kvjax.conversion.default_model import cache_directory

VARIABLE = "KVJAX_COMPILATION_CACHE"

_LIMIT = 2 * 2**30
"""Size limit of the cache, in bytes. The least recently used programs are evicted."""


def keep_compiled_programs() -> None:
    """Enable JAX's compilation cache on disk, so that later processes do not compile the same programs.

    Does nothing if a directory is already set (`JAX_COMPILATION_CACHE_DIR`), or if the directory cannot be created.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    folder = cache_directory() / "compiled"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", _LIMIT)
        compilation_cache.reset_cache()  # JAX looks for the directory only once


def keep_unless_refused() -> None:
    """Call `keep_compiled_programs`, unless the environment variable `KVJAX_COMPILATION_CACHE` is 0, no, off or false."""
    if os.environ.get(VARIABLE, "").lower() not in ("0", "no", "off", "false"):
        keep_compiled_programs()


@contextlib.contextmanager
def not_kept() -> Iterator[None]:
    """Disable JAX's compilation cache on disk within the `with` block.

    Needed for programs of absent devices: they can be written, but not read (JAX 0.10 and 0.12 warn and recompile).
    """
    enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX reads the setting only once; the files remain
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
