"""Attention Matching: the most attended keys, with fitted weights and values that reproduce the prompt's attention."""

import dataclasses
import math
from typing import Any, ClassVar

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV
from kvjax.pallas_kernels import top_k
from kvjax.pallas_kernels.gradients import without_gradient

from .families.dense import DenseLayer
from .families.scoring import PromptScorer, PromptScorerLayer
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .kvzip import FIRST, THEN
from .layer import CacheLayer, Carry
from .registry import register
from .replay import Part, Replay

BLOCK = 256
"""Minimum number of queries per block. A block also has at least as many queries as there are slots."""


@register
@dataclasses.dataclass(frozen=True)
class AttentionMatching(PromptScorer):
    """Keep the most attended keys, and fit weights and values to them (Zweiger et al. 2026, by the published code).

    After prefill, the model processes the prompt again, as for `KVzip`. The queries of this pass serve as reference
    queries. All query heads of a KV head are pooled.

    1. Keys: keep those with the largest root mean square of their attention probabilities over the reference queries.
    2. Weights: each kept key counts in attention as that many tokens. Least squares fits the weights to the sums of
       exponentials over the whole prompt, with each query's exponentials divided by its largest. The weights are clipped
       to [e^-`bound`, e^`bound`] and refined by `steps` steps of projected gradient descent.
    3. Values: least squares fits them to the attention output over the whole prompt.

    This is the authors' `highest_attention_keys` with queries of a repetition, requested with KVzip's words. If there
    are more than `queries`, every second token's are used, or every third, and so on. Every head keeps equally many
    tokens. New tokens are kept in addition. Layers with a sliding window keep everything, as in the published code.

    The cost is the time of two more prefills and of the fit. Until the fit, memory has the full cache and the queries.

    Attributes:
        budget: slots for the prompt: a number of tokens, or a fraction of prompt + new tokens. A prompt within it is
            kept whole.
        chunk, overlap: see `KVzip`.
        prefix: first tokens, such as a system prompt, that are kept unchanged, and neither repeated nor part of the
            fit.
        queries: maximum number of reference queries per KV head.
        steps: steps of projected gradient descent.
        bound: maximum absolute logarithm of a weight.

    Example:
        >>> policy = kvjax.AttentionMatching(budget=64)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('attention_matching:budget=64', 0.43)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="attention_matching",
        paper="Zweiger et al. 2026, Fast KV Compaction via Attention Matching",
        summary="the prompt's most attended keys, with weights and values by which they stand for all of it, and all new tokens",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
        refits_values=True,
    )

    keeps_highest: ClassVar[bool] = False
    scores_whole_prompts: ClassVar[bool] = True

    chunk: int = 2000
    overlap: int = 8
    prefix: int = 0
    queries: int = 50_000
    steps: int = 2
    bound: float = 3.0

    def __post_init__(self) -> None:
        check_fields(self, chunk=1, overlap=0, prefix=0, queries=1, steps=0, bound=0)

    @property
    def replay(self) -> "ReferenceQueries":
        """How the prompt is read again."""
        return ReferenceQueries(self.chunk, min(self.overlap, self.chunk), self.prefix, FIRST, THEN, most=self.queries)

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0 + self.prefix, budget * 0

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        if spec.window is not None:
            return DenseLayer(self, spec)
        layer = AttentionMatchingLayer(self, spec)
        if layer.replays and spec.kv_heads is not None:
            raise PolicyError(
                f"{self.info.name}: the policy reads a prompt again for all heads of a layer together. Give it whole layers, with by_layer."
            )
        return layer


@dataclasses.dataclass(frozen=True)
class ReferenceQueries(Replay):
    """The replay of `AttentionMatching`: observes rotated queries [B, M, N, H] of each part, and a mask [B, M].

    Attributes:
        most: maximum number of queries of all parts together, per KV head.
    """

    most: int = 50_000

    def observe(self, spec: LayerSpec, part: Part) -> tuple[Float[Array, "B M N H"], Bool[Array, "B M"]]:
        rows, size = part.block.mask, part.block.size
        pooled = self.parts(spec.prompt_len) * size * spec.num_heads // spec.num_kv_heads
        every = max(-(-pooled // self.most), 1)
        q = jnp.where(rows[..., None, None], jax.lax.stop_gradient(part.block.q_rotated), 0).astype(part.held.k.dtype)
        return q[:, ::every], rows[:, ::every]


@dataclasses.dataclass(frozen=True)
class AttentionMatchingLayer(PromptScorerLayer[AttentionMatching]):
    """One layer of `AttentionMatching`."""

    @property
    def replays(self) -> tuple[Replay, ...]:
        return (self.policy.replay,) if self.policy.max_budget(self.spec) < self.spec.prompt_len else ()

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[LayerCache, Carry]:
        policy, spec = self.policy, self.spec
        if not self.replays:  # no row exceeds its budget
            return cache.from_prompt(spec, self.capacity, prompt), carry
        found = policy.replay.found(carry)
        if found is None:
            raise PolicyError(
                f"{policy.info.name}: the prompt was not read a second time. Use kvjax.Engine, or kvjax.policies.prefill_alone for a single layer."
            )
        q, asked = found[spec.layer]
        q = einops.rearrange(q, "j b m (k g) h -> b k (j m g) h", k=spec.num_kv_heads)
        asked = jnp.repeat(einops.rearrange(asked, "j b m -> b (j m)"), spec.num_heads // spec.num_kv_heads, axis=-1)
        none = "the fit of weights and values has no gradient. Use a policy that has one, such as snapkv."
        k, v = without_gradient((prompt.k_rotated, prompt.v), PolicyError(f"{policy.info.name}: {none}"))
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

        budget = policy.row_budgets(spec, prompt.seen, prompt.total)
        size = max(policy.max_budget(spec) - policy.prefix, 1)
        pos = jnp.broadcast_to(prompt.pos, k.shape[:3])
        inside, whole = pos >= policy.prefix, prompt.seen <= budget
        count = jnp.maximum(budget - policy.prefix, 0)

        def one(head: Int[Array, ""]) -> tuple[Array, Array, Array]:
            row, own = head // k.shape[1], head % k.shape[1]
            given = q[row, own], asked[row], k[row, own], v[row, own], inside[row, own], count[row]
            return matched(*given, size, spec.scale, policy.steps, policy.bound)

        # One head at a time: on CPU, batched factorisations that run concurrently can deadlock.
        found = jax.lax.map(one, jnp.arange(k.shape[0] * k.shape[1], dtype=jnp.int32))
        best, weight, values = (x.reshape(*k.shape[:2], *x.shape[1:]) for x in found)

        keep = jnp.where(whole[:, None, None], pos >= 0, best | (pos >= 0) & ~inside)
        kept, _ = cache.keep(spec, self.capacity, prompt, keep)
        fitted = kept.live & (kept.pos >= policy.prefix) & ~whole[:, None, None]
        place = jnp.clip(jnp.arange(self.capacity, dtype=jnp.int32) - policy.prefix, 0, size - 1)
        weight, values = jnp.take(weight, place, axis=2), jnp.take(values, place, axis=2).astype(kept.v.dtype)
        return dataclasses.replace(
            kept, weight=jnp.where(fitted, weight, kept.weight), v=jnp.where(fitted[..., None], values, kept.v)
        ), carry


def matched(
    queries: Float[Array, "M H"],
    asked: Bool[Array, " M"],
    keys: Float[Array, "T H"],
    values: Float[Array, "T D"],
    inside: Bool[Array, " T"],
    count: Int[Array, ""],
    size: int,
    scale: float,
    steps: int = 2,
    bound: float = 3.0,
) -> tuple[Bool[Array, " T"], Float[Array, " S"], Float[Array, "S D"]]:
    """Select keys of one KV head, and fit their weights and values. See `AttentionMatching`.

    Computes in float32. The fit never holds all queries at once: a triangular factor of all rows so far, with the
    right-hand side as its last columns, is updated block by block.

    Args:
        queries: rotated reference queries of all query heads of this KV head.
        asked: which queries are valid.
        keys, values: of the prompt. Keys are rotated.
        inside: which tokens take part in the selection and the fit.
        count: number of keys to keep, at most `size`.
        size: S.
        scale: factor on attention logits.
        steps, bound: see `AttentionMatching`.

    Returns:
        Which keys are kept, and their weights and values, in order, in the first places.
    """
    dtype = jnp.float32
    keys, values = (jnp.where(inside[:, None], x.astype(dtype), 0) for x in (keys, values))
    block = min(max(BLOCK, size), max(len(queries), 1))
    padding = -len(queries) % block
    queries = jnp.pad(queries.astype(dtype), ((0, padding), (0, 0))).reshape(-1, block, queries.shape[-1])
    there = jnp.pad(asked, (0, padding)).reshape(-1, block)

    def exponentials(i: Int[Array, ""]) -> Float[Array, "M T"]:
        """Exponentials of one block of queries, divided by each query's largest. Zeros for invalid queries."""
        logits = jnp.einsum("mh,th->mt", queries[i], keys, precision="highest") * scale
        logits = jnp.where(inside, logits, -jnp.inf)
        largest = jnp.max(logits, axis=-1, keepdims=True)
        found = jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0))
        return jnp.where(there[i][:, None], found, 0)

    def squares(i: Int[Array, ""], total: Float[Array, " T"]) -> Float[Array, " T"]:
        return total + jnp.sum(_shares(exponentials(i)) ** 2, axis=0)

    mean = jax.lax.fori_loop(0, len(queries), squares, jnp.zeros(keys.shape[:1], dtype)) / jnp.maximum(
        jnp.sum(asked), 1
    ).astype(dtype)
    scores = jnp.where(inside, jnp.sqrt(mean), -jnp.inf)
    best = top_k(scores[None], count[None])[0] & inside
    index, live = cache.compact_indices(best, size)

    def kept(exponentials: Float[Array, "M T"]) -> Float[Array, "M S"]:
        return jnp.where(live, exponentials[:, index], 0)

    def masses(i: Int[Array, ""]) -> Float[Array, "M _"]:
        every = exponentials(i)
        return jnp.concatenate([kept(every), jnp.sum(every, axis=-1, keepdims=True)], axis=1)

    high = math.exp(bound)
    factor, wanted = _factors(masses, len(queries), size, 1, dtype)
    rows = jnp.sum(asked)
    weight, largest = _least_squares(factor, wanted, rows)
    weight = jnp.clip(weight[:, 0], 1 / high, high)
    for _ in range(steps):
        slope = factor.T @ (factor @ weight - wanted[:, 0])
        weight = jnp.clip(weight - slope / jnp.maximum(largest**2, jnp.finfo(dtype).tiny), 1 / high, high)

    def outputs(i: Int[Array, ""]) -> Float[Array, "M _"]:
        every = exponentials(i)
        attended = jnp.einsum("mt,th->mh", _shares(every), values, precision="highest")
        return jnp.concatenate([_shares(kept(every) * weight), attended], axis=1)

    fitted, _ = _least_squares(*_factors(outputs, len(queries), size, values.shape[1], dtype), rows)
    return best, weight, fitted


