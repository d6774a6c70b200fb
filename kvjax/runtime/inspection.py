"""What a policy keeps, read from the states of a real run."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float

from kvjax.models import Params
from kvjax.policies import Policy
from kvjax.runtime.decoding import Decoding
from kvjax.runtime.engine import Engine
from kvjax.runtime.prompts import token_ids


def retained_positions(
    params: Params, prompt: str | Sequence[int], policy: Policy, max_new_tokens: int = 64
) -> Float[np.ndarray, "S P"]:
    """Which positions of a sequence the cache holds, step by step, in a greedy run past any end token.

    Args:
        prompt: text or token ids, T tokens.
        policy: whose choice to look at.
        max_new_tokens: M, tokens to sample; the last one sampled is not read, hence not in the cache.

    Returns:
        Share of all KV heads of all layers that hold position p after s new tokens have been read: S = M rows, the first of
        them the compressed prompt, and P = T + M - 1 columns. A merged slot counts at its newest token's position.

    Raises:
        ValueError: the prompt is empty, or text for a model without tokenizer, or `max_new_tokens` is less than 1.
        PolicyError: the policy cannot work with a sequence of this length.
    """
    (ids, *others), single = token_ids(params, prompt)
    if not single:
        raise ValueError(f"one prompt can be looked at, {1 + len(others)} were given")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}; give 1 or more")
    positions = len(ids) + max_new_tokens - 1
    engine = Engine(params, policy, prompt_len=len(ids), max_new_tokens=max_new_tokens)
    state, _ = engine.prefill([ids])
    held = [_held(engine, state, positions)]
    for _ in range(max_new_tokens - 1):
        state, _, _ = engine.decode(state, 1)
        held.append(_held(engine, state, positions))
    return np.stack(held)


def _held(engine: Engine, state: Decoding, positions: int) -> Float[np.ndarray, " P"]:
    counts, heads = np.zeros(positions), 0
    for slots in engine.slots(state):
        pos, live = (np.asarray(x)[0] for x in jax.device_get((slots.pos, slots.live)))
        counts += np.bincount(pos[live], minlength=positions)
        heads += len(pos)
    return counts / heads
