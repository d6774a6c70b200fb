"""Free blocks of GPU memory for the small arrays of calls, so that temporary memory keeps its address.

XLA runs the loop of a program as a CUDA graph. Its kernels have the address of the program's temporary memory. If this
address changes between calls, XLA updates all kernels of the graph, which takes the host milliseconds.
"""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

LEAST = 256
"""Size in bytes that XLA's allocator rounds small arrays up to."""

SMALLEST_BLOCKS = 128
"""Number of blocks of `LEAST` bytes. Each call has several arrays of a few numbers, and results stay until the host has
taken them.
"""

BLOCKS = 8
"""Number of blocks of each larger size."""


def block_counts(largest: int) -> dict[int, int]:
    """Number of blocks of each size in bytes, where the largest array that should fit into a block has `largest` bytes."""
    counts, size = {LEAST: SMALLEST_BLOCKS}, LEAST
    while size < largest:
        size *= 2
        counts[size] = BLOCKS
    return counts


def block_bytes(largest: int) -> int:
    """Bytes that `leave_small_blocks` takes on each GPU: the free blocks, and the arrays between them."""
    return sum((size + LEAST) * count for size, count in block_counts(largest).items())


def leave_small_blocks(largest: int, devices: Iterable[Any]) -> list[jax.Array]:
    """Leave free blocks in the memory of GPUs, of `LEAST` bytes, twice as many, and so on, up to at least `largest` bytes.

    XLA's allocator puts an array into the smallest free block that has room for it. Without small blocks this is the large
    block that temporary memory is taken from, whose beginning then moves with each small array.

    Args:
        largest: size in bytes of the largest array that should fit into a block.
        devices: the devices. On others than GPUs nothing is done.

    Returns:
        Arrays that keep the blocks apart. The blocks exist as long as these do.
    """
    kept: list[jax.Array] = []
    for device in devices:
        blocks: list[jax.Array] = []
        for size, count in block_counts(largest).items() if device.platform == "gpu" else ():
            empty, between = np.zeros(size, np.uint8), np.zeros(1, np.uint8)
            for _ in range(count):
                blocks.append(jax.device_put(empty, device))
                kept.append(jax.device_put(between, device))
        # Memory that a copy still writes to would become free only later.
        for block in jax.block_until_ready(blocks):
            block.delete()
    return kept
