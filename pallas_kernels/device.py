"""The device that programs are traced for. Kernels use it to decide whether they support a case."""

from typing import NamedTuple

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Int


class Target(NamedTuple):
    """The device that programs are traced for.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        kind: JAX's name of the device, such as "NVIDIA H200" or "TPU v5 lite".
        cores: number of multiprocessors, None if unknown.
    """

    platform: str
    kind: str
    cores: int | None = None


def target() -> Target:
    """Return the device that a program traced now will run on.

    This is the device of the abstract mesh if there is one, and JAX's default device otherwise.
    `jax.sharding.use_abstract_mesh` sets an abstract mesh, for ahead-of-time compilation for a device that is not in
    this machine.
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
    """Return whether programs traced now are for a Hopper GPU (compute capability 9.0), as the Mosaic GPU kernels
    require.
    """
    return target().platform == "gpu" and any(
        name in target().kind for name in ("H100", "H200", "H800", "H20", "GH200")
    )


def float8_unsupported() -> str | None:
    """Return why kernels do not convert 8-bit floats on the GPU that programs traced now are for, or None if they do.

    Instructions for it need compute capability 8.9. The kernels have run on Hopper GPUs only. Interpret mode is refused on other
    GPUs as well.
    """
    if target().platform != "gpu" or hopper():
        return None
    return f"8-bit floats need a Hopper GPU, not {target().kind}"


def tpu_layout(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of a program's argument as a TPU stores them, from the outermost to the innermost.

    XLA chooses the order that needs least padding: the innermost axis is padded to a multiple of 128 numbers, and the next
    one to a multiple of 8. So a large matrix is stored column by column if its rows are no multiple of 128 numbers.
    """
    axes = tuple(range(len(shape)))
    if len(axes) < 2:
        return axes

    def padding(last: tuple[int, int]) -> float:
        outer, inner = (shape[axis] for axis in last)
        return (-(-inner // 128) * 128 / inner) * (-(-outer // 8) * 8 / outer)

    last = min(((outer, inner) for inner in axes[::-1] for outer in axes[::-1] if outer != inner), key=padding)
    return *(axis for axis in axes if axis not in last), *last


def sliced_rows(x: Array, start: Int[Array, ""], size: int) -> Array:
    """Return rows of an array that is an argument of the program, without a copy of the whole array.

    If a TPU does not store the array row by row, XLA would otherwise copy all of it before loops. A layout of the slice
    that equals the array's prevents that.
    """
    own = jax.lax.dynamic_slice_in_dim(x, start, size)
    axes = tpu_layout(x.shape)
    if target().platform != "tpu" or axes == tuple(range(x.ndim)):
        return own
    return with_layout_constraint(own, Layout(axes))
