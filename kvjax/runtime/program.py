"""Compiled programs that know what they cost: `jax.jit` with compilation apart from execution."""

import functools
import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from kvjax._util.any_rank import any_rank
from kvjax.cache import Shard
from kvjax.pallas_kernels.device import target
from kvjax.runtime.compilation_cache import keep_unless_refused
from kvjax.runtime.mesh import over_mesh, placed, put

log = logging.getLogger(__name__)

Partition = tuple[Shard, tuple[Any, ...], Any]
"""Devices, and how arguments and results are dealt to them."""

CUDA_GRAPH_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"
}
"""XLA options by which an NVIDIA GPU runs a loop on its own, as one CUDA graph: a step does not come back to the host."""

MESH_GRAPH_OPTIONS = {
    "xla_gpu_enable_command_buffer": f"{CUDA_GRAPH_OPTIONS['xla_gpu_enable_command_buffer']},COLLECTIVES",
    "xla_gpu_experimental_use_collective_kernels": "",
}
"""The same for a loop over several GPUs of one process: sums over devices are a part of it, and NCCL's, which on two H200s were faster there
than kernels of XLA's own. See `kvjax.models.sharding.get_mesh`.
"""

CONCURRENT_GRAPH_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""XLA options by which kernels of such a graph that do not depend on each other run side by side: what a layer does to its cache
after attention hides behind the next matrices. They do not share their room, however: operations that need much have to follow one another.

