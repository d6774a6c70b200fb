"""`Program`: like `jax.jit`, but with compilation separate from execution, so that both can be measured."""

import contextlib
import functools
import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from kvjax._util.any_rank import any_rank
from kvjax.cache import Shard
from kvjax.models import Params
from kvjax.pallas_kernels import is_quantized
from kvjax.pallas_kernels.device import target
from kvjax.runtime.disk_cache import keep_unless_refused
from kvjax.runtime.mesh import over_mesh, placed, put

log = logging.getLogger(__name__)

Partition = tuple[Shard, tuple[Any, ...], Any]
"""Devices, and the partitions of arguments and results."""

Options = dict[str, str | bool | int]
"""XLA options by name."""

CUDA_GRAPH_OPTIONS: Options = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"
}
"""XLA options with which an NVIDIA GPU runs a loop as one CUDA graph, without returning to the host after each step."""

MESH_GRAPH_OPTIONS: Options = {
    "xla_gpu_enable_command_buffer": f"{CUDA_GRAPH_OPTIONS['xla_gpu_enable_command_buffer']},COLLECTIVES",
    "xla_gpu_experimental_use_collective_kernels": "",
}
"""The same for several GPUs of one process. Collectives become part of the graph, and use NCCL, which was faster there than XLA's own kernels (two H200). See `kvjax.models.sharding.get_mesh`.
"""

CONCURRENT_GRAPH_OPTIONS: Options = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""XLA options that run independent kernels of a CUDA graph concurrently. Cache updates of a layer then overlap with the next matmuls. Concurrent kernels do not share temporary memory, so operations that need much of it have to be ordered.

