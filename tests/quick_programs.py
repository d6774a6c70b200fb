"""Reduces the time and memory to trace, lower and compile the thousands of small programs that tests run.

`conftest.py` calls `use_quick_flags`, `leave_out_locations`, `share_contexts` and `keep_programs` before the first
program is compiled, because XLA reads its flags once. All but `leave_out_locations` replace private functions of JAX.
After a JAX upgrade, check that the replacements still take effect. Between tests, `conftest.py` calls `drop_programs`
when compiled programs take too much memory.
"""

import ctypes
import functools
import gc
import importlib.metadata
import os
import threading
import zlib
from pathlib import Path
from typing import Any

import jax

FLAGS = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 --xla_disable_hlo_passes=hlo-verifier"
)
"""XLA flags for many small programs: no fusion emitters, one module per program instead of one per thread, and no check
of XLA's own passes after each of them.

The *fusion emitters* are XLA's newer code generator for CPUs. Small programs compile faster without them, but programs
of the default model's 30 layers compile twice as fast with them (see `for_large_programs`).
"""

GPU_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""XLA flags for programs that run once on a GPU: matmuls by cuBLAS with its first choice of algorithm."""

large = False
"""Whether to compile with the fusion emitters. `conftest.py` sets it while a test that uses `smollm2` runs."""

CONTEXT_USES = 500
"""Number of programs per MLIR context. A context keeps all types and attributes that were made in it, so it is replaced
from time to time.
"""

FOLDER = "KVJAX_TEST_PROGRAMS"
"""Environment variable: folder for compiled programs, which the processes of a run share.

If it is not set, `conftest.py` creates a temporary folder and deletes it after the run.
"""

MEMORY = 0.9e9
"""Memory of a process, in bytes, above which compiled programs are dropped at the end of a test file."""

MAPPINGS = 30_000
"""Number of memory mappings of a process above which compiled programs are dropped.

Linux allows 65,530, and XLA crashes when it gets no more.
"""


def share_contexts() -> None:
    """Lower many programs in one MLIR context.

    JAX makes a context for every program. Making one takes longer than lowering a small program in it. It also takes
    longer the more contexts there are, and thousands stay alive with the programs that were lowered in them. This
    replaces a private function of JAX, if it exists.
    """
    from jax._src.interpreters import mlir

    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        return
    local = threading.local()  # one context per thread, because two must not lower in one at the same time

    def shared() -> Any:
        local.uses = getattr(local, "uses", 0) + 1
        if local.uses % CONTEXT_USES == 1:
            local.context = make()
        return local.context

    mlir.make_ir_context = shared


def keep_programs(folder: Path) -> None:
    """Keep compiled programs in a folder that the processes of a run share. Each program is then compiled once per run.

    JAX writes these files in place, so that another process could read an incomplete file. This replaces a private
    method of JAX by one that writes files atomically. It ignores the cache's size limit. It also replaces JAX's
    compression, which takes three times as long as zlib's fastest one, for files that are a fifth smaller.
    """
    from jax._src import compilation_cache
    from jax._src.lru_cache import LRUCache

    def put(self: Any, key: str, value: bytes) -> None:
        path = self.path / f"{key}-cache"
        if not path.exists():
            part = self.path / f"{key}.{os.getpid()}-{threading.get_ident()}"  # threads may compile the same
            part.write_bytes(value)
            part.replace(path)

    LRUCache.put = put
    compilation_cache.compress_executable = functools.partial(zlib.compress, level=1)
    compilation_cache.decompress_executable = zlib.decompress
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def leave_out_locations() -> None:
    """Lower programs without the lines of Python that their operations come from, for versions of JAX that have the option."""
    if "jax_traceback_in_locations_limit" in jax.config.values:
        jax.config.update("jax_traceback_in_locations_limit", 0)


def use_quick_flags() -> None:
    """Give XLA `FLAGS`. Only jaxlib 0.10 has them, so other versions are left as they are. Do not call twice."""
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
        for_large_programs()


def for_large_programs() -> None:
    """Compile with the fusion emitters while `large` is True, regardless of `FLAGS`.

    This replaces a private function of JAX. Do not call twice.
    """
    from jax._src import compiler

    make = compiler.get_compile_options

    def options(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if large:
            made.env_option_overrides = [*made.env_option_overrides, ("xla_cpu_use_fusion_emitters", True)]
        return made

    compiler.get_compile_options = options


def drop_programs() -> None:
    """Delete all compiled programs and the references to them, and return their memory to the system where the C library can."""
    from kvjax.runtime import decoding, rows
    from kvjax.runtime.program import Program

    for program in (*vars(decoding).values(), *vars(rows).values()):
        if isinstance(program, Program):
            program.forget()
    jax.clear_caches()
    gc.collect()
    # The C library keeps freed memory. Without this, a process above `MEMORY` would stay there, and drop its programs after every file.
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def held_bytes() -> float:
    """Return the resident memory of this process in bytes, or 0 if the system does not report it."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def mappings() -> int:
    """Return the number of memory mappings of this process, or 0 if the system does not report it."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0
