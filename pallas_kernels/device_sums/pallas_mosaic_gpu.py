"""Small arrays of all GPUs of a process for all of them, in one step: each writes its own into the others' memory, and says so.

XLA tells a kernel where its operands lie on the other devices, and starts it only when all devices have come to it, so that their memory is
free to be written to. Nothing is read from another device, so nobody has to wait for readers before the kernel ends.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from ..device import hopper
from ..wgmma import load_all

LANES = 128
"""Threads of a program."""

TILE = 4096
"""Numbers that a program has in registers, at most."""

PROGRAMS = 4
"""The most programs of a call: they wait for each other across devices, and must not wait for room beside another kernel's."""

MOST = 1 << 20
"""Numbers of a call: of more, bandwidth counts, not latency."""

DEVICES = 8
"""The most devices, those of a host."""


def unsupported_reason(x: Array, axes: tuple[str, ...], mesh: Any, *, residual: Array | None = None) -> str | None:
    """Why these kernels do not serve a case, or None if they do."""
    if not hopper():
        return "this program is not for a Hopper GPU"
    if not isinstance(mesh, Mesh):
        return "the mesh has no devices"
    others = [name for name, size in mesh.shape.items() if name not in axes and size > 1]
    if others:
        return f"devices along {others[0]} do not take part, but would be waited for"
    if mesh.devices.size > DEVICES:
        return f"{mesh.devices.size} devices are more than {DEVICES}"
    if any(device.process_index != jax.process_index() for device in mesh.devices.flat):
        return "not all devices are this process' own"
    if [device.id for device in mesh.devices.flat] != list(range(mesh.devices.size)):
        return "devices are not the host's first ones in their order"
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default") not in ("default", "bfc"):
        return "memory is not from XLA's own pool, which other devices can write to"
    for array in (x, *([] if residual is None else [residual])):
        if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.int32):
            return f"{array.dtype} is not float32, bfloat16 or int32"
    return None if 0 < x.size <= MOST else f"{x.size} numbers are none, or more than {MOST}"


def device_gather(
    x: Shaped[Array, "*S"], axes: tuple[str, ...], mesh: Any, *, interpret: bool = False
) -> Shaped[Array, "N *S"]:
    """See the public function."""
    found, _ = _exchanged(x, axes, mesh, interpret=interpret)
    return found[:, : x.size].reshape(mesh.devices.size, *x.shape)


def device_sum(
    x: Shaped[Array, "*S"], axes: tuple[str, ...], mesh: Any, *, residual: Array | None, interpret: bool = False
) -> Shaped[Array, "*S"]:
    """See the public function. Every device adds up in the devices' order."""
    if residual is not None:
        return _exchanged(x, axes, mesh, residual, interpret=interpret)[1][: x.size].reshape(x.shape)
    parts = device_gather(x, axes, mesh, interpret=interpret)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _exchanged(
    x: Shaped[Array, "*S"],
    axes: tuple[str, ...],
    mesh: Any,
    residual: Shaped[Array, "*S"] | None = None,
    *,
    interpret: bool,
) -> Any:
    """Every device's numbers [N, size], padded; and their sum with a residual [size], where there is one."""
    # Here, as not all installations of JAX have it.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        raise NotImplementedError("there is no interpreter of kernels that write to other devices")
    size = min(TILE, -(-x.size // LANES) * LANES)
    tiles = -(-x.size // size)
    programs, devices = min(tiles, PROGRAMS), mesh.devices.size
    vector = next(v for v in (8, 4, 2, 1) if v * x.dtype.itemsize <= 16 and size % (v * LANES) == 0)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)

    def body(own: Any, *refs: Any) -> None:
        residual_ref, out, summed, arrived = refs if residual is not None else (None, refs[0], None, refs[1])
        me = jax.lax.axis_index(axes).astype(jnp.int32)
        program = jax.lax.axis_index("program")

        def each_tile(work: Callable[[Any], None]) -> None:
            for i in range(-(-tiles // programs)):
                tile = i * programs + program
                pl.when(tile < tiles)(functools.partial(work, pl.ds(tile * size, size)))

        def send(here: Any) -> None:
            numbers = load_all(plgpu, own.at[here], layout)
            out[me, here] = numbers
            for step in range(1, devices):
                plgpu.remote_ref(out, _place(me + step, axes, mesh))[me, here] = numbers

        def add(here: Any) -> None:
            total = load_all(plgpu, out.at[0, here], layout)
            for device in range(1, devices):
                total = total + load_all(plgpu, out.at[device, here], layout)
            rest = load_all(plgpu, residual_ref.at[here], layout)
            wide = rest.astype(jnp.float32) + total.astype(rest.dtype).astype(jnp.float32)
            summed[here] = wide.astype(rest.dtype)

        each_tile(send)
        for step in range(1, devices):
            pl.semaphore_signal(arrived, device_id=_place(me + step, axes, mesh))
        pl.semaphore_wait(arrived, devices - 1)
        if residual is not None:  # of the tiles that this program has sent, the others' same programs have sent theirs
            each_tile(add)

    given = [jnp.pad(a.reshape(-1), (0, tiles * size - a.size)) for a in (x, residual) if a is not None]
    outs = [jax.ShapeDtypeStruct((devices, tiles * size), x.dtype)]
    outs += [] if residual is None else [jax.ShapeDtypeStruct((tiles * size,), residual.dtype)]
    found = plgpu.kernel(
        body,
        out_type=outs,
        grid=(programs,),
        grid_names=("program",),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        kernel_name="device_gather" if residual is None else "device_sum",
    )(*given)
    return found if residual is not None else (found[0], None)


def _place(number: Array, axes: tuple[str, ...], mesh: Mesh) -> Any:
    """The coordinates of a device in the mesh, from its number along some axes (modulo their sizes), beside which there is one device."""
    found = {}
    for axis in reversed(axes):
        found[axis] = jax.lax.rem(number, jnp.int32(mesh.shape[axis]))
        number = jax.lax.div(number, jnp.int32(mesh.shape[axis]))
    return tuple(found.get(axis, jnp.int32(0)) for axis in mesh.axis_names)
