"""Compiling for a TPU that this machine does not have, by the real compiler: Mosaic, its layout rules and its memory limits."""

import functools
import os
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")

CHIPS = {"v5e": ("v5e:1x1", [1, 1, 1]), "v5p": ("v5p:1x1x1", [1, 1, 1]), "v6e": ("v6e:1x1", [1, 1, 1])}
"""Topology of a single chip, by the name of its generation."""

# What libtpu would ask a cloud host for, and a lock that would keep parallel test processes apart.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


@functools.cache
def chip(generation: str) -> Any:
    """A TPU chip to compile for. Skips the test where there is no TPU compiler, except in CI."""
    name, bounds = CHIPS[generation]
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, chips_per_host_bounds=bounds).devices[0]
    except Exception as error:
        if CI:
            raise
        pytest.skip(f"no TPU compiler here ({error}): pip install 'kvjax[tpu]'")


def compile_for(generation: str, function: Any, *args: Any, **options: Any) -> Any:
    """`function` of arrays like `args` (arrays or `jax.ShapeDtypeStruct`, in any pytree), compiled for that chip.

    `options` are those of `jax.jit`.
    """
    device = chip(generation)
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(device.device_kind, 1, "tpu"))
    sharding = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function, **options).lower(*shapes).compile()


def temporaries(compiled: Any) -> int:
    """Bytes of device memory that the program needs besides its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes
