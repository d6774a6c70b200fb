"""How many rows a server's batch has."""

import logging
from collections.abc import Callable
from typing import Literal

from kvjax.models.sharding import bytes_per_device
from kvjax.runtime.batch import Batch
from kvjax.runtime.many import SHARE
from kvjax.runtime.memory import memory_limit

log = logging.getLogger(__name__)

MOST_ROWS = 256
"""Maximum number of rows that `auto` chooses."""


def make_batch(rows: int | Literal["auto"], make: Callable[[int], Batch]) -> Batch:
    """A batch of as many rows as were asked for, or as fit the memory.

    Args:
        rows: number of rows, or "auto".
        make: makes a batch of some rows. Nothing is allocated by it.

    Raises:
        ValueError: one row does not fit.
    """
    if rows != "auto":
        return make(rows)
    one = make(1)
    limit = memory_limit(one.engine.shard)
    if limit is None:
        raise ValueError("rows=auto, but the memory of this device is not known; give a number of rows")
    free = SHARE * limit - bytes_per_device(one.weights)
    count = min(int(free // one.row_bytes) - 1, MOST_ROWS)
    while count >= 1:
        batch = make(count)
        over = batch.compile(batch.read_sizes) - SHARE * limit
        if over <= 0:
            log.info("%d rows of %d bytes fit", count, batch.row_bytes)
            return batch
        count = max(min(count - 1 - int(over // batch.row_bytes), count - 1), 0)
    raise ValueError(
        f"a row of {one.row_bytes} bytes does not fit beside the weights and the prefill; give a smaller budget, or fewer tokens"
    )
