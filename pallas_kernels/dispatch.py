"""Who computes an operation: plain XLA everywhere, or a Pallas body written for the device.

Every operation has an XLA reference that serves all cases on all devices. A Pallas body serves some cases on one kind of device,
and says of a case that it does not serve why not. `"auto"` takes the body of the device that the program is for, where it
serves, and XLA otherwise; so a body that is missing costs speed, never correctness.
"""

import importlib
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax

log = logging.getLogger(__name__)

Implementation = Literal["auto", "xla", "tpu", "gpu"]
"""Who is asked to compute. `"auto"` chooses; any other must serve or raise `Unsupported`."""

Chosen = Literal["xla", "tpu", "gpu"]

Tree = TypeVar("Tree")

SPARED = "KVJAX_WITHOUT_KERNELS"
"""Environment variable: operations, parted by commas, that `"auto"` leaves to XLA, should a kernel fail on a device that it has not been
tried on. Read when a program is traced.
"""


class Unsupported(ValueError):
    """An implementation was asked for by name that cannot compute this case, or not on this device."""


class Target(NamedTuple):
    """The device that programs are traced for.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        kind: as JAX names it, such as "NVIDIA H200" or "TPU v5 lite".
        cores: its multiprocessors, None if that is not known.
    """

    platform: str
    kind: str
    cores: int | None = None


def target() -> Target:
    """The device that a program traced now is for.

    It is the one of the abstract mesh, if there is one (`jax.sharding.use_abstract_mesh`, for compiling ahead of time for a
    device that this machine does not have), and else the one that JAX computes on by default.
    """
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        return Target(described.platform, described.device_kind, described.num_cores)
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    device = jax.local_devices()[0] if chosen is None or isinstance(chosen, str) else chosen
    if isinstance(chosen, str):
        device = jax.local_devices(backend=chosen)[0]
    return Target(device.platform, device.device_kind, getattr(device, "core_count", None))


def without_gradient(tree: Tree, error: Exception) -> Tree:
    """The same arrays, of which what follows has no derivatives: whoever asks for one gets the error."""

    @jax.custom_jvp
    def same(tree: Tree) -> Tree:
        return tree

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise error

    return same(tree)


def forward_only(operation: str, tree: Tree) -> Tree:
    """What a Pallas body that has no gradient is given."""
    message = f"{operation}: its Pallas kernel has no gradient; have XLA compute it, which has, by {SPARED}={operation} in the environment"
    return without_gradient(tree, Unsupported(message))


def hopper() -> bool:
    """Whether programs traced now are for an NVIDIA GPU of compute capability 9.0, whose own instructions Mosaic GPU uses."""
    return target().platform == "gpu" and any(
        name in target().kind for name in ("H100", "H200", "H800", "H20", "GH200")
    )


def triton() -> str | None:
    """Why Pallas' Triton backend, deprecated since JAX 0.11, cannot be used here; None if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return f"jax {jax.__version__} has no Triton backend for Pallas"
    return None


def choose(
    operation: str,
    implementation: Implementation,
    *,
    tpu: Callable[[], str | None] | None = None,
    gpu: Callable[[], str | None] | None = None,
    slower: Callable[[], str | None] | None = None,
    interpret: bool = False,
) -> Chosen:
    """The implementation that computes a case.

    Args:
        operation: its name, for the log and for errors.
        implementation: what the caller asked for.
        tpu, gpu: tells why that body does not serve this case, None if it does; None where there is no such body.
        slower: tells why the device's body, though it would serve, is slower than XLA in this case; `"auto"` heeds it.
        interpret: whether the body will be interpreted, which works on any device.

    Raises:
        Unsupported: a body was named that does not serve, or that is for another device than the program.
    """
    bodies = {"tpu": tpu, "gpu": gpu}
    here = target()
    if implementation == "auto":
        serves = bodies.get(here.platform)
        if operation in (name.strip() for name in os.environ.get(SPARED, "").split(",")):
            reason = f"{SPARED} names it"
        else:
            reason = "has no Pallas body of its own" if serves is None else serves() or (slower() if slower else None)
        chosen: Chosen = "xla" if reason else here.platform  # pyright: ignore[reportAssignmentType]
        log.debug("%s on %s: %s%s", operation, here.kind, chosen, f" ({reason})" if reason else "")
        return chosen
    if implementation == "xla":
        return "xla"
    if implementation not in bodies:
        raise Unsupported(f"{operation}: implementation={implementation!r}; give 'auto', 'xla', 'tpu' or 'gpu'")
    serves = bodies[implementation]
    reason = f"there is no {implementation} body" if serves is None else serves()
    if reason is None and not interpret and here.platform != implementation:
        reason = (
            f"this program is for {here.kind}, not for a {implementation} (interpret=True runs it anywhere, slowly)"
        )
    if reason:
        raise Unsupported(
            f"{operation}: implementation={implementation!r} cannot compute this: {reason}; use 'auto' or 'xla'"
        )
    return implementation