def _shares(x: Float[Array, "M T"]) -> Float[Array, "M T"]:
    """Rows, normalised to sum to 1. Zero rows stay zero."""
    return x / jnp.maximum(jnp.sum(x, axis=-1, keepdims=True), jnp.finfo(x.dtype).tiny)


def _factors(
    rows: Any, blocks: int, size: int, more: int, dtype: Any
) -> tuple[Float[Array, "S S"], Float[Array, "S R"]]:
    """R and Qᵀ y of a least squares problem. `rows(i)` returns block i, its right-hand sides as last columns."""
    width = size + more

    def add(i: Int[Array, ""], factor: Float[Array, "W W"]) -> Float[Array, "W W"]:
        return jnp.linalg.qr(jnp.concatenate([factor, rows(i)]), mode="r")

    factor = jax.lax.fori_loop(0, blocks, add, jnp.zeros((width, width), dtype))
    return factor[:size, :size], factor[:size, size:]


def _least_squares(
    factor: Float[Array, "S S"], wanted: Float[Array, "S R"], rows: Int[Array, ""]
) -> tuple[Float[Array, "S R"], Float[Array, ""]]:
    """Return the minimum-norm solution and the largest singular value.

    Singular values below the rounding of `rows` valid rows count as zero, as in `numpy.linalg.lstsq`. Rows of zeros, which
    invalid queries leave, do not count: they would make the fit of one prompt depend on the lengths of the others.
    """
    left, values, right = jnp.linalg.svd(factor, full_matrices=False)
    largest = jnp.max(values, initial=0)
    least = largest * jnp.finfo(factor.dtype).eps * jnp.maximum(rows, len(factor)).astype(factor.dtype)
    inverse = jnp.where(values > least, 1 / jnp.maximum(values, jnp.finfo(factor.dtype).tiny), 0)
    return right.T @ (inverse[:, None] * (left.T @ wanted)), largest
