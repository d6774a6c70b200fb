"""TreeKV: evictions that cycle through the cache from old to new, leaving it sparse on the left and dense on the right."""

import dataclasses
from functools import partial
from typing import ClassVar, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, Prompt, Token
from kvjax.pallas_kernels import Ranked, exceeds, tree_eviction, window_scores

from .base import Carry, Layer, Policy, Traits
from .budget import budget_rows, budget_tokens
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .registry import register


@flax.struct.dataclass
class Tree:
    """A TreeKV cache: [sinks | tree | recent], in order of rank. B rows, K KV heads, C slots.

    Attributes:
        cache: unrotated keys, and values.
        rank: place of a slot's token among those kept, 0 for the oldest; C where free.
        score: S, attention mass that a token has received since it was first attended to.
        steps: C in the paper, the number of queries that S sums over.
        count: tokens that are kept.
        scope: left end of the eviction scope, counted from the first token of the tree.
        tree, budget: tokens in the tree region and in all, of each row.
    """

    cache: LayerCache
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

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="treekv",
        paper="He et al. 2025, TreeKV: Smooth Key-Value Cache Compression with Tree Structures",
        summary="sinks, recent tokens, and ever fewer of the older ones, by average attention",
        memory="freed",
        stage="both",
        positions="cache_rank",
    )

    budget: int | float = 1024
    sinks: int = 4
    recent: int | None = None
    block: int = 32
    keep: Literal["score", "left"] = "score"
    cycle: Literal["text", "printed"] = "text"

    def __post_init__(self) -> None:
        check_fields(self, sinks=0, recent=0, block=1)

    def validate(self, tokens: int) -> None:
        budget = budget_tokens(self.budget, tokens)
        least = self.sinks + (self.recent or 0) + 1
        if budget < least:
            raise PolicyError(
                f"{self.info.name}: a budget of {self.budget} gives {budget} slots, but {self.sinks} sinks, {self.recent or 0} recent "
                f"tokens and a tree of at least one need {least}; raise budget, or lower sinks or recent"
            )

    def layer(self, spec: LayerSpec) -> "TreeKVLayer":
        return TreeKVLayer(self, spec)

    def regions(self, tokens: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"]]:
        """Sizes in tokens of the recent region, the tree, and the whole budget."""
        budget = budget_rows(self.budget, tokens)
        recent = jnp.maximum(budget // 2 - self.sinks, 0) if self.recent is None else jnp.full_like(budget, self.recent)
        return recent, budget - self.sinks - recent, budget

    @partial(jax.jit, static_argnums=0)  # traced once for all layers: 1 s less for a model of 30
    def keep_mask(
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
        return (scope + self.stride) % jnp.maximum(tree, 1)

    @property
    def stride(self) -> int:
        """How far the scope moves after an eviction."""
        return 1 if self.cycle == "text" else 2


@dataclasses.dataclass(frozen=True)
class TreeKVLayer(Layer[TreeKV]):
    """One layer of a `TreeKV`."""

    traits: Traits = Traits(compression="every_step")

    @property
    def max_kept(self) -> int:
        return budget_tokens(self.policy.budget, self.spec.max_tokens)

    def init(self, total: Int[Array, " B"] | None = None) -> Tree:
        empty = cache.empty(self.spec, self.capacity)
        zeros = jnp.zeros(empty.pos.shape, jnp.float32)
        return self._tree(empty, zeros, zeros, self.spec.totals(total))

    def prefill(self, prompt: Prompt, carry: Carry) -> tuple[Tree, Carry]:
        spec, block = self.spec, self.policy.block
        observed = window_scores(
            prompt.q_rotated,
            prompt.k_rotated,
            prompt.lengths,
            window=block,
            scale=spec.scale,
            sliding_window=spec.window,
        )
        keep = self.policy.keep_mask(observed, prompt.lengths, *self.policy.regions(prompt.total))
        kept, index = cache.gather_kept(spec, self.capacity, prompt, keep, rotated=False)
        observers = jnp.minimum(prompt.lengths, block).astype(jnp.float32)[:, None, None]
        steps = jnp.where(kept.live, observers, 0.0)
        score = jnp.where(kept.live, jnp.take_along_axis(observed, index, axis=-1) * observers, 0.0)
        return self._tree(kept, score, steps, prompt.total), carry

    def append(self, state: Tree, token: Token) -> Tree:
        extra = (state.rank, state.count), (state.score, 0.0), (state.steps, 0.0)
        updated, (rank, score, steps) = cache.insert(state.cache, token, extra, rotated=False)
        return dataclasses.replace(state, cache=updated, rank=rank, score=score, steps=steps, count=state.count + 1)

    def attend(self, state: Tree, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], Tree, Carry]:
        live, ranks = state.cache.live, (state.rank, state.count - 1)
        out, probs = cache.attend(self.spec, state.cache, token, ranks=ranks, probs=True)
        assert probs is not None
        score, steps = state.score + jnp.where(live, probs, 0.0), state.steps + live.astype(jnp.float32)
        return out, dataclasses.replace(state, score=score, steps=steps), carry

    def compress(self, state: Tree) -> Tree:
        kept = state.cache
        evicted = tree_eviction(
            Ranked(state.rank, kept.pos, kept.weight, state.count, kept.next, state.scope),
            state.score,
            state.steps,
            state.tree,
            state.budget,
            sinks=self.policy.sinks,
            stride=self.policy.stride,
            scored=self.policy.keep == "score",
        )
        kept = dataclasses.replace(kept, pos=evicted.pos, weight=evicted.weight, next=evicted.next)
        return dataclasses.replace(state, cache=kept, rank=evicted.rank, count=evicted.kept, scope=evicted.scope)

    def _tree(self, filled: LayerCache, score: Array, steps: Array, tokens: Int[Array, " B"]) -> Tree:
        """A state whose slots are filled in order of position."""
        _, tree, budget = self.policy.regions(tokens)
        places = jnp.arange(filled.pos.shape[-1], dtype=jnp.int32)
        rank = jnp.where(filled.live, places, filled.pos.shape[-1])
        return Tree(filled, rank, score, steps, filled.count, jnp.zeros_like(filled.next), tree, budget)
