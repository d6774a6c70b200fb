"""TreeKV: evictions that cycle from old to new, which leaves the cache sparse on the left and dense on the right."""

import dataclasses
from functools import partial
from typing import ClassVar, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, TokenBlock
from kvjax.pallas_kernels import Ranked, exceeds, tree_eviction

from .base import Policy
from .budget import budget_rows, budget_tokens, check_least
from .families.scoring import last_queries
from .fields import check_fields
from .info import PolicyInfo
from .layer import CacheLayer, Carry
from .registry import register


@flax.struct.dataclass
class Tree:
    """A TreeKV cache: [sinks | tree | recent], in order of rank. B rows, K KV heads, C slots.

    Attributes:
        cache: unrotated keys, and values.
        rank: index of a slot's token among the kept tokens, 0 for the oldest, C if free.
        score: S, attention that a token has received from all queries that counted so far.
        steps: C in the paper, the number of queries that S sums over.
        count: number of kept tokens.
        scope: left end of the eviction scope, counted from the first token of the tree.
        tree, budget: tokens of each row in the tree region and in total.
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
    """Evict the less attended of two neighbours, then move on to the next pair (He et al. 2025, Algorithm 1).

    The cache has three regions: sinks and recent tokens, which stay, and between them the tree. A token enters the tree
    when it leaves the recent window. When the tree has one token too many, the token of the pair {scope, scope + 1}
    with the lower average attention is evicted, and the scope moves one to the right, cyclically. Positions are the
    ranks in the cache (section 4.1, Position Encoding), so sequences far beyond the trained window work.

    A prompt is compressed the same way in blocks of tokens (section 4.2), scored by the queries of its last block.
    Decoding continues from these scores and this scope. Chunked prefill does the same: tree and new tokens are cut into
    blocks, which pass through the tree from the current scope. The attention of the last queries of each block is added
    to the averages.

    Attributes:
        budget: c, slots in total: a number of tokens, or a fraction of prompt + new tokens.
        sinks: first tokens, never evicted.
        recent: latest tokens, never evicted. Defaults to half of the budget minus the sinks, the paper's 1024 = 4 sinks
            + 512 tree + 508 recent. `sinks=0, recent=0` is the plain Algorithm 1.
        block: b, tokens in a prompt block, and queries in the observation window. Blocks are smaller if fewer than four
            would fit in the tree (the paper's tree has at least 16).
        keep: "score", or "left" for the ablation of section 5.4, which ignores attention and keeps the older token.
        cycle: "text" moves the scope 1, 2, 3, … as in the paper's text and Figure 3. "printed" uses the formula printed
            in Algorithm 1, line 16, which skips every second place of an even tree.

    Example:
        >>> policy = kvjax.TreeKV(budget=64, sinks=2)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('treekv:budget=64,sinks=2', 0.5)
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
        needs = (
            f"but {self.sinks} sinks, {self.recent or 0} recent tokens and a tree of at least one need {self.least_slots}. Raise budget, "
            "or lower sinks or recent."
        )
        check_least(self.info.name, self.budget, tokens, self.least_slots, needs)

    @property
    def least_slots(self) -> int:
        """Slots that the policy needs at any sequence length."""
        return self.sinks + (self.recent or 0) + 1

    def layer(self, spec: LayerSpec) -> "TreeKVLayer":
        return TreeKVLayer(self, spec)

    def regions(self, tokens: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"]]:
        """Sizes in tokens of the recent region, the tree, and the whole budget."""
        budget = budget_rows(self.budget, tokens, self.least_slots)
        recent = jnp.maximum(budget // 2 - self.sinks, 0) if self.recent is None else jnp.full_like(budget, self.recent)
        return recent, budget - self.sinks - recent, budget

    @partial(jax.jit, static_argnums=(0, 1))  # traced once for all layers, which saves 1 s for a model of 30 layers
    def keep_mask(
        self,
        observers: int,
        scores: Float[Array, "B K T"],
        live: Bool[Array, "B #K T"],
        lengths: Int[Array, " B"],
        scope: Int[Array, "B K"],
        total: Int[Array, " B"],
    ) -> tuple[Bool[Array, "B K T"], Int[Array, "B K"]]:
        """Which tokens of a prompt survive: sinks, recent tokens (including the observation block), and tree blocks.

        Blocks are counted from the right end of the middle region, so the first one may be partial.

        Args:
            observers: number of queries of the observation block.
            scores: average attention of each token.
            live, lengths: places with a token, and the end of each row, see `PromptKV`.
            scope: left end of the eviction scope, in tokens.
            total: tokens that each row will reach.

        Returns:
            The mask, and the scope afterwards.
        """
        if isinstance(self.budget, int) and live.shape[-1] <= self.budget:  # no row can exceed its budget
            return jnp.ones(scores.shape, bool), scope
        recent, tree, budget = self.regions(total)
        recent = jnp.maximum(recent, jnp.minimum(observers if observers > 1 else 0, tree + recent))[:, None]
        tree = budget[:, None] - self.sinks - recent
        size = jnp.clip(tree // 4, 1, observers)
        count = jnp.sum(live, axis=-1, dtype=jnp.int32)  # [B, #K]
        blocks = -(-jnp.maximum(count - self.sinks - recent, 0) // size)
        place = jnp.arange(live.shape[-1], dtype=jnp.int32)
        start = lengths[:, None] - recent - blocks * size  # start of the first block, as if it were whole
        is_sink = place < (lengths[:, None] - count + self.sinks)[..., None]
        block = jnp.where(is_sink, -1, (place - start[..., None]) // size[..., None])  # < 0 sinks, >= blocks recent
        inside = live & (block >= 0) & (block < blocks[..., None])

        block, inside = (jnp.broadcast_to(x, scores.shape) for x in (block, inside))
        held, moved = jax.vmap(self._tournament)(
            self._block_scores(scores, jnp.where(inside, block, live.shape[-1])),
            (tree // size)[:, 0],
            jnp.broadcast_to(blocks, scope.shape),
            scope // size,
        )
        survives = jnp.take_along_axis(held, jnp.where(inside, block, 0), axis=-1)
        whole = count <= budget[:, None]
        return jnp.where(inside, survives, True) | whole[..., None], jnp.where(whole, scope, moved * size)

    def _block_scores(self, scores: Float[Array, "B K T"], block: Int[Array, "B K T"]) -> Float[Array, "B K T"]:
        """Mean score of the tokens of each block. Tokens with block number T belong to none."""
        count = scores.shape[-1]

        def mean(scores: Float[Array, " T"], block: Int[Array, " T"]) -> Float[Array, " T"]:
            pairs = jnp.stack([scores, jnp.ones_like(scores)], axis=-1)
            total, size = jax.ops.segment_sum(pairs, block, num_segments=count + 1)[:count].T
            return total / jnp.maximum(size, 1.0)

        return jax.vmap(jax.vmap(mean))(scores, block)

    def _tournament(
        self,
        scores: Float[Array, "K M"],
        capacity: Int[Array, ""],
        blocks: Int[Array, " K"],
        scope: Int[Array, " K"],
    ) -> tuple[Bool[Array, "K M"], Int[Array, " K"]]:
        """Pass the first `blocks` blocks through a tree of `capacity` blocks. Return the survivors and the scope."""
        step = self._round if self.cycle == "text" else self._single
        size = scores.shape[-1]
        order = jnp.arange(size, dtype=jnp.int32)

        def play(scores: Float[Array, " M"], blocks: Array, scope: Array) -> tuple[Bool[Array, " M"], Array]:
            def cond(carry: tuple[Array, Array, Array]) -> Array:
                return (carry[1] < blocks) & (capacity > 0)

            kept, _, scope = jax.lax.while_loop(
                cond, lambda carry: step(scores, capacity, blocks, *carry), (order, capacity, scope)
            )
            survivors = jnp.where(order < jnp.minimum(capacity, blocks), kept, size)
            return jnp.zeros(size, bool).at[survivors].set(True, mode="drop"), scope

        return jax.vmap(play)(scores, blocks, scope)

    def _round(
        self, scores: Array, capacity: Array, blocks: Array, kept: Int[Array, " M"], arrived: Array, scope: Array
    ) -> tuple[Array, Array, Array]:
        """Run the evictions of one cycle of the scope at once, as a round of a pairwise tournament.

        With fixed scores, `capacity` single evictions equal one such round. The list of `capacity` kept blocks and as
        many new ones is paired from the scope on, (0, 1), (2, 3), …, and each pair keeps its better block. If only j
        new blocks are left, the first j pairs play, and the rest of the list stays.
        """
        places = jnp.arange(kept.shape[0], dtype=jnp.int32)
        arrivals = jnp.minimum(capacity - scope, blocks - arrived)

        def listed(i: Array) -> Array:
            return jnp.where(i < capacity, jnp.take(kept, i, mode="clip"), arrived + i - capacity)

        a, b = listed(2 * places - scope), listed(2 * places - scope + 1)
        score = partial(jnp.take, scores, mode="clip")
        winner = jnp.where(self._keep_left(score(a), score(b)), a, b)
        after = jnp.where(places < scope + arrivals, winner, listed(places + arrivals))
        return jnp.where(places < scope, kept, after), arrived + arrivals, (scope + arrivals) % capacity

    def _single(
        self, scores: Array, capacity: Array, blocks: Array, kept: Int[Array, " M"], arrived: Array, scope: Array
    ) -> tuple[Array, Array, Array]:
        """One eviction, for a scope with a stride other than 1."""
        places = jnp.arange(kept.shape[0], dtype=jnp.int32)

        def listed(i: Array) -> Array:
            return jnp.where(i < capacity, jnp.take(kept, i, mode="clip"), arrived)

        score = partial(jnp.take, scores, mode="clip")
        victim = scope + self._keep_left(score(listed(scope)), score(listed(scope + 1))).astype(jnp.int32)
        return listed(places + (places >= victim).astype(jnp.int32)), arrived + 1, self._next(scope, capacity)

    def _keep_left(self, left: Array, right: Array) -> Bool[Array, "..."]:
        """Whether the older of two neighbours stays (Algorithm 1, line 11: it is evicted on a tie)."""
        return exceeds(left, right) if self.keep == "score" else jnp.ones_like(left, bool)

    def _next(self, scope: Int[Array, "..."], tree: Int[Array, "..."]) -> Int[Array, "..."]:
        """The scope after an eviction, counted from 0 (Algorithm 1, line 16)."""
        return (scope + self.stride) % jnp.maximum(tree, 1)

    @property
    def stride(self) -> int:
        """How far the scope moves after an eviction."""
        return 1 if self.cycle == "text" else 2


@dataclasses.dataclass(frozen=True)
class TreeKVLayer(CacheLayer[TreeKV]):
    """One layer of a `TreeKV`."""

    @property
    def max_kept(self) -> int:
        return budget_tokens(self.policy.budget, self.spec.max_tokens, self.policy.least_slots)

    def init(self, total: Int[Array, " B"] | None = None) -> Tree:
        empty = cache.empty(self.spec, self.capacity)
        zeros = jnp.zeros(empty.pos.shape, jnp.float32)
        return self._tree(empty, zeros, zeros, jnp.zeros_like(empty.next), self.spec.totals(total))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[Tree, Carry]:
        zeros = jnp.zeros((self.spec.batch, self.spec.num_kv_heads, prompt.size), jnp.float32)
        return self._chosen(prompt, zeros, zeros, jnp.zeros(zeros.shape[:2], jnp.int32)), carry

    def read_block(self, state: Tree, block: TokenBlock, carry: Carry) -> tuple[Float[Array, "B S N H"], Tree, Carry]:
        prompt = cache.as_prompt_with_block(state.cache, block, rotated=False)
        score, steps = (cache.with_places(state.cache, x, block) for x in (state.score, state.steps))
        new = self._chosen(prompt, score, steps, state.scope)
        return cache.attend_prompt(self.spec, prompt), cache.where_rows(block.count > 0, new, state), carry

    def _chosen(
        self, prompt: PromptKV, score: Float[Array, "B K T"], steps: Float[Array, "B K T"], scope: Int[Array, "B K"]
    ) -> Tree:
        """Return the state after a prompt. `score` has sums of earlier attention to its tokens over `steps` queries."""
        observers = min(self.policy.block, prompt.q.shape[1])
        observed = last_queries(prompt, observers, self.spec)
        more = jnp.minimum(prompt.lengths - prompt.before, observers).astype(jnp.float32)[:, None, None]
        score, steps = score + observed * more, steps + more
        keep, scope = self.policy.keep_mask(observers, score / steps, prompt.live, prompt.lengths, scope, prompt.total)
        kept, index = cache.keep(self.spec, self.capacity, prompt, keep, rotated=False)
        score, steps = (jnp.where(kept.live, jnp.take_along_axis(x, index, axis=-1), 0.0) for x in (score, steps))
        return self._tree(kept, score, steps, scope, prompt.total)

    def append(self, state: Tree, token: Token) -> Tree:
        extra = (state.rank, state.count), (state.score, 0.0), (state.steps, 0.0)
        updated, (rank, score, steps) = cache.insert(state.cache, token, extra, rotated=False)
        return dataclasses.replace(
            state, cache=updated, rank=rank, score=score, steps=steps, count=state.count + token.count(state.count)
        )

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
            jax.lax.stop_gradient(state.score),
            jax.lax.stop_gradient(state.steps),
            state.tree,
            state.budget,
            sinks=self.policy.sinks,
            stride=self.policy.stride,
            scored=self.policy.keep == "score",
        )
        kept = dataclasses.replace(kept, pos=evicted.pos, weight=evicted.weight, next=evicted.next)
        return dataclasses.replace(state, cache=kept, rank=evicted.rank, count=evicted.kept, scope=evicted.scope)

    def _tree(
        self, filled: LayerCache, score: Array, steps: Array, scope: Int[Array, "B K"], tokens: Int[Array, " B"]
    ) -> Tree:
        """Return the state of a cache whose slots are filled in order of position."""
        _, tree, budget = self.policy.regions(tokens)
        places = jnp.arange(filled.pos.shape[-1], dtype=jnp.int32)
        rank = jnp.where(filled.live, places, filled.pos.shape[-1])
        return Tree(filled, rank, score, steps, filled.count, scope, tree, budget)
