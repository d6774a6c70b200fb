"""The device that programs are traced for, and what it can run."""

from typing import NamedTuple

import jax


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


def hopper() -> bool:
    """Whether programs traced now are for an NVIDIA GPU of compute capability 9.0, whose own instructions Mosaic GPU uses."""
    return target().platform == "gpu" and any(
        name in target().kind for name in ("H100", "H200", "H800", "H20", "GH200")
    )
