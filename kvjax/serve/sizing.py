"""How many rows a server's batch has, and how many states of prompts' beginnings it stores."""

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


STATES = 2
"""Number of states of prompts' beginnings that are stored by default, with chunked prefill."""


def make_batch(
    rows: int | Literal["auto"], prefix_bytes: int | None, make: Callable[[int, int], Batch], copies: int = 0
) -> Batch:
    """A batch of as many rows as were asked for, or as fit the memory.

    Args:
        rows: number of rows, or "auto".
        prefix_bytes: memory for states of prompts' beginnings on each device; None for that of `STATES` rows, with chunked
            prefill. Each state has the size of a row.
        make: makes a batch of some rows, and as many states. Nothing is allocated by it.
        copies: number of rows that may be copied at a time while the batch runs.

    Raises:
        ValueError: one row does not fit.
    """
    one = make(1, 0)
    states = STATES if prefix_bytes is None else prefix_bytes // one.row_bytes
    states = states if one.engine.block else 0
    if rows != "auto":
        return make(rows, states)
    limit = memory_limit(one.engine.shard)
    if limit is None:
        raise ValueError("rows=auto, but the memory of this device is not known; give a number of rows")
    free = SHARE * limit - bytes_per_device(one.weights)
    count = min(int(free // one.row_bytes) - 1 - states - copies, MOST_ROWS)
    while count >= 1:
        batch = make(count, states)
        over = batch.compile(batch.read_sizes, samples=True) + copies * batch.row_bytes - SHARE * limit
        if over <= 0:
            log.info("%d rows of %d bytes fit", count, batch.row_bytes)
            return batch
        count = max(min(count - 1 - int(over // batch.row_bytes), count - 1), 0)
    raise ValueError(
        f"a row of {one.row_bytes} bytes does not fit beside the weights, {states} stored states and the prefill; give a smaller budget, "
        "or fewer tokens"
    )
