"""Beam search: several continuations of one prompt are kept, and the rows of their caches are reordered after each step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax._util.arguments import amount
from kvjax.models import Params
from kvjax.policies import Policy
from kvjax.runtime import decoding
from kvjax.runtime import rows as programs
from kvjax.runtime.decoding import Specs
from kvjax.runtime.engine import Engine
from kvjax.runtime.generation import Reply
from kvjax.runtime.program import Program
from kvjax.runtime.prompts import PromptLike, token_ids
from kvjax.runtime.request import check_request


def beam_search(
    params: Params,
    prompt: PromptLike,
    policy: str | Policy = "full",
    budget: int | float | None = None,
    max_new_tokens: int = 128,
    *,
    beams: int = 4,
    ignore_eos: bool = False,
) -> list[Reply]:
    """The most likely continuations that beam search finds, the most likely first.

    Each step extends all beams by all tokens, and keeps the extensions with the highest log-probability, summed over
    their tokens, without a length penalty. A beam that has ended keeps its place and its sum. The search ends when all
    beams have. Each beam has a cache of its own, which the policy compresses as it does for `kvjax.generate`: with one
    beam, the result is that of greedy sampling. The rotation of LongRoPE is selected by the length of the prompt and
    `max_new_tokens` together.

    Args:
        params, prompt, policy, budget, max_new_tokens, ignore_eos: as for `kvjax.generate`, for one prompt, which is
            prefilled whole.
        beams: number of continuations, at most the vocabulary.

    Returns:
        One reply per beam. Ties are in the order of the beams before, then of the token ids.

    Raises:
        ValueError: as `kvjax.generate`, or the weights are on a mesh.
        PolicyError: as `kvjax.generate`.

    Example:
        >>> from kvjax.runtime.beam import beam_search
        >>> replies = beam_search(params, [5, 9, 2] * 16, max_new_tokens=4, beams=2)
        >>> [len(reply.tokens) for reply in replies], sum(replies[0].logprobs) >= sum(replies[1].logprobs)
        ([4, 4], True)
    """
    request, beams = check_request(params, max_new_tokens, ignore_eos=ignore_eos), amount("beams", beams)
    if beams > params.config.vocab_size:
        raise ValueError(f"beams={beams}; give at most the vocabulary, {params.config.vocab_size}")
    ids = list(token_ids(params, prompt, one=True)[0][0])
    engine = Engine(
        params, policy, budget, batch=beams, prompt_len=len(ids), max_new_tokens=request.max_new_tokens, mixed=False
    )
    if engine.shard.mesh is not None:
        raise ValueError("the weights are on a mesh; load them on one device for beam search")
    total = np.full((beams,), len(ids) + request.max_new_tokens, np.int32)
    tokens, lengths = decoding.padded([ids] * beams, engine.specs[0].prompt_len)
    reading = engine.ready(programs.read, tokens, lengths, total)()
    ends = engine.how(None, request.eos)[1]
    best = _first(reading.logits, ends)
    found: list[list[int]] = [[] for _ in range(beams)]
    sums: list[list[float]] = [[] for _ in range(beams)]
    caches, over = reading.caches, [False] * beams
    for i in range(request.max_new_tokens):
        if i:
            pos = np.full((beams,), len(ids) + i - 1, np.int32)
            caches, best = engine.ready(_STEP, caches, pos, best, ends)()
        parents, new, scores, done = (np.asarray(x).tolist() for x in dataclasses.astuple(best))
        found = [found[parent] + ([] if over[parent] else [t]) for parent, t in zip(parents, new, strict=True)]
        sums = [sums[parent] + ([] if over[parent] else [s]) for parent, s in zip(parents, scores, strict=True)]
        over = done
        if all(over):
            break
    replies = []
    for row, scores, done in zip(found, sums, over, strict=True):
        text = None if params.tokenizer is None else params.tokenizer.decode_after(ids, row)
        logprobs = np.diff(np.asarray([0.0, *scores])).tolist()
        replies.append(Reply(text, row, logprobs, "eos" if done else "length"))
    return replies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Beams:
    """The beams after a step, the most likely first.

    Attributes:
        parent: row that each beam extends.
        token: its new token.
        score: sum of its log-probabilities.
        done: whether it has ended.
    """

    parent: Int[Array, " B"]
    token: Int[Array, " B"]
    score: Float[Array, " B"]
    done: Bool[Array, " B"]


def _choose(
    logits: Float[Array, "B V"], score: Float[Array, " B"], done: Bool[Array, " B"], ends: Int[Array, " E"]
) -> _Beams:
    """The B most likely extensions of B beams. A beam that has ended is extended by one token, without a loss."""
    rows, vocabulary = logits.shape
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    nothing = jnp.where(jnp.arange(vocabulary) == 0, 0.0, -jnp.inf)
    sums = score[:, None] + jnp.where(done[:, None], nothing, logprobs)
    best, index = jax.lax.top_k(sums.reshape(-1), rows)
    parent, token = (index // vocabulary).astype(jnp.int32), (index % vocabulary).astype(jnp.int32)
    return _Beams(parent, token, best, done[parent] | jnp.isin(token, ends))


@jax.jit
def _first(logits: Float[Array, "B V"], ends: Int[Array, " E"]) -> _Beams:
    """The beams after the prompt, which all rows have processed."""
    rows = jnp.arange(logits.shape[0])
    return _choose(logits, jnp.where(rows == 0, 0.0, -jnp.inf), jnp.zeros(rows.shape, bool), ends)


def _step(
    policy: Policy,
    specs: Specs,
    params: Params,
    caches: tuple[object, ...],
    pos: Int[Array, " B"],
    beams: _Beams,
    ends: Int[Array, " E"],
) -> tuple[tuple[object, ...], _Beams]:
    caches = decoding.reordered(caches, beams.parent)
    logits, caches = decoding.step(policy, specs, params, caches, beams.token, pos)
    return caches, _choose(logits, beams.score, beams.done, ends)


_STEP = Program(_step, static=2, donate=(3,), gpu_options=decoding.gpu_options_of, canonical=decoding.of_steps)
"""`_step(policy, specs, params, caches, pos, beams, ends)`: reorder the caches, process each beam's token, and choose the next beams. The old caches are used up."""
