"""Compiled programs that know what they cost: `jax.jit` with compilation apart from execution."""

import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding


class Program:
    """A function compiled once for each combination of static arguments and argument shapes.

    `jax.jit` compiles inside the first call, so that its time cannot be told from the run's, nor the executable be asked
    how much memory it takes. Here every executable is compiled ahead of time and kept.

    Args:
        function: called as `function(*static, *arrays)`.
        static: how many leading arguments are static (hashable, part of the program).
        donate: indices, among all arguments, of arrays whose buffers the program may reuse for its results.
    """

    def __init__(self, function: Callable[..., Any], static: int, donate: tuple[int, ...] = ()) -> None:
        self._jitted = jax.jit(function, static_argnums=tuple(range(static)), donate_argnums=donate)
        self._static = static
        self._compiled: dict[Hashable, Any] = {}
        self.compile_seconds = 0.0

    @property
    def executables(self) -> list[Any]:
        """All executables so far, in the order they were compiled."""
        return list(self._compiled.values())

    def compiled(self, *args: Any) -> Any:
        """The executable for these arguments (arrays or `jax.ShapeDtypeStruct`), compiled if there is none yet.

        `.memory_analysis()` and `.cost_analysis()` of it tell what it needs.
        """
        leaves, tree = jax.tree.flatten(args[self._static :])
        key = (args[: self._static], tree, tuple((x.shape, x.dtype, _place(x)) for x in leaves))
        if key not in self._compiled:
            start = time.perf_counter()
            self._compiled[key] = self._jitted.lower(*args).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[key]

    def forget(self) -> None:
        """Let go of all executables."""
        self._compiled.clear()

    def __call__(self, *args: Any) -> Any:
        """Run; arrays that are donated must not be used again."""
        return self.compiled(*args)(*args[self._static :])


def _place(x: Any) -> Any:
    """Where an array is, or is to be; None for the default device's own memory, which shapes without a place mean."""
    sharding = getattr(x, "sharding", None)
    return None if sharding == SingleDeviceSharding(jax.devices()[0]) else sharding
