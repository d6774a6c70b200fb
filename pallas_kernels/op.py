"""Who computes an operation: plain XLA everywhere, or a kernel written for the device.

Every operation has an XLA reference that serves all cases on all devices. A kernel serves some cases on one kind of device, and says
of a case that it does not serve why not. `"auto"` takes the first kernel for the device that the program is for which serves, and XLA
otherwise; so a kernel that is missing costs speed, never correctness.
"""

import dataclasses
import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any, Literal

from .device import target
from .eager import in_one_program
from .gradients import without_gradient

log = logging.getLogger(__name__)

Implementation = Literal["auto", "xla", "gpu", "tpu"]
"""Who is asked to compute. `"auto"` chooses; any other must serve or raise `Unsupported`."""

WITHOUT = "KVJAX_WITHOUT_KERNELS"
"""Environment variable: operations, parted by commas, that `"auto"` leaves to XLA, should a kernel fail on a device that it has not been
tried on. Read when a program is traced.
"""


class Unsupported(ValueError):
    """An implementation was asked for by name that cannot compute this case, or not on this device."""


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation of a package with one module for each way to compute it.

    `reference` and every kernel's module have a function by the operation's name, of the same arguments; a kernel's takes `interpret` besides.
    A kernel's module has `unsupported_reason` too, of these arguments, which tells why the kernel does not serve them, or None; a module whose
    operations differ in that has one for each, such as `page_scores_unsupported_reason`.

    Attributes:
        name: of the operation.
        home: name of the module that makes it, its folder's `api`; the others are beside it, or in `hopper/`: `.hopper.nearest`.
        gpu, tpu: names of the modules with kernels for such devices, the one to be preferred first: `BACKEND`, such as `pallas_triton`, or
            `OPERATION_BACKEND` in every folder whose operations do not share one module a backend (operations that do are named for
            the first).
        forward_only: whether somebody may ask for a gradient through it, which its Pallas kernels do not have: then they say so.
        prefer_xla_reason: tells why XLA is to compute a case that a kernel serves, as where it is as fast; None where the kernel
            computes it. `"auto"` heeds it.
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
        """The operation, computed by who is chosen.

        Raises:
            Unsupported: an implementation was named that does not serve.
        """
        kernel = self.kernel(*args, implementation=implementation, interpret=interpret, **options)
        if kernel is None:
            return in_one_program(self._function("reference"), args, options)
        if self.forward_only:
            by_xla = f"have XLA compute it, which has, by {WITHOUT}={self.name} in the environment"
            args = without_gradient(args, Unsupported(f"{self.name}: its Pallas kernel has no gradient; {by_xla}"))
        return in_one_program(kernel, args, options)

    def kernel(
        self, *args: Any, implementation: Implementation = "auto", interpret: bool = False, **options: Any
    ) -> Callable[..., Any] | None:
        """The kernel that computes a case, None where XLA does.

        Args:
            interpret: whether it will be interpreted, which works on any device.

        Raises:
            Unsupported: an implementation was named that does not serve, or that is for another device than the program.
        """
        if implementation == "xla":
            return None
        here = target()
        if implementation == "auto":
            found, reason = None, f"{WITHOUT} names it"
            if self.name not in (name.strip() for name in os.environ.get(WITHOUT, "").split(",")):
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
                    f"this program is for {here.kind}, not for a {implementation} (interpret=True runs it anywhere, slowly)"
                ),
            )
        if not found:
            raise Unsupported(
                f"{self.name}: implementation={implementation!r} cannot compute this: {reason}; use 'auto' or 'xla'"
            )
        return self._function(found, interpret)

    def _find(self, platform: str, args: Any, options: Any) -> tuple[str | None, str | None]:
        """The first kernel for these devices that serves a case; if there is none, what each said."""
        names = {"gpu": self.gpu, "tpu": self.tpu}.get(platform, ())
        reasons = []
        for name in names:
            module = self._module(name)
            told = getattr(module, f"{self.name}_unsupported_reason", None) or module.unsupported_reason
            if not (reason := told(*args, **options)):
                return name, None
            reasons.append(reason if len(names) == 1 else f"{name}: {reason}")
        return None, "; ".join(reasons) or f"there is no {platform} kernel"

    def _function(self, module: str, interpret: bool = False) -> Callable[..., Any]:
        """The operation as a module has it."""
        function = getattr(self._module(module), self.name)
        return _interpreted(function) if interpret else function

    def _module(self, name: str) -> Any:
        """A module of the operation, imported where it is used."""
        return importlib.import_module(f".{name}", self.home.rpartition(".")[0])


@functools.cache
def _interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel's function, interpreted; the same object for the same kernel, so that its program is compiled once."""
    return functools.partial(function, interpret=True)
