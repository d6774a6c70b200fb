"""Chelsea: clusters of similar keys, each kept as one centroid that attends like as many tokens."""

import dataclasses
from fractions import Fraction
from functools import lru_cache, partial
from typing import ClassVar, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, TokenBlock
from kvjax.config import ModelConfig, Rope
from kvjax.pallas_kernels import Clusters, chunk_similarity, copy_clusters
from kvjax.pallas_kernels.gradients import without_gradient
from kvjax.pallas_kernels.kmeans import Nearest

from .base import Policy
from .budget import budget_rows, budget_tokens, check_least
from .families import soft_matching
from .fields import check_fields
from .full import Full
from .info import PolicyError, PolicyInfo
from .layer import CacheLayer, Carry
from .profile import HeadProfile, find
from .registry import register
from .transforms.by_head import by_head
from .transforms.offload import offloaded

SCHEDULES = {"llama-2": (0.45, 0.05, 3), "llama-3": (0.35, 0.1, 2), "qwen": (0.2, 0.1, 2), "constant": (0.25, 0.0, 0)}
"""r_init, alpha and number of decreasing steps by model family (appendix C.2). "constant": the needle test."""

OUTLIER, CLUSTERED = "outlier", "clustered"
"""Labels of heads in a profile, see `Chelsea`."""

MAX_PLANNED_STEPS = 32
"""Maximum number of steps that run without a check whether rows need them."""

_UNIT = 10_000
"""Ratios are integers in this unit, so that the number of merges is exact."""


@flax.struct.dataclass
class Centroids:
    """A Chelsea cache. B rows.

    Attributes:
        cache: rotated keys, and values, in order. All heads of a row fill equally many slots.
        steps: i, clustering steps of each row so far, for the ratio schedule.
        budget: B, slots that clustering leaves.
    """

    cache: LayerCache
    steps: Int[Array, " B"]
    budget: Int[Array, " B"]


@flax.struct.dataclass
class Loop:
    """Clustering between two steps. A step reads one buffer and writes the other, and the buffers alternate. B rows.

    Attributes:
        tokens: all tokens, including those that are never merged.
        scratch: buffer of the same size to write to.
        size: tokens of each row.
        steps: clustering steps of each row so far.
    """

    tokens: Clusters
    scratch: Clusters
    size: Int[Array, " B"]
    steps: Int[Array, " B"]


