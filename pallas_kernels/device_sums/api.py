"""The public functions, and the choice of who computes them."""

from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Shaped

from ..op import Implementation, Op

_GATHER = Op("device_gather", __name__, gpu=("pallas_mosaic_gpu",), forward_only=True)
_SUM = Op("device_sum", __name__, gpu=("pallas_mosaic_gpu",), forward_only=True)


def device_gather(
    x: Shaped[Array, "*S"],
    axes: str | Sequence[str],
    mesh: Mesh | AbstractMesh,
    *,
    implementation: Implementation = "auto",
) -> Shaped[Array, "N *S"]:
    """The arrays of all devices along some axes of a mesh, stacked in the devices' order; within `jax.shard_map` over all of its axes.

    Args:
        axes: names of axes.
        mesh: all devices of the program.
        implementation: "auto" takes the device's Pallas kernel where it serves.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    return _GATHER(x, _tuple(axes), mesh, implementation=implementation)


def device_sum(
    x: Shaped[Array, "*S"],
    axes: str | Sequence[str],
    mesh: Mesh | AbstractMesh,
    *,
    residual: Shaped[Array, "*S"] | None = None,
    implementation: Implementation = "auto",
) -> Shaped[Array, "*S"]:
    """The sum of the arrays of all devices along some axes of a mesh, the same bits on all; within `jax.shard_map` over all of its axes.

    A step of decoding has two of a few kilobytes a layer, whose latency counts, and each of XLA's collectives keeps it from making the loop one
    CUDA graph. A kernel that writes into the other devices' memory does not.

    Args:
        axes, mesh, implementation: as for `device_gather`.
        residual: the same on all devices. The sum rounds to its type, and is added to it.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    return _SUM(x, _tuple(axes), mesh, residual=residual, implementation=implementation)


def _tuple(axes: str | Sequence[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)
