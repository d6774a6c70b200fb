"""Log-likelihoods of continuations, predicted from what a policy kept of their contexts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from kvjax.cache import bucket
from kvjax.models import Params
from kvjax.models.sharding import get_shard
from kvjax.policies import Policy
from kvjax.runtime.engine import Engine
from kvjax.runtime.mesh import on_mesh

from .perplexity import read


@dataclasses.dataclass(frozen=True)
class Following:
    """One continuation.

    Attributes:
        logprob: natural logarithm of its probability, given its context.
        greedy: whether each of its tokens is the top-1 token.
    """

    logprob: float
    greedy: bool


def following(
    params: Params,
    policy: Policy,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch: int = 4,
    progress: Callable[[int, int], None] | None = None,
    mesh: Mesh | str | None = None,
) -> list[Following]:
    """Score continuations of contexts, both as token ids.

    The context without its last token is prefilled and compressed. The last token and the continuation are then read one by one, so
    all predictions come from the compressed cache. A context of one token is not compressed.

    Args:
        pairs: contexts and continuations, none of them empty. The result of a pair does not depend on the others.
        batch: pairs that run together.
        progress: called with the number of pairs done and in all.
        mesh: devices to run over, as for `kvjax.Engine`; pairs that run together are sharded evenly along "data".

    Raises:
        ValueError: a context or continuation is empty. The message has the index of the pair.
        PolicyError: the policy cannot work with these lengths.
    """
    for i, (context, continuation) in enumerate(pairs):
        if not (context and continuation):
            part = "continuation" if context else "context"
            raise ValueError(f"the {part} of pair {i} is empty; give at least one token of each")
    policy = policy.for_model(params.config)
    groups: dict[tuple[int, int, Any], list[int]] = {}
    for i, (context, continuation) in enumerate(pairs):
        policy.validate(len(context) + bucket(len(continuation)))
        rotation = params.config.resolve_ropes(len(context) + len(continuation))  # LongRoPE has two
        groups.setdefault((bucket(len(context) - 1), bucket(len(continuation)), rotation), []).append(i)
    found: dict[int, Following] = {}
    params, mesh = on_mesh(params, mesh, policy)
    data = get_shard(mesh, params.config).data
    for (_, new_tokens, _), group in groups.items():
        rows = -(-min(batch, len(group)) // data) * data
        for at in range(0, len(group), rows):
            chosen = group[at : at + rows]
            # Padded, so that all batches of a group share one compiled program.
            padded = [pairs[i] for i in [*chosen, *chosen[-1:] * (rows - len(chosen))]]
            found |= dict(zip(chosen, _score(params, policy, padded, new_tokens, mesh), strict=False))
            if progress is not None:
                progress(len(found), len(pairs))
    return [found[i] for i in range(len(pairs))]


def _score(params: Params, policy: Policy, pairs: Sequence[Any], new_tokens: int, mesh: Mesh | None) -> list[Following]:
    """Score one batch, whose continuations have up to `new_tokens` tokens."""
    before = np.asarray([len(context) - 1 for context, _ in pairs])
    longest = max(len(context) + len(continuation) for context, continuation in pairs)
    engine = Engine(
        params,
        policy,
        batch=len(pairs),
        prompt_len=int(before.max()),
        max_new_tokens=new_tokens,
        max_total_tokens=longest if params.config.rope_changes_after else None,
        mesh=mesh,
    )
    state = engine.prefill([context[:-1] for context, _ in pairs])[0] if before.max() else engine.begin()
    texts = [[context[-1], *continuation] for context, continuation in pairs]
    tokens = np.zeros((len(pairs), max(map(len, texts))), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    scores, best = read(engine, state.caches, tokens, 0, shift=before)
    results = []
    for text, logprobs, top in zip(texts, scores, best, strict=True):
        size = len(text) - 1
        total = float(np.sum(logprobs[:size], dtype=np.float64))
        results.append(Following(total, top[:size].tolist() == text[1:]))
    return results
