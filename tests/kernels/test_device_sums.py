"""Small sums over devices: who serves which case, and what XLA's collectives give. Kernels are tried on GPUs, by `tests/device`."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from kvjax.pallas_kernels import device_gather, device_sum
from kvjax.pallas_kernels.device_sums import pallas_mosaic_gpu
from kvjax.pallas_kernels.device_sums.pallas_mosaic_gpu import unsupported_reason


class Fake(Mesh):
    """A mesh of devices that are not there."""

    def __new__(cls, *shape, process=0, first=0):
        return object.__new__(cls)

    def __init__(self, *shape, process=0, first=0):
        devices = [SimpleNamespace(id=first + i, process_index=process) for i in range(int(np.prod(shape)))]
        object.__setattr__(self, "devices", np.array(devices).reshape(shape))
        object.__setattr__(self, "axis_names", ("data", "heads"))

    __hash__ = object.__hash__


def test_one_device_has_its_own():
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    x = jnp.arange(6.0).reshape(2, 3)
    over = {"mesh": mesh, "in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
    np.testing.assert_array_equal(jax.shard_map(lambda x: device_sum(x, "model", mesh), **over)(x), x)
    np.testing.assert_array_equal(jax.shard_map(lambda x: device_gather(x, ("model",), mesh), **over)(x), x[None])


@pytest.mark.parametrize(
    ("mesh", "x", "reason"),
    [
        (AbstractMesh((2,), ("heads",)), jnp.zeros(8), "no devices"),
        (Fake(2, 2), jnp.zeros(8), "along data"),
        (Fake(1, 2, process=1), jnp.zeros(8), "this process' own"),
        (Fake(1, 2, first=2), jnp.zeros(8), "in their order"),
        (Fake(1, 2), jnp.zeros(8, jnp.float16), "float16"),
        (Fake(1, 2), jnp.zeros(0), "are none"),
        (Fake(1, 2), jnp.zeros(2 << 20), "more than"),
        (Fake(1, 2), jnp.zeros(8), None),
    ],
)
def test_who_serves(mesh, x, reason, monkeypatch):
    assert "Hopper" in str(unsupported_reason(x, ("heads",), mesh))
    monkeypatch.setattr(pallas_mosaic_gpu, "hopper", lambda: True)
    found = unsupported_reason(x, ("heads",), mesh)
    assert found is None if reason is None else reason in str(found)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    assert unsupported_reason(x, ("heads",), mesh) is not None
