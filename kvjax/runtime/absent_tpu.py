"""Compiles for a TPU that this machine does not have, with the real compiler, its layout rules and its memory limits.

step = compile_for("v5e", function, *shapes)
print(step.memory_analysis().temp_size_in_bytes)
"""

import functools
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, SingleDeviceSharding

from kvjax._util.extras import install
from kvjax.runtime.disk_cache import not_kept
from kvjax.runtime.engine import Engine, Memory

CHIPS = {"v5e": ("v5e:1x1", [1, 1, 1]), "v5p": ("v5p:1x1x1", [1, 1, 1]), "v6e": ("v6e:1x1", [1, 1, 1])}
"""Topology of a single chip, by its generation."""

HOSTS = {"v5e:2x2": [2, 2, 1], "v5p:2x2x1": [2, 2, 1], "v6e:2x2": [2, 2, 1], "v6e:2x4": [2, 4, 1]}
"""Chips of a host in each direction, by topology."""

_HOST = {
    # What libtpu would request from a cloud host, and a switch for the lock that keeps processes from loading libtpu in
    # parallel.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def chip(generation: str) -> Any:
    """A TPU chip to compile for. Argument and errors as for `mesh`."""
    return mesh(generation).devices.flat[0]


@functools.cache
def mesh(chips: str) -> Mesh:
    """A mesh of TPU chips to compile for.

    Args:
        chips: a key of `CHIPS` for one chip, or a key of `HOSTS`.

    Returns:
        A mesh with one axis, "model".

    Raises:
        ValueError: `chips` is unknown.
        RuntimeError: no TPU compiler is installed.
    """
    if chips not in CHIPS | HOSTS:
        raise ValueError(f"chips={chips!r} is not one of {', '.join([*CHIPS, *HOSTS])}")
    if jax.default_backend() != "tpu":
        for name, value in _HOST.items():
            os.environ.setdefault(name, value)
    name, bounds = CHIPS.get(chips) or (chips, HOSTS[chips])
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, chips_per_host_bounds=bounds).devices
        return Mesh(np.asarray(found), ("model",))
    except Exception as error:  # the type depends on what is missing
        raise RuntimeError(f"no TPU compiler here ({error}): {install('tpu')}") from error


def memory_of(engine: Engine) -> Memory:
    """Memory that an engine's programs need on each chip of its mesh, which `mesh` made."""
    assert engine.shard.mesh is not None
    with jax.sharding.use_abstract_mesh(engine.shard.mesh.abstract_mesh), not_kept():
        return engine.compile()


def compile_for(generation: str, function: Any, *args: Any, **options: Any) -> Any:
    """Compile a function for one TPU chip.

    Args:
        generation: a key of `CHIPS`.
        function: the function.
        args: arrays or `jax.ShapeDtypeStruct`, in any pytree.
        options: options of `jax.jit`.

    Returns:
        The executable.

    Raises:
        ValueError: `generation` is unknown.
        RuntimeError: no TPU compiler is installed.
    """
    device = chip(generation)
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(device.device_kind, 1, "tpu"))
    sharding = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with jax.sharding.use_abstract_mesh(mesh), not_kept():
        return jax.jit(function, **options).lower(*shapes).compile()
