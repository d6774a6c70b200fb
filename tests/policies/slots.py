"""What states hold, read by one program for each policy and layer, and states after a prompt."""

import functools
from typing import Any

import jax
import numpy as np
from policies.driver import Case, compiled

from kvjax.cache import LayerSpec
from kvjax.policies import Policy


@functools.cache
def reader(policy: Policy, spec: LayerSpec) -> Any:
    """`view` of a layer whose states are no caches, jitted."""
    return jax.jit(policy.layer(spec).view)


def slots_of(policy: Policy, case: Case, state: Any) -> Any:
    """The state as a cache of NumPy's arrays."""
    own = policy.layer(case.spec).has_own_store
    return jax.device_get(reader(policy, case.spec)(state) if own else state.cache)


def kept(policy: Policy, case: Case, state: Any) -> list[list[set[int]]]:
    """As `driver.kept`."""
    slots = slots_of(policy, case, state)
    return [
        [set(p[m].tolist()) for p, m in zip(*row, strict=True)] for row in zip(slots.pos, slots.weight > 0, strict=True)
    ]


def after_prompt(policy: Policy, case: Case) -> Any:
    """The first of the states that `driver.run` gives, without compiling a step."""
    size, (prefill, _) = case.spec.prompt_len, compiled(policy, case.spec)
    inside = (np.arange(size) < case.lengths[:, None])[..., None, None]
    room = (0, 0), (0, max(size - case.q.shape[1], 0)), (0, 0), (0, 0)
    text = (np.where(inside, np.pad(x, room)[:, :size], np.float32(0)) for x in (case.q, case.k, case.v))
    return prefill(*text, case.lengths)
