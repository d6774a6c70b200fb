"""Quality loss of a compressed prompt: perplexity of the text that follows it."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Int

from kvjax import Engine
from kvjax.evals import Perplexity
from kvjax.evals.perplexity import read
from kvjax.models import Params
from kvjax.policies import Policy


@dataclasses.dataclass(frozen=True)
class Continuation:
    """How a policy predicted the rest of one text.

    Attributes:
        scores: log-probabilities of the text's own tokens, and bytes of the cache they were predicted from.
        predicted: the top-1 token at each of these places.
    """

    scores: Perplexity
    predicted: Int[np.ndarray, " S"]

    def agreement(self, other: "Continuation") -> float:
        """Share of places at which both find the same token most probable."""
        return float(np.mean(self.predicted == other.predicted))


def continuation(
    params: Params,
    texts: Sequence[Sequence[int]],
    prompt_tokens: int,
    policy: str | Policy,
    budget: int | float | None = None,
    prefill_block: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Continuation]:
    """Prefill the first tokens of some texts under a policy, then read the rest one by one, as they stand.

    The token right after a prompt is not scored: a prompt is read with exact attention, so all policies predict it alike. What
    is scored are the predictions after it, made from compressed caches.

    Args:
        texts: token ids, all of one length; one batch.
        prompt_tokens: tokens of each text that are its prompt.
        budget: as for `generate`, where a fraction is one of the whole text.
        prefill_block: tokens of a block, for chunked prefill.
        progress: called with tokens read after the prompt, and in all.

    Returns:
        One `Continuation` per text, each of its length - prompt_tokens - 1 predictions.

    Raises:
        ValueError: there is no text, the lengths differ, or less than one token of prompt or two of continuation are left.
        PolicyError: the policy is unknown or cannot work with this budget.
    """
    lengths = sorted({len(text) for text in texts})
    if len(lengths) != 1:
        raise ValueError(f"texts of {lengths or 'no'} tokens; give texts of one length, at least one")
    if not 1 <= prompt_tokens <= lengths[0] - 2:
        raise ValueError(
            f"prompt_tokens={prompt_tokens} of texts of {lengths[0]}; give 1 to {lengths[0] - 2}, so that two or more follow"
        )
    tokens = np.asarray(texts, np.int32)
    rows = len(tokens)
    new = lengths[0] - prompt_tokens
    engine = Engine(
        params, policy, budget, batch=rows, prompt_len=prompt_tokens, max_new_tokens=new, block=prefill_block
    )
    state, _ = engine.prefill([text[:prompt_tokens] for text in texts])
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.caches)) // rows
    logprobs, predicted = read(engine, state.caches, tokens, prompt_tokens, progress)
    return [Continuation(Perplexity(row, cache_bytes), best) for row, best in zip(logprobs, predicted, strict=True)]
