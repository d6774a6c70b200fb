"""Compiling for a TPU that this machine does not have, by the real compiler: Mosaic, its layout rules and its memory limits.

step = compile_for("v5e", function, *shapes)
print(step.memory_analysis().temp_size_in_bytes)
"""

import functools
import os
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from kvjax.extras import install
from kvjax.runtime.compilation_cache import not_kept

CHIPS = {"v5e": ("v5e:1x1", [1, 1, 1]), "v5p": ("v5p:1x1x1", [1, 1, 1]), "v6e": ("v6e:1x1", [1, 1, 1])}
"""Topology of a single chip, by the name of its generation."""

_HOST = {
    # What libtpu would ask a cloud host for, and a lock that would keep parallel processes apart.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@functools.cache
def chip(generation: str) -> Any:
    """A TPU chip to compile for.

    Args:
        generation: a key of `CHIPS`.

    Raises:
        ValueError: the generation is unknown.
        RuntimeError: there is no TPU compiler here.
    """
    if generation not in CHIPS:
        raise ValueError(f"generation={generation!r} is not one of {', '.join(CHIPS)}")
    if jax.default_backend() != "tpu":
        for name, value in _HOST.items():
            os.environ.setdefault(name, value)
    name, bounds = CHIPS[generation]
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, chips_per_host_bounds=bounds).devices[0]
    except Exception as error:  # of many types, by what is missing
        raise RuntimeError(f"no TPU compiler here ({error}): {install('tpu')}") from error


def compile_for(generation: str, function: Any, *args: Any, **options: Any) -> Any:
    """`function` of arrays like `args` (arrays or `jax.ShapeDtypeStruct`, in any pytree), compiled for one such chip.

    `options` are those of `jax.jit`; errors as for `chip`.
    """
    device = chip(generation)
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(device.device_kind, 1, "tpu"))
    sharding = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with jax.sharding.use_abstract_mesh(mesh), not_kept():
        return jax.jit(function, **options).lower(*shapes).compile()
