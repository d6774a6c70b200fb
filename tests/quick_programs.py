"""Makes it cheap to trace, lower and compile the thousands of small programs that tests run."""

import gc
import importlib.metadata
import os
import threading
from pathlib import Path
from typing import Any

import jax

FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""XLA's flags for many small programs: the older emitters, and one module per program instead of one for each of several threads.

Programs of the default model's 30 layers compile twice as fast with the newer emitters (`for_large_programs`)."""

large = False
"""Whether programs are compiled with the newer emitters."""

CONTEXT_USES = 500
"""Programs that are lowered in one MLIR context. It keeps what it has interned, so it is replaced from time to time."""

FOLDER = "KVJAX_TEST_PROGRAMS"
"""Environment variable: the folder that a run's processes keep compiled programs in. Without it a run makes one, and removes it."""

MEMORY = 0.9e9
"""Bytes that a process may hold at the end of a file of tests before compiled programs are dropped."""

MAPPINGS = 30_000
"""Memory mappings that a process may have before compiled programs are dropped. Linux allows 65,530, and XLA crashes when there are no more."""


def share_contexts() -> None:
    """Lower many programs in one MLIR context.

    JAX makes a context for every program. Making one takes longer than lowering a small program in it, and takes longer the more contexts there
    are: thousands stay alive with the programs that were lowered in them. This replaces a private function of JAX's, where there is one.
    """
    from jax._src.interpreters import mlir

    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        return
    local = threading.local()  # so that no two threads lower in one context at a time

    def shared() -> Any:
        local.uses = getattr(local, "uses", 0) + 1
        if local.uses % CONTEXT_USES == 1:
            local.context = make()
        return local.context

    mlir.make_ir_context = shared


def keep_programs(folder: Path) -> None:
    """Keep compiled programs in a folder that the processes of a run share: what one of them compiled the others read.

    JAX writes such files in place, so that another process could read a part of one. This replaces a private method of JAX's by one that
    writes a file whole.
    """
    from jax._src.lru_cache import LRUCache

    def put(self: Any, key: str, value: bytes) -> None:
        path = self.path / f"{key}-cache"
        if not path.exists():
            part = self.path / f"{key}.{os.getpid()}-{threading.get_ident()}"  # threads may compile the same
            part.write_bytes(value)
            part.replace(path)

    LRUCache.put = put
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def use_quick_flags() -> None:
    """Give XLA `FLAGS`, where its version has them."""
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
        for_large_programs()


def for_large_programs() -> None:
    """Compile with XLA's newer emitters while `large` is true, whatever `FLAGS` say. This replaces a private function of JAX's."""
    from jax._src import compiler

    make = compiler.get_compile_options

    def options(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if large:
            made.env_option_overrides = [*made.env_option_overrides, ("xla_cpu_use_fusion_emitters", True)]
        return made

    compiler.get_compile_options = options


def drop_programs() -> None:
    """Let go of all compiled programs, and of what holds on to them."""
    from kvjax.runtime import decoding, rows
    from kvjax.runtime.program import Program

    for program in (*vars(decoding).values(), *vars(rows).values()):
        if isinstance(program, Program):
            program.forget()
    jax.clear_caches()
    gc.collect()


def held_bytes() -> float:
    """Memory of this process, where the system tells."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def mappings() -> int:
    """Memory mappings of this process, where the system tells."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0
