"""TreeKV: evictions that cycle through the cache from old to new, leaving it sparse on the left and dense on the right."""

import dataclasses
from functools import partial
from typing import ClassVar, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, Slots
from kvjax.pallas_kernels import Ranked, exceeds, tree_eviction, window_scores

from .base import Carry, Memory, Policy, PolicyError, Stage, budget_rows, budget_tokens, check_fields, rotated
from .registry import register


@flax.struct.dataclass
class Tree:
    """A TreeKV cache: [sinks | tree | recent], in order of rank. B rows, K KV heads, C slots.

    Attributes:
        slots: unrotated keys, and values.
        rank: place of a slot's token among those kept, 0 for the oldest; C where free.
        score: S, attention mass that a token has received since it was first attended to.
        steps: C in the paper, the number of queries that S sums over.
        count: tokens that are kept.
        scope: left end of the eviction scope, counted from the first token of the tree.
        tree, budget: tokens in the tree region and in all, of each row.
    """

    slots: Slots
    rank: Int[Array, "B K C"]
    score: Float[Array, "B K C"]
    steps: Float[Array, "B K C"]
    count: Int[Array, "B K"]
    scope: Int[Array, "B K"]
    tree: Int[Array, " B"]
    budget: Int[Array, " B"]


@register
@dataclasses.dataclass(frozen=True)
class TreeKV(Policy):
    """Evict one of two neighbours, the less attended, and move on to the next pair (He et al. 2025, Algorithm 1).

    The cache has three regions: sinks and recent tokens that stay, and between them the tree, into which a token passes when it
    leaves the recent window. Whenever the tree holds one token too many, the one with the lower average attention of the pair
    {scope, scope + 1} goes, and the scope moves one to the right, around the tree. Positions are reassigned by place in the
    cache (section 4.1, Position Encoding), so sequences far beyond the trained window work.

    A prompt is compressed the same way in blocks of tokens (section 4.2), scored by the queries of its last block; those
    scores are where the averages of decoding start from.

    Attributes:
        budget: slots in all: a number of tokens, or a fraction of prompt + new tokens.
        sinks: first tokens that are never evicted.
        recent: latest tokens that are never evicted; by default half of the budget less the sinks, which is the paper's
            1024 = 4 sinks + 512 tree + 508 recent. `sinks=0, recent=0` is the bare Algorithm 1.
        block: tokens in a prompt block, and queries in the observation window. Blocks are smaller where four of this size
            would not fit in the tree (the paper's tree holds 16 and more).
        keep: "score", or "left" for the ablation of section 5.4 that ignores attention and keeps the older of the two.
        cycle: "text" moves the scope 1, 2, 3, … as the paper's text and Figure 3 do; "printed" follows the formula printed in
            Algorithm 1, line 16, which for an even tree skips every second place.
    """

    name: ClassVar[str] = "treekv"
    paper: ClassVar[str] = "He et al. 2025, TreeKV: Smooth Key-Value Cache Compression with Tree Structures"
    keeps: ClassVar[str] = "sinks, recent tokens, and ever fewer of the older ones, by average attention"
    memory: ClassVar[Memory] = "freed"
    stage: ClassVar[Stage] = "both"
    positions: ClassVar[Literal["original", "cache"]] = "cache"

    budget: int | float = 1024
    sinks: int = 4
    recent: int | None = None
    block: int = 32
    keep: Literal["score", "left"] = "score"
    cycle: Literal["text", "printed"] = "text"

    def __post_init__(self) -> None:
        check_fields(self, sinks=0, recent=0, block=1)
        if isinstance(self.budget, int):
            self.check(0)

    def check(self, tokens: int) -> None:
        budget = budget_tokens(self.budget, tokens)
        least = self.sinks + (self.recent or 0) + 1
        if budget < least:
            raise PolicyError(
                f"{self.name}: a budget of {self.budget} gives {budget} slots, but {self.sinks} sinks, {self.recent or 0} recent "
                f"tokens and a tree of at least one need {least}; raise budget, or lower sinks or recent"
            )

    def capacity(self, spec: LayerSpec) -> int:
        return cache.round_slots(min(budget_tokens(self.budget, spec.max_tokens), spec.max_tokens) + 1)

    def init(self, spec: LayerSpec) -> Tree:
        slots = cache.empty(spec, self.capacity(spec))
        zeros = jnp.zeros(slots.pos.shape, jnp.float32)
        return self._tree(slots, zeros, zeros, jnp.full((spec.batch,), spec.new_tokens, jnp.int32))

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[Tree, Carry]:
        observed = window_scores(
            rotated(spec, q), rotated(spec, k), lengths, window=self.block, scale=spec.scale, sliding_window=spec.window
        )
        tokens = lengths + spec.new_tokens
        keep = self._keep(observed, lengths, *self._regions(tokens))
        slots, index = cache.select(spec, self.capacity(spec), k, v, keep, lengths)
        observers = jnp.minimum(lengths, self.block).astype(jnp.float32)[:, None, None]
        steps = jnp.where(slots.live, observers, 0.0)
        score = jnp.where(slots.live, jnp.take_along_axis(observed, index, axis=-1) * observers, 0.0)
        return self._tree(slots, score, steps, tokens), carry

    def append(
        self, spec: LayerSpec, state: Tree, k: Float[Array, "B K H"], v: Float[Array, "B K H"], pos: Int[Array, " B"]
    ) -> Tree:
        beside = (state.rank, state.count), (state.score, 0.0), (state.steps, 0.0)
        slots, (rank, score, steps) = cache.insert_with(state.slots, k, v, pos, beside)
        return dataclasses.replace(state, slots=slots, rank=rank, score=score, steps=steps, count=state.count + 1)

    def attend(
        self, spec: LayerSpec, state: Tree, q: Float[Array, "B N H"], pos: Int[Array, " B"], carry: Carry
    ) -> tuple[Float[Array, "B N H"], Tree, Carry]:
        slots = state.slots
        out, probs = cache.attend(spec, slots, q, pos, place=(state.rank, state.count - 1), probs=True)
        assert probs is not None
        state = dataclasses.replace(
            state,
            score=state.score + jnp.where(slots.live, probs, 0.0),
            steps=state.steps + slots.live.astype(jnp.float32),
        )
        return out, state, carry

    def compress(self, spec: LayerSpec, state: Tree) -> Tree:
        slots = state.slots
        evicted = tree_eviction(
            Ranked(state.rank, slots.pos, slots.weight, state.count, slots.next, state.scope),
            state.score,
            state.steps,
            state.tree,
            state.budget,
            sinks=self.sinks,
            stride=self._stride,
            scored=self.keep == "score",
        )
        slots = dataclasses.replace(slots, pos=evicted.pos, weight=evicted.weight, next=evicted.next)
        return dataclasses.replace(state, slots=slots, rank=evicted.rank, count=evicted.kept, scope=evicted.scope)

    def _tree(self, slots: Slots, score: Array, steps: Array, tokens: Int[Array, " B"]) -> Tree:
        """A state whose slots are filled in order of position."""
        _, tree, budget = self._regions(tokens)
        places = jnp.arange(slots.pos.shape[-1], dtype=jnp.int32)
        rank = jnp.where(slots.live, places, slots.pos.shape[-1])
        return Tree(slots, rank, score, steps, slots.count, jnp.zeros_like(slots.next), tree, budget)

    def _regions(self, tokens: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"]]:
        """Sizes in tokens of the recent region, the tree, and the whole budget."""
        budget = budget_rows(self.budget, tokens)
        recent = jnp.maximum(budget // 2 - self.sinks, 0) if self.recent is None else jnp.full_like(budget, self.recent)
        return recent, budget - self.sinks - recent, budget

    @partial(jax.jit, static_argnums=0)  # traced once for all layers: 1 s less for a model of 30
    def _keep(
        self, observed: Float[Array, "B K T"], lengths: Int[Array, " B"], recent: Array, tree: Array, budget: Array
    ) -> Bool[Array, "B K T"]:
        """Which prompt tokens survive: sinks, recent ones (the observation block at least), and the blocks the tree keeps.

        Blocks are counted from the right end of what lies between, so the first one may be partial.
        """
        recent = jnp.maximum(recent, jnp.minimum(self.block, tree + recent))
        tree = budget - self.sinks - recent
        size = jnp.clip(tree // 4, 1, self.block)
        middle = jnp.maximum(lengths - self.sinks - recent, 0)
        blocks = -(-middle // size)
        pos = jnp.arange(observed.shape[-1], dtype=jnp.int32)
        start = (lengths - recent - blocks * size)[:, None]  # of the first block, were it whole
        block = jnp.where(pos < self.sinks, -1, (pos - start) // size[:, None])  # [B, T]; < 0 sinks, >= blocks recent
        inside = (block >= 0) & (block < blocks[:, None])

        count = observed.shape[-1]
        kept = jax.vmap(self._tournament)(
            self._block_scores(observed, jnp.where(inside, block, count), count), tree // size, blocks
        )
        survives = jnp.take_along_axis(kept, jnp.where(inside, block, 0)[:, None], axis=-1)
        return jnp.where(inside[:, None], survives, True) | (lengths <= budget)[:, None, None]

    def _block_scores(
        self, observed: Float[Array, "B K T"], block: Int[Array, "B T"], count: int
    ) -> Float[Array, "B K M"]:
        """Mean observed attention of the tokens of each block; what is numbered `count` belongs to none."""

        def mean(row: Float[Array, "K T"], block: Int[Array, " T"]) -> Float[Array, "K M"]:
            total = jax.ops.segment_sum(row.T, block, num_segments=count + 1)[:count]
            size = jax.ops.segment_sum(jnp.ones_like(block), block, num_segments=count + 1)[:count]
            return (total / jnp.maximum(size, 1).astype(jnp.float32)[:, None]).T

        return jax.vmap(mean)(observed, block)

    def _tournament(
        self, scores: Float[Array, "K M"], capacity: Int[Array, ""], blocks: Int[Array, ""]
    ) -> Bool[Array, "K M"]:
        """Which of the first `blocks` blocks are left when all have passed through a tree of `capacity` blocks."""
        step = self._round if self.cycle == "text" else self._single
        size = scores.shape[-1]
        order = jnp.arange(size, dtype=jnp.int32)

        def play(scores: Float[Array, " M"]) -> Bool[Array, " M"]:
            def cond(carry: tuple[Array, Array, Array]) -> Array:
                return (carry[1] < blocks) & (capacity > 0)

            kept, _, _ = jax.lax.while_loop(
                cond, lambda carry: step(scores, capacity, blocks, *carry), (order, capacity, jnp.zeros((), jnp.int32))
            )
            survivors = jnp.where(order < jnp.minimum(capacity, blocks), kept, size)
            return jnp.zeros(size, bool).at[survivors].set(True, mode="drop")

        return jax.vmap(play)(scores)

    def _round(
        self, scores: Array, capacity: Array, blocks: Array, kept: Int[Array, " M"], arrived: Array, scope: Array
    ) -> tuple[Array, Array, Array]:
        """One full turn of the scope. With static scores, `capacity` single evictions are one round of a pairwise tournament.

        The list of `capacity` kept blocks and as many arrivals is paired off (0, 1), (2, 3), …; each pair keeps its better
        block. If only j arrivals are left, the first j pairs play and the rest of the list stays as it is.
        """
        places = jnp.arange(kept.shape[0], dtype=jnp.int32)
        arrivals = jnp.minimum(capacity, blocks - arrived)

        def listed(i: Array) -> Array:
            return jnp.where(i < capacity, jnp.take(kept, i, mode="clip"), arrived + i - capacity)

        a, b = listed(2 * places), listed(2 * places + 1)
        score = partial(jnp.take, scores, mode="clip")
        winner = jnp.where(self._keep_left(score(a), score(b)), a, b)
        return jnp.where(places < arrivals, winner, listed(places + arrivals)), arrived + arrivals, scope

    def _single(
        self, scores: Array, capacity: Array, blocks: Array, kept: Int[Array, " M"], arrived: Array, scope: Array
    ) -> tuple[Array, Array, Array]:
        """One eviction, for a scope that does not simply go round."""
        places = jnp.arange(kept.shape[0], dtype=jnp.int32)

        def listed(i: Array) -> Array:
            return jnp.where(i < capacity, jnp.take(kept, i, mode="clip"), arrived)

        score = partial(jnp.take, scores, mode="clip")
        victim = scope + self._keep_left(score(listed(scope)), score(listed(scope + 1))).astype(jnp.int32)
        return listed(places + (places >= victim).astype(jnp.int32)), arrived + 1, self._next(scope, capacity)

    def _keep_left(self, left: Array, right: Array) -> Bool[Array, "..."]:
        """Whether the older of two neighbours stays (Algorithm 1, line 11: on a tie it goes)."""
        return exceeds(left, right) if self.keep == "score" else jnp.ones_like(left, bool)

    def _next(self, scope: Int[Array, "..."], tree: Int[Array, "..."]) -> Int[Array, "..."]:
        """The scope after an eviction, counted from 0 (Algorithm 1, line 16)."""
        return (scope + self._stride) % jnp.maximum(tree, 1)

    @property
    def _stride(self) -> int:
        return 1 if self.cycle == "text" else 2
