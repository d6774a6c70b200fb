"""Which tokens a policy keeps, recorded in a real run."""

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
    """Positions in the cache at each step of greedy decoding, which ignores end tokens.

    Args:
        params: the model.
        prompt: text or token ids, T tokens.
        policy: the policy to inspect.
        max_new_tokens: number of tokens to sample, M. The last one is not in the cache, as it is sampled but not
            processed.

    Returns:
        [M, T + M - 1]: the fraction of all KV heads of all layers that keep position p after s new tokens. Row 0 is the
            compressed prompt. A merged slot counts at the position of its latest token.

    Raises:
        ValueError: the prompt is empty, there are several prompts, the prompt is text and the model has no tokenizer,
            or `max_new_tokens` is less than 1.
        PolicyError: the policy does not support a sequence of this length.

    Example:
        >>> from kvjax.runtime.inspection import retained_positions
        >>> shares = retained_positions(params, [5, 9, 2] * 10, kvjax.StreamingLLM(budget=8), max_new_tokens=4)
        >>> shares.shape  # steps, positions
        (4, 33)
    """
    (ids, *others), single = token_ids(params, prompt)
    if not single:
        raise ValueError(f"give one prompt; {1 + len(others)} were given")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}; give 1 or more")
    positions = len(ids) + max_new_tokens - 1
    engine = Engine(params, policy, prompt_len=len(ids), max_new_tokens=max_new_tokens, mixed=False)
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