Both together take 1.9 % off a step of 8 layers of Llama-3.1-8B's shape on an H200 (16384 tokens) with ChunkKV, 4 % with TreeKV, which
evicts in every layer and step, and 6 % with CateKV, whose two kinds of heads attend at the same time.
"""


class Program:
    """A function compiled once for each combination of static arguments and argument shapes.

    `jax.jit` compiles inside the first call, so that its time cannot be told from the run's, nor the executable be asked
    how much memory it takes. Here every executable is compiled ahead of time and kept, on disk, too (see `compilation_cache`).

    Args:
        function: called as `function(*static, *arrays)`.
        static: how many leading arguments are static (hashable, part of the program).
        donate: indices, among all arguments, of arrays whose buffers the program may reuse for its results.
        gpu_options: called with the static arguments, the XLA options for a GPU. `XLA_FLAGS` that name one have the last word.
        partition: called with all arguments, how the arrays among them and the results are dealt to a mesh's devices; None for one device.
        canonical: called with the static arguments, what of them matters to this program: it is compiled once for all that are alike in that.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        static: int,
        donate: tuple[int, ...] = (),
        gpu_options: Callable[..., Mapping[str, str]] | None = None,
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
        self._dealt: dict[Hashable, bool] = {}  # by static arguments, on which alone it depends
        self._locks: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()
        self.compile_seconds = 0.0

    @property
    def executables(self) -> list[Any]:
        """All executables so far, in the order they were compiled."""
        return [executable for executable, _ in list(self._compiled.values())]  # others may be compiled meanwhile

    def compiled(self, *args: Any) -> Any:
        """The executable for these arguments (arrays or `jax.ShapeDtypeStruct`), compiled if there is none yet.

        Threads that ask for the same one wait for the first of them; others compile at the same time.

        `.memory_analysis()` and `.cost_analysis()` of it tell what it needs.
        """
        args = self._with_canonical(args)
        return self._found(args, *jax.tree.flatten(args[self._static :]))[0]

    def _found(self, args: tuple[Any, ...], leaves: Sequence[Any], tree: Any) -> tuple[Any, list[Any] | None]:
        """The executable for arguments, of which these are the arrays, and where it wants those over a mesh."""
        static = args[: self._static]
        if (dealt := self._dealt.get(static)) is None:
            dealt = self._dealt[static] = self._partition is not None and self._partition(*args) is not None
        default = SingleDeviceSharding(jax.devices()[0])
        key = static, tree, tuple((x.shape, x.dtype, None if dealt else _place(x, default)) for x in leaves)
        if (found := self._compiled.get(key)) is not None:
            return found
        with self._lock:
            lock = self._locks[key]
        with lock:
            if (found := self._compiled.get(key)) is None:
                keep_unless_refused()
                start = time.perf_counter()
                arrays, donate = self._shapes(args), tuple(i - self._static for i in self._donate)
                lowered = jax.jit(self._whole(*args), donate_argnums=donate).lower(*arrays)
                places = [x.sharding for x in jax.tree.leaves(arrays)] if dealt else None
                found = self._compiled[key] = compile_with(lowered, self._options(static)), places
                with self._lock:
                    self.compile_seconds += time.perf_counter() - start
        return found

    def _options(self, static: Sequence[Any]) -> dict[str, str | bool]:
        if self._gpu_options is None or target().platform != "gpu":
            return {}
        said = os.environ.get("XLA_FLAGS", "")
        return {name: value for name, value in self._gpu_options(*static).items() if name not in said}

    def forget(self) -> None:
        """Let go of all executables."""
        with self._lock:
            self._compiled.clear()
            self._locks.clear()
            self._dealt.clear()

    def __call__(self, *args: Any) -> Any:
        """Run; arrays that are donated are deleted, also on devices that cannot reuse their memory."""
        args = self._with_canonical(args)
        results = self._run(args)
        if self._donate:
            kept = set(map(id, jax.tree.leaves(results)))
            for leaf in jax.tree.leaves([args[i] for i in self._donate]):
                if isinstance(leaf, jax.Array) and id(leaf) not in kept and not leaf.is_deleted():
                    leaf.delete()
        return results

    def _run(self, args: tuple[Any, ...]) -> Any:
        leaves, tree = jax.tree.flatten(args[self._static :])
        executable, places = self._found(args, leaves, tree)
        if places is None:
            return executable(*args[self._static :])
        for i, x in enumerate(leaves):
            # Whether two places are the same takes longer to tell than that they are one object, as those of the call before nearly all are.
            if getattr(x, "sharding", None) is not places[i]:
                leaves[i] = there = put(x, places[i])
                places[i] = there.sharding
        return executable(*tree.unflatten(leaves))

    def shapes(self, *args: Any) -> Any:
        """Shapes of the results; of a program over a mesh, those of all devices' parts together."""
        args = self._with_canonical(args)
        return jax.eval_shape(self._whole(*args), *args[self._static :])

    def _whole(self, *args: Any) -> Callable[..., Any]:
        """The function of all arrays, on all devices."""
        function = functools.partial(any_rank(self._function), *args[: self._static])
        dealt = None if self._partition is None else self._partition(*args)
        return function if dealt is None else over_mesh(function, *dealt)

    def _shapes(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arrays among arguments, as they are, or for a mesh their shapes, where a program wants them."""
        arrays = args[self._static :]
        dealt = None if self._partition is None else self._partition(*args)
        return arrays if dealt is None else placed(dealt[0], dealt[1], arrays, shapes=True)

    def _with_canonical(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._canonical is None:
            return args
        return *self._canonical(*args[: self._static]), *args[self._static :]


_told: set[frozenset[tuple[str, str | bool]]] = set()
"""Options that were refused together, with their values, and have been said to be: many programs are compiled with the same."""


def compile_with(lowered: Any, options: Mapping[str, str | bool]) -> Any:
    """A lowered program compiled with options of XLA's, without those that this version does not know: they cost speed alone, never the program.
    Which these are is said once.
    """
    known = dict(options)
    while True:
        try:
            return lowered.compile(compiler_options=known)
        except jax.errors.JaxRuntimeError as error:
            # Whole names: that of one option may be a part of another's.
            refused = [name for name in known if re.search(rf"\b{re.escape(name)}\b", str(error))]
            if not refused or not str(error).startswith("INVALID_ARGUMENT"):
                raise
            if (these := frozenset((name, known[name]) for name in refused)) not in _told:
                _told.add(these)
                log.warning("compiled without %s, which this version of XLA refuses: %s", refused, error)
            known = {name: value for name, value in known.items() if name not in refused}


def _place(x: Any, default: SingleDeviceSharding) -> Any:
    """Where an array is, or is to be; None for the default device's own memory, which shapes without a place mean."""
    sharding = getattr(x, "sharding", None)
    return None if sharding == default else sharding
