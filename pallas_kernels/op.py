"""Dispatch of operations: an XLA reference for every case, and kernels for some cases on some devices.

Every operation has an XLA reference, which supports all cases on all devices. A kernel supports some cases on one kind
of device, and returns the reason if it does not support a case. `"auto"` picks the first kernel for the current device
that supports the case, and XLA if there is none. A missing kernel therefore costs speed, never correctness.

The `api.py` of every folder defines its `Op`s.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

from .device import target
from .eager import in_one_program
from .gradients import without_gradient

log = logging.getLogger(__name__)

Implementation = Literal["auto", "xla", "gpu", "tpu"]
"""Which implementation computes an operation. `"auto"` picks one; any other must support the case or raise
`Unsupported`.
"""

WITHOUT = "KVJAX_WITHOUT_KERNELS"
"""Environment variable with a comma-separated list of operations that `"auto"` computes with XLA.

It is a workaround for kernels that fail on a device on which they were never tested. It is read when a program is
traced.
"""


_DIFFERENTIATED = contextvars.ContextVar("differentiated", default=False)


@contextlib.contextmanager
def differentiated() -> Iterator[None]:
    """Within, `"auto"` computes every operation with XLA, because Pallas kernels have no gradient."""
    before = _DIFFERENTIATED.set(True)
    try:
        yield
    finally:
        _DIFFERENTIATED.reset(before)


class Unsupported(ValueError):
    """The requested implementation does not support this case or this device."""


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation with one module per implementation.

    `reference` and every kernel's module define a function with the operation's name and the same arguments. A kernel's
    function also takes `interpret`.

    A kernel's module also defines `unsupported_reason`, which takes the same arguments and returns why the kernel does
    not support them, or None. A module with several operations can define one such function per operation, such as
    `page_scores_unsupported_reason`.

    Attributes:
        name: name of the operation.
        home: name of the `api` module that defines the operation; the other modules are beside it, or in
            `hopper/` (`.hopper.nearest`).
        gpu, tpu: names of the modules with kernels for these devices, in order of preference.
        forward_only: True if callers may differentiate the operation, although its Pallas kernels have no gradient.
            Derivatives then raise a clear error.
        prefer_xla_reason: returns a reason to use XLA for a case that the kernel supports, for example because it is
            not faster; None to use the kernel. Only `"auto"` uses it.
    """

    name: str
    home: str
    gpu: tuple[str, ...] = ()
    tpu: tuple[str, ...] = ()
    forward_only: bool = False
    prefer_xla_reason: Callable[..., str | None] | None = None

    def __call__(
        self, *args: Any, implementation: Implementation = "auto", interpret: bool = False, **options: Any
    ) -> Any:
        """Compute the operation with the selected implementation.

        Args:
            args, options: the operation's arguments.
            implementation: see `Implementation`.
            interpret: run the Pallas kernel in interpret mode, which works on any device.

        Raises:
            Unsupported: the requested implementation does not support this case.
        """
        kernel = self.kernel(*args, implementation=implementation, interpret=interpret, **options)
        if kernel is None:
            return in_one_program(self._function("reference"), args, options)
        if self.forward_only:
            by_xla = f"set {WITHOUT}={self.name} in the environment to use XLA, which has one"
            args = without_gradient(args, Unsupported(f"{self.name}: the Pallas kernel has no gradient; {by_xla}"))
        return in_one_program(kernel, args, options)

    def kernel(
        self, *args: Any, implementation: Implementation = "auto", interpret: bool = False, **options: Any
    ) -> Callable[..., Any] | None:
        """Return the kernel that computes a case, or None if XLA does.

        Args:
            args, options: the operation's arguments.
            implementation: see `Implementation`.
            interpret: whether the kernel will be interpreted, which works on any device.

        Raises:
            Unsupported: the requested implementation does not support this case, or is for another device than the
                program.
        """
        if implementation == "xla":
            return None
        here = target()
        if implementation == "auto":
            found, reason = None, f"{WITHOUT} names it"
            if _DIFFERENTIATED.get():
                reason = "the program is differentiated"
            elif self.name not in (name.strip() for name in os.environ.get(WITHOUT, "").split(",")):
                found, reason = self._find(here.platform, args, options)
            if found and self.prefer_xla_reason:
                reason = self.prefer_xla_reason(*args, **options)
                found = None if reason else found
            log.debug("%s on %s: %s", self.name, here.kind, found or f"xla ({reason})")
            return self._function(found, interpret) if found else None
        if implementation not in ("gpu", "tpu"):
            raise Unsupported(f"{self.name}: implementation={implementation!r}; give 'auto', 'xla', 'tpu' or 'gpu'")
        found, reason = self._find(implementation, args, options)
        if found and not interpret and here.platform != implementation:
            found, reason = (
                None,
                (
                    f"this program is for {here.kind}, not for a {implementation} (interpret=True runs it on any device, slowly)"
                ),
            )
        if not found:
            raise Unsupported(
                f"{self.name}: implementation={implementation!r} does not support this case: {reason}; use 'auto' or 'xla'"
            )
        return self._function(found, interpret)

    def _find(self, platform: str, args: Any, options: Any) -> tuple[str | None, str | None]:
        """Return the first kernel for a platform that supports a case; if there is none, None and the reason of each
        kernel.
        """
        names = {"gpu": self.gpu, "tpu": self.tpu}.get(platform, ())
        reasons = []
        for name in names:
            module = self._module(name)
            unsupported_reason = getattr(module, f"{self.name}_unsupported_reason", None) or module.unsupported_reason
            if not (reason := unsupported_reason(*args, **options)):
                return name, None
            reasons.append(reason if len(names) == 1 else f"{name}: {reason}")
        return None, "; ".join(reasons) or f"there is no {platform} kernel"

    def _function(self, module: str, interpret: bool = False) -> Callable[..., Any]:
        """Return a module's function for this operation."""
        function = getattr(self._module(module), self.name)
        return _interpreted(function) if interpret else function

    def _module(self, name: str) -> Any:
        """Import a module of the operation on first use."""
        return importlib.import_module(f".{name}", self.home.rpartition(".")[0])


@functools.cache
def _interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel's function in interpret mode. The result is cached, so that its program is compiled once."""
    return functools.partial(function, interpret=True)
