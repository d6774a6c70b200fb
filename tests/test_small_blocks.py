"""Free blocks for the small arrays of calls. What the allocator of a GPU makes of them is tested on the device."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from kvjax.runtime import small_blocks
from kvjax.runtime.small_blocks import leave_small_blocks


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, [256]), (256, [256]), (257, [256, 512]), (5000, [256, 512, 1024, 2048, 4096, 8192])]
)
def test_blocks_of_all_sizes_lie_between_arrays_that_stay(largest, sizes, monkeypatch):
    put: list[jax.Array] = []

    def device_put(array, device):
        assert device.platform == "gpu"
        put.append(jnp.asarray(array))
        return put[-1]

    monkeypatch.setattr(small_blocks.jax, "device_put", device_put)
    devices = [SimpleNamespace(platform="cpu"), SimpleNamespace(platform="gpu")]
    kept = leave_small_blocks(largest, devices)
    blocks, between = put[::2], put[1::2]
    assert all(block.is_deleted() for block in blocks)
    assert list(map(id, between)) == list(map(id, kept))
    assert not any(array.is_deleted() for array in kept)
    counts = {size: sum(block.size == size for block in blocks) for size in sizes}
    assert list(counts.values()) == [small_blocks.SMALLEST_BLOCKS] + [small_blocks.BLOCKS] * (len(sizes) - 1)
    assert len(blocks) == sum(counts.values())


def test_other_devices_than_gpus_are_left_as_they_are():
    assert leave_small_blocks(1000, jax.devices()) == []