@register
@dataclasses.dataclass(frozen=True)
class Chelsea(Policy):
    """Merge tokens with similar keys into centroids (Hu et al. 2025, Algorithm 1 and section 5).

    When a row has `every` tokens more than its budget, the tokens between sinks and recent tokens go through Chunked
    Soft Matching (`kvjax.policies.families.soft_matching`). Steps repeat until exactly the budget is left. A step
    removes a share r = max(r_min, r_init - alpha · min(steps, i)) of them, at least one token and at most the excess. i
    counts all steps of the row. A cluster of n tokens attends like n tokens: log n is added to its logit.

    Cosines of keys are compared in multiples of 2^-14 (6e-5, `kvjax.pallas_kernels.cluster_merging.RESOLUTION`). Among
    keys that are equally similar, the first are merged, so rounding does not decide. Clustering has no gradient. In
    chunked prefill, rows that are full after a block are clustered.

    Outlier heads, whose keys are less similar, keep everything if the model has a profile that names them. In return,
    the other heads get a smaller budget. With a budget R and a share f of outlier heads, it is (R - f) / (1 - f)
    (appendix C.2). This holds for fractional budgets. With a budget in tokens, which no head may exceed, every head is
    clustered.

    Attributes:
        budget: B, slots in total: a number of tokens, or a fraction of prompt + new tokens.
        sinks: n₁, first tokens, never merged.
        recent: n₂, latest tokens, never merged: a number, or a fraction of the budget below 1. If sinks and recent
            tokens would fill a row's budget, at most a quarter of it are sinks and at most half recent tokens.
        chunk: c, tokens among which similar ones are searched. None for all of them (the paper's ablation).
        every: g, tokens above the budget at which clustering starts.
        schedule: a ratio schedule of the paper: "llama-2", "llama-3", "qwen", or "constant".
        r_init, alpha, steps: parameters of a custom schedule. None takes the value of `schedule`.
        r_min: minimum ratio. The paper only requires that it exceed 0.
        match: what makes two tokens similar: the cosine of their "rotated" keys (the paper's), that of their
            "unrotated" keys, or the distance of their "positions", whatever the keys are.
        merge: keys whose mean becomes the key of a centroid: "rotated" (the paper's) or "unrotated". The mean of
            unrotated keys is rotated to the newest token's position. Each clustering then rotates all keys back and
            forth, and rounds them to the cache's dtype.
        partition: how chunks are divided, see `kvjax.policies.families.soft_matching.Partition`. Other ways than
            "alternating" are for comparison. Clusters are then ordered by their newest tokens.
        outliers: whether outlier heads keep everything.
        offload_outliers: whether outlier heads keep their tokens in host memory (see `offloaded`).
        profile: a profile of outlier heads, or its path. None uses the one that comes with kvjax, if there is one.

    Example:
        >>> policy = kvjax.Chelsea(budget=0.25, every=8)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('chelsea:budget=0.25,every=8', 0.29)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="chelsea",
        paper="Hu et al. 2025, Efficient Long-Context LLM Inference via KV Cache Clustering",
        summary="sinks, recent tokens, and centroids of older tokens with similar keys",
        memory="freed",
        stage="both",
        merges=True,
    )

    budget: int | float = 0.2
    sinks: int = 16
    recent: int | float = 64
    chunk: int | None = 256
    every: int = 64
    schedule: Literal["llama-2", "llama-3", "qwen", "constant"] = "llama-3"
    r_init: float | None = None
    alpha: float | None = None
    steps: int | None = None
    r_min: float = 0.05
    match: Literal["rotated", "unrotated", "positions"] = "rotated"
    merge: Literal["rotated", "unrotated"] = "rotated"
    partition: soft_matching.Partition = "alternating"
    outliers: bool = True
    offload_outliers: bool = False
    profile: HeadProfile | str | None = None

    def __post_init__(self) -> None:
        check_fields(self, sinks=0, recent=0, chunk=2, every=1, alpha=0, steps=0, r_min=0)
        if isinstance(self.recent, float) and self.recent >= 1:
            raise PolicyError(
                f"{self.info.name}: recent={self.recent} is not valid. Give a whole number of tokens (64), or a fraction of the budget "
                "below 1 (0.5)."
            )
        if min(self.ratios) <= 0 or max(self.ratios) > _UNIT // 2:
            raise PolicyError(
                f"{self.info.name}: ratios from {self.ratios[0] / _UNIT} to {self.ratios[-1] / _UNIT} are not valid, because a step "
                "removes more than 0 and at most 0.5 of the tokens. Raise r_min, or lower r_init."
            )

    def bind(self, config: ModelConfig) -> Policy:
        if not self.outliers or isinstance(self.budget, int):
            return self
        profile = find(self.info.name, config, self.profile)
        if profile is None or not profile.heads(OUTLIER):
            return self
        share = Fraction(len(profile.heads(OUTLIER)), config.num_layers * config.num_kv_heads)
        if self.budget <= share:
            raise PolicyError(
                f"{self.info.name}: budget={self.budget} is too small, because outlier heads, which keep everything, are "
                f"{float(share):.3f} of all heads. Raise budget, or set outliers to False."
            )
        budget = float((Fraction(self.budget).limit_denominator(_UNIT) - share) / (1 - share))
        clustered = dataclasses.replace(self, budget=budget, outliers=False, offload_outliers=False, profile=None)
        full = offloaded(Full()) if self.offload_outliers else Full()
        return by_head({OUTLIER: full, CLUSTERED: clustered}, profile.labels).bind(config)

    def validate(self, tokens: int) -> None:
        check_least(self.info.name, self.budget, tokens, 1, f"but {tokens} tokens need at least one. Raise budget.")

    def layer(self, spec: LayerSpec) -> "ChelseaLayer":
        return ChelseaLayer(self, spec)

    def max_budget(self, spec: LayerSpec) -> int:
        """B of a row with the maximum number of tokens."""
        return budget_tokens(self.budget, spec.max_tokens, 1)

    def row_budgets(self, tokens: Int[Array, " B"]) -> Int[Array, " B"]:
        """B of each row, at least 1."""
        return budget_rows(self.budget, tokens, 1)

    def is_full(self, state: Centroids) -> Bool[Array, " B"]:
        """Rows that are due for clustering."""
        return state.cache.next[:, 0] >= state.budget + self.every

    @property
    def ratios(self) -> tuple[int, ...]:
        """r at steps 0, 1, … until it no longer changes, in units of 1 / `_UNIT`."""
        r_init, alpha, steps = SCHEDULES[self.schedule]
        r_init = r_init if self.r_init is None else self.r_init
        alpha = alpha if self.alpha is None else self.alpha
        steps = steps if self.steps is None else self.steps
        return tuple(round(max(r_init - alpha * i, self.r_min) * _UNIT) for i in range(steps + 1))

    @partial(jax.jit, static_argnums=(0, 1, 2, 3))
    def cluster(self, rope: Rope, capacity: int, usual: int, state: Centroids) -> Centroids:
        """Cluster the rows that are full to exactly their budgets, in `capacity` slots. Traced once per layer shape.

        Args:
            rope: the layer's rope.
            capacity: slots of the result.
            usual: number of steps that usually suffice. They run without a check. Only then the loop checks whether
                rows need more, for which the host waits for the device. (For a layer of 32768 tokens and 8 heads on an
                H200, a check after every other step took 0.5 ms of 2 ms.)
            state: the layer's state.
        """
        endless = (
            "clustering loops until the budget is reached, which has no gradient. Use a policy that has one, such as treekv or "
            "snapkv."
        )
        k, v = without_gradient((state.cache.k, state.cache.v), PolicyError(f"{self.info.name}: {endless}"))
        held = dataclasses.replace(state.cache, k=k, v=v)
        places = held.pos.shape[-1]
        chunk = self._chunk(places)
        sinks, recent = self._regions(state.budget)
        size = held.next[:, 0]
        goal = jnp.where(self.is_full(state), state.budget, size)

        def step(loop: Loop) -> Loop:
            middle = jnp.maximum(loop.size - sinks - recent, 0)
            count = self._merges(middle, loop.steps, chunk, loop.size - goal)
            tokens = soft_matching.arranged(loop.tokens, sinks, middle, chunk, self.partition)
            edges = self._edges(rope, tokens, sinks, middle, chunk)
            merged = soft_matching.merge(tokens, sinks, loop.size - sinks, middle, count, chunk, loop.scratch, edges)
            if self.partition != "alternating":
                merged = soft_matching.in_text_order(merged, loop.size - count)
            return Loop(merged, loop.tokens, loop.size - count, loop.steps + (count > 0).astype(jnp.int32))

        def back(loop: Loop) -> Loop:
            return Loop(copy_clusters(loop.tokens, loop.size, loop.scratch), loop.tokens, loop.size, loop.steps)

        tokens = Clusters(held.k, held.v, held.pos, held.weight)
        if self.merge == "unrotated":
            tokens = _turned(rope, tokens, -tokens.pos)
        scratch = jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), tokens)
        loop = Loop(tokens, scratch, size, state.steps)
        # Two steps per iteration put tokens and scratch back into their buffers, so XLA need not copy them.
        loop = jax.lax.fori_loop(0, usual // 2, lambda _, loop: step(step(loop)), loop)
        if usual % 2:
            loop = step(loop)
        if usual % 2 and places == capacity:  # otherwise they are copied anyway
            loop = back(loop)
        loop = jax.lax.while_loop(lambda loop: jnp.any(loop.size > goal), lambda loop: back(step(loop)), loop)

        live = (jnp.arange(capacity, dtype=jnp.int32) < loop.size[:, None])[:, None]
        tokens = _turned(rope, loop.tokens, loop.tokens.pos) if self.merge == "unrotated" else loop.tokens
        k, v, pos, weight = (x[:, :, :capacity] for x in tokens)
        held = dataclasses.replace(
            held,
            k=k,
            v=v,
            pos=jnp.where(live, pos, -1),
            weight=jnp.where(live, weight, 0.0),
            next=jnp.broadcast_to(loop.size[:, None], held.next.shape),
        )
        return dataclasses.replace(state, cache=held, steps=loop.steps)

    def _edges(
        self, rope: Rope, tokens: Clusters, first: Int[Array, " B"], size: Int[Array, " B"], chunk: int
    ) -> Nearest | None:
        """Edges of a step, or None for edges by the tokens' keys as they are."""
        if self.match == "positions":
            return soft_matching.near(tokens.pos, first, size, chunk)
        if self.match == self.merge:
            return None
        turned = _turned(rope, tokens, tokens.pos if self.match == "rotated" else -tokens.pos)
        return chunk_similarity(turned.k, first, size, chunk)

    def _chunk(self, places: int) -> int:
        """c in a cache of `places` slots."""
        return places if self.chunk is None else min(self.chunk, places)

    def _regions(self, budget: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """Number of first and of latest tokens of each row that are never merged."""
        latest = (
            jnp.full_like(budget, self.recent) if isinstance(self.recent, int) else budget_rows(self.recent, budget)
        )
        fits = self.sinks + latest < budget
        sinks = jnp.where(fits, self.sinks, jnp.minimum(self.sinks, budget // 4))
        return sinks, jnp.where(fits, latest, jnp.minimum(latest, budget // 2))

    def _merges(
        self, middle: Int[Array, " B"], steps: Int[Array, " B"], chunk: int, excess: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        """M, the number of edges that the next step merges among `middle` tokens."""
        table = jnp.asarray(self.ratios, jnp.int32)
        ratio = table[jnp.minimum(steps, len(self.ratios) - 1)]
        share = middle // _UNIT * ratio + middle % _UNIT * ratio // _UNIT
        most = jnp.minimum(middle // 2, soft_matching.edges(middle, chunk))
        return jnp.minimum(jnp.minimum(jnp.maximum(share, 1), most), excess)


@dataclasses.dataclass(frozen=True)
class ChelseaLayer(CacheLayer[Chelsea]):
    """One layer of `Chelsea`."""

    @property
    def compress_reads_kv(self) -> bool:
        return True

    @property
    def max_kept(self) -> int:
        return self.policy.max_budget(self.spec) + self.policy.every - 1

    def init(self, total: Int[Array, " B"] | None = None) -> Centroids:
        tokens = self.spec.totals(total)
        empty = cache.empty(self.spec, self.capacity)
        return Centroids(empty, jnp.zeros_like(tokens), self.policy.row_budgets(tokens))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[Centroids, Carry]:
        policy, capacity, size = self.policy, self.capacity, prompt.size
        held = cache.from_prompt(self.spec, max(capacity, size), prompt)
        budgets = policy.row_budgets(prompt.total)
        state = Centroids(held, jnp.zeros_like(held.seen), budgets)
        budget = policy.max_budget(self.spec)
        if size < budget + policy.every:  # then no row is full
            return state, carry
        usual = _usual(policy, held.pos.shape[-1], size, budget, 0)
        return policy.cluster(self.spec.rope, capacity, usual, state), carry

    def append(self, state: Centroids, token: Token) -> Centroids:
        return dataclasses.replace(state, cache=cache.insert(state.cache, token)[0])

    def attend(self, state: Centroids, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], Centroids, Carry]:
        return cache.attend(self.spec, state.cache, token)[0], state, carry

    def read_block(
        self, state: Centroids, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], Centroids, Carry]:
        policy, capacity = self.policy, self.capacity
        held = cache.insert_block(cache.extended(state.cache, block.size), block)
        out = cache.attend_block(self.spec, held, block)
        places, budget = held.pos.shape[-1], policy.max_budget(self.spec)
        usual = _usual(policy, places, min(budget + block.size, places), budget, len(policy.ratios))
        return out, policy.cluster(self.spec.rope, capacity, usual, dataclasses.replace(state, cache=held)), carry

    def compress(self, state: Centroids) -> Centroids:
        policy, capacity, budget = self.policy, state.cache.pos.shape[-1], self.policy.max_budget(self.spec)
        usual = _usual(policy, capacity, budget + policy.every, budget, len(policy.ratios))
        cluster = partial(policy.cluster, self.spec.rope, capacity, usual)
        return jax.lax.cond(jnp.any(policy.is_full(state)), cluster, lambda state: state, state)

    def is_due(self, state: Centroids) -> Bool[Array, " B"]:
        return self.policy.is_full(state)


def _turned(rope: Rope, tokens: Clusters, pos: Int[Array, "B K S"]) -> Clusters:
    """Return the tokens with keys rotated by `pos` positions. The rope's amplitude is left as it is."""
    return tokens._replace(k=dataclasses.replace(rope, amplitude=1.0).rotate(tokens.k, pos))


@lru_cache(maxsize=256)
def _usual(policy: Chelsea, places: int, size: int, goal: int, steps: int) -> int:
    """Number of steps, up to `MAX_PLANNED_STEPS`, that a row of `size` tokens needs to reach `goal`.

    Args:
        policy: the policy.
        places: slots of the cache.
        size: tokens of the row.
        goal: tokens after clustering.
        steps: clustering steps of the row so far.
    """
    taken = 0

    def row(number: int) -> Int[Array, " 1"]:
        return jnp.asarray([number], jnp.int32)

    with jax.ensure_compile_time_eval():
        fixed = sum(int(part[0]) for part in policy._regions(row(goal)))
        while size > goal and taken < MAX_PLANNED_STEPS:
            middle, before = row(max(size - fixed, 0)), row(steps + taken)
            size -= int(policy._merges(middle, before, policy._chunk(places), row(size - goal))[0])
            taken += 1
    return taken