Graph and concurrency together shorten a decode step by 1.9 % with ChunkKV, 4 % with TreeKV and 6 % with CateKV (8
layers of Llama-3.1-8B's shape, 16384 tokens, H200). TreeKV evicts in every layer and step. CateKV's two kinds of heads
attend at the same time.
"""

MATMUL_OPTIONS: Options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
"""XLA options with which cuBLAS multiplies by float weights, and adds the residual stream in the same kernel. Projections of the same input stay separate matmuls, since cuBLAS needs a copy of the weights to merge them.

On an H100 with Llama-3.1-8B's shape, XLA's own choice between Triton and cuBLAS takes 6 % longer for a decode step of 64
rows, and 5 % longer for the prefill of 16,384 tokens. It also takes longer to compile.
"""


def matmul_options(params: Params) -> Options:
    """XLA options for matmuls of many rows with these weights. XLA's Triton matmuls dequantise weights on the fly, so they
    remain for quantised ones.
    """
    weights = jax.tree.leaves(params, is_leaf=is_quantized)
    return {} if any(map(is_quantized, weights)) else MATMUL_OPTIONS


class Program:
    """A function that is compiled once per combination of static arguments and argument shapes.

    `jax.jit` compiles inside the first call. Its compile time cannot be separated from the run time, and its executable
    cannot be asked for its memory. A `Program` compiles ahead of time and caches executables, also on disk (see
    `disk_cache`).

    Args:
        function: called as `function(*static, *arrays)`.
        static: number of leading arguments that are static (hashable, part of the program).
        donate: indices, among all arguments, of arrays whose memory the program may reuse.
        gpu_options: maps all arguments to XLA options for GPUs. Options in `XLA_FLAGS` take precedence.
        partition: maps all arguments to the partitions of arrays and results over a mesh; returns None for one device.
        canonical: maps static arguments to a cache key: calls with equal keys share one executable.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        static: int,
        donate: tuple[int, ...] = (),
        gpu_options: Callable[..., Options] | None = None,
        partition: Callable[..., Partition | None] | None = None,
        canonical: Callable[..., tuple[Any, ...]] | None = None,
    ) -> None:
        self._function = function
        self._static = static
        self._donate = donate
        self._gpu_options = gpu_options
        self._partition = partition
        self._canonical = canonical
        self._compiled: dict[Hashable, tuple[Any, list[Any] | None]] = {}
        self._recent: dict[Hashable, Any] = {}  # executables for one device by what `_quick_key` says
        self._shapes_of: dict[Hashable, Any] = {}
        self._sharded: dict[Hashable, bool] = {}  # by static arguments, on which alone it depends
        self._locks: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()
        self.compile_seconds = 0.0

    @property
    def executables(self) -> list[Any]:
        """All executables so far, in the order of compilation."""
        return [executable for executable, _ in list(self._compiled.values())]  # copied, as other threads may compile

    def compiled(self, *args: Any) -> Any:
        """The executable for these arguments (arrays or `jax.ShapeDtypeStruct`), compiled if necessary.

        Threads that need the same executable wait for the first of them; different executables compile concurrently.
        `.memory_analysis()` and `.cost_analysis()` of the executable report its needs.
        """
        args = self._with_canonical(args)
        return self._found(args, *jax.tree.flatten(args[self._static :]))[0]

    def _found(self, args: tuple[Any, ...], leaves: Sequence[Any], tree: Any) -> tuple[Any, list[Any] | None]:
        """The executable, and the shardings of its arrays on a mesh. `leaves` and `tree` are the flattened arrays of `args`."""
        static = args[: self._static]
        if (sharded := self._sharded.get(static)) is None:
            sharded = self._sharded[static] = self._partition is not None and self._partition(*args) is not None
        places = () if sharded else _places(leaves)
        key = static, tree, tuple([(x.shape, x.dtype) for x in leaves]), places
        if (found := self._compiled.get(key)) is not None:
            return found
        with self._lock:
            lock = self._locks[key]
        with lock:
            if (found := self._compiled.get(key)) is None:
                keep_unless_refused()
                start = time.perf_counter()
                arrays, donate = self._shapes(args), tuple(i - self._static for i in self._donate)
                with _compiling():
                    lowered = jax.jit(self._whole(*args), donate_argnums=donate).lower(*arrays)
                    places = [x.sharding for x in jax.tree.leaves(arrays)] if sharded else None
                    found = self._compiled[key] = compile_with(lowered, self._options(args)), places
                with self._lock:
                    self.compile_seconds += time.perf_counter() - start
        return found

    def _options(self, args: Sequence[Any]) -> dict[str, str | bool | int]:
        if self._gpu_options is None or target().platform != "gpu":
            return {}
        said = os.environ.get("XLA_FLAGS", "")
        return {name: value for name, value in self._gpu_options(*args).items() if name not in said}

    def forget(self) -> None:
        """Drop all executables."""
        with self._lock:
            self._compiled.clear()
            self._recent.clear()
            self._locks.clear()
            self._sharded.clear()
            self._shapes_of.clear()

    def __call__(self, *args: Any) -> Any:
        """Run the program. Donated arrays are deleted, also on devices that cannot reuse their memory."""
        args = self._with_canonical(args)
        leaves, tree = jax.tree.flatten(args[self._static :])
        key = args[: self._static], tree, _quick_key(leaves)
        if (executable := self._recent.get(key)) is not None:
            try:
                with _compiling():
                    results = executable(*args[self._static :])
            except (TypeError, ValueError):
                pass  # other shapes, types or devices than before, which it refuses before it runs
            else:
                return self._without_donated(args, results)
        executable, places = self._found(args, leaves, tree)
        if places is None:
            self._recent[key] = executable
        with _compiling():
            results = self._run(executable, places, args, leaves, tree)
        return self._without_donated(args, results)

    def ready(self, *args: Any) -> Callable[[], Any]:
        """Compile the program for these arrays if necessary, and return the call that runs it, as `__call__` does."""
        args = self._with_canonical(args)
        leaves, tree = jax.tree.flatten(args[self._static :])
        executable, places = self._found(args, leaves, tree)

        def run() -> Any:
            with _compiling():
                return self._without_donated(args, self._run(executable, places, args, leaves, tree))

        return run

    def _without_donated(self, args: tuple[Any, ...], results: Any) -> Any:
        """Delete donated arrays that the device could not reuse. Returns the results."""
        if self._donate:
            kept = set(map(id, jax.tree.leaves(results)))
            for leaf in jax.tree.leaves([args[i] for i in self._donate]):
                if isinstance(leaf, jax.Array) and id(leaf) not in kept and not leaf.is_deleted():
                    leaf.delete()
        return results

    def _run(
        self, executable: Any, places: list[Any] | None, args: tuple[Any, ...], leaves: Sequence[Any], tree: Any
    ) -> Any:
        if places is None:
            return executable(*args[self._static :])
        # Comparing objects is faster than comparing shardings, and nearly always succeeds after the first call.
        moved = [i for i, x in enumerate(leaves) if getattr(x, "sharding", None) is not places[i]]
        # The program itself transfers arrays of the host, unless other processes need their parts.
        moved = [i for i in moved if not (isinstance(leaves[i], np.ndarray) and places[i].is_fully_addressable)]
        if not moved:
            return executable(*args[self._static :])
        leaves = list(leaves)
        for i in moved:
            leaves[i] = there = put(leaves[i], places[i])
            places[i] = there.sharding
        return executable(*tree.unflatten(leaves))

    def shapes(self, *args: Any) -> Any:
        """Shapes of the results; over a mesh, global shapes. The function is traced once for all arguments of the same shapes."""
        args = self._with_canonical(args)
        leaves, tree = jax.tree.flatten(args[self._static :])
        key = args[: self._static], tree, tuple([(x.shape, x.dtype) for x in leaves])
        if (found := self._shapes_of.get(key)) is None:
            found = self._shapes_of[key] = jax.eval_shape(self._whole(*args), *args[self._static :])
        return found

    def _whole(self, *args: Any) -> Callable[..., Any]:
        """The function of all arrays, over all devices."""
        function = functools.partial(any_rank(self._function), *args[: self._static])
        sharded = None if self._partition is None else self._partition(*args)
        return function if sharded is None else over_mesh(function, *sharded)

    def _shapes(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arrays among the arguments; over a mesh, their shapes with shardings."""
        arrays = args[self._static :]
        sharded = None if self._partition is None else self._partition(*args)
        return arrays if sharded is None else placed(sharded[0], sharded[1], arrays, shapes=True)

    def _with_canonical(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._canonical is None:
            return args
        return *self._canonical(*args[: self._static]), *args[self._static :]


def _compiling() -> contextlib.AbstractContextManager[Any]:
    """Compile and run programs even if `jax_disable_jit` is set, under which JAX runs nothing that was compiled ahead of time."""
    return jax.disable_jit(False) if jax.config.jax_disable_jit else _NOTHING  # pyright: ignore[reportAttributeAccessIssue]


_NOTHING = contextlib.nullcontext()

_told: set[frozenset[tuple[str, str | bool | int]]] = set()
"""Sets of options that XLA has refused and that were logged. Many programs use the same options."""


def compile_with(lowered: Any, options: Options) -> Any:
    """Compile a lowered program with XLA options, dropping options that this XLA version does not know.

    Such options affect only speed. Each set of dropped options is logged once.
    """
    known = dict(options)
    while True:
        try:
            return lowered.compile(compiler_options=known)
        except jax.errors.JaxRuntimeError as error:
            # Match whole names, as one option's name may be part of another's.
            refused = [name for name in known if re.search(rf"\b{re.escape(name)}\b", str(error))]
            if not refused or not str(error).startswith("INVALID_ARGUMENT"):
                raise
            if (these := frozenset((name, known[name]) for name in refused)) not in _told:
                _told.add(these)
                log.warning("compiled without %s, which this version of XLA refuses: %s", refused, error)
            known = {name: value for name, value in known.items() if name not in refused}


def _quick_key(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Device of the first array, and shapes of the last one and of those on the host. Others mostly have the same shapes."""
    host = [x.shape for x in leaves if isinstance(x, np.ndarray)]
    return _place(getattr(leaves[0], "sharding", None)), leaves[-1].shape, *host


def _places(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Sharding of each array; None for the default device's memory, which is also that of shapes without a sharding."""
    return tuple([_place(getattr(x, "sharding", None)) for x in leaves])


def _place(sharding: Any) -> Any:
    known = _known.get(id(sharding))
    if known is None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        default = SingleDeviceSharding(jax.devices()[0])
        known = _known[id(sharding)] = sharding, None if sharding == default else sharding
    return known[1]


_known: dict[int, tuple[Any, Any]] = {}
"""Shardings by identity, with their places. Comparing shardings takes most of the time of finding a program."""

MOST_KNOWN = 4096
