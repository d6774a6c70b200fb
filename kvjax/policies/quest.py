"""Quest: every query reads the pages of the cache that may contain the keys with the largest products."""

import dataclasses
from typing import Any, ClassVar, Literal

import einops
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Rotated, Token, TokenBlock
from kvjax.pallas_kernels import page_scores, top_k_indices, widen_bounds

from .base import Policy
from .budget import budget_rows, budget_tokens, check_least
from .families.dense import DenseLayer
from .families.pages import paged, slots_of
from .families.sparse import SparseLayer, reads_all, reads_everything
from .fields import check_fields
from .info import PolicyInfo
from .layer import CacheLayer, Carry
from .registry import register


@flax.struct.dataclass
class PagedCache:
    """All tokens of a layer, token p in slot p, and bounds of each page. B rows, K KV heads, P pages, H head dim.

    Attributes:
        cache: rotated keys, and values.
        bounds: minimum of each channel over a page's keys, followed by the maximum. Zeros for empty pages.
        budget: tokens that a query reads.
    """

    cache: LayerCache
    bounds: Float[Array, "B K P 2*H"]
    budget: Int[Array, " B"]


@register
@dataclasses.dataclass(frozen=True)
class Quest(Policy):
    """Keep everything, and read the pages with the highest bounds (Tang et al. 2024, section 3.3, Algorithm 1).

    Each page stores the minimum and maximum of every key channel. The product of a query with a key of the page is at
    most Σ_d max(q_d · low_d, q_d · high_d). Every query head ranks the pages by this bound and reads the best within
    the budget. The page that is being filled competes with the keys that it has.

    Nothing is dropped, so memory is that of the full cache and 2 / `page` of its keys. Decoding reads less of it. A
    layer whose budget covers the whole sequence reads everything. In layers with a sliding window, selected tokens
    outside of it are not attended to.

    The published kernels always read the last page, and one other page less: `recent=1`. (The published evaluation code
    does not, and reads at least 3 pages.) CateKV's variant for adaptive heads is `page=8, recent=32, gqa="sum"`, or
    "max".

    Attributes:
        budget: tokens that a query reads, in whole pages: a number, or a fraction of prompt + new tokens.
        page: tokens in a page.
        dense_layers: first layers, which read everything (section 3.4).
        recent: latest tokens that every query reads, with the rest of their pages, within the budget.
        gqa: "query_head" selects for each query head. "sum" and "max" select for each KV head, by the sum or maximum of
            its queries' bounds.

    Example:
        >>> policy = kvjax.Quest(budget=64, page=8, dense_layers=0)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.bytes_read(*sizes) / kvjax.Full().bytes_read(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes that a step reads
        ('quest:budget=64,page=8,dense_layers=0', 0.62)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="quest",
        paper="Tang et al. 2024, Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
        summary="every token; a query reads the pages whose keys could score highest",
        memory="sparse",
        stage="decoding",
    )

    budget: int | float = 1024
    page: int = 16
    dense_layers: int = 2
    recent: int = 0
    gqa: Literal["query_head", "sum", "max"] = "query_head"

    def __post_init__(self) -> None:
        check_fields(self, page=1, dense_layers=0, recent=0)

    def validate(self, tokens: int) -> None:
        needs = (
            f"but pages of {self.page} tokens, {self.recent_pages} always read and at least one selected, need {self.least_tokens}. "
            "Raise budget, or lower page or recent."
        )
        check_least(self.info.name, self.budget, tokens, self.least_tokens, needs, "tokens to read")

    @property
    def least_tokens(self) -> int:
        """Minimum number of tokens that a query reads."""
        return (self.recent_pages + 1) * self.page

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        dense = reads_everything(spec, self.budget, self.dense_layers, self.least_tokens)
        return DenseLayer(self, spec) if dense else QuestLayer(self, spec)

    @property
    def recent_pages(self) -> int:
        """Maximum number of pages that `recent` tokens span."""
        return -(-(self.recent + self.page - 1) // self.page) if self.recent else 0

    def chosen_pages(self, budget: Any) -> Any:
        """Number of pages that a query selects within a budget of tokens, or an array of budgets."""
        return budget // self.page - self.recent_pages


@dataclasses.dataclass(frozen=True)
class QuestLayer(SparseLayer[Quest]):
    """A layer that reads pages, see `Quest`."""

    @property
    def pages(self) -> int:
        """Number of pages of the cache."""
        return -(-self.capacity // self.policy.page)

    @property
    def page(self) -> int:
        page = self.policy.page
        return page if self.capacity % page == 0 and self.slots_read % page == 0 else 1

    @property
    def selection_shape(self) -> tuple[int, int]:
        policy, spec = self.policy, self.spec
        heads = spec.num_heads if policy.gqa == "query_head" else spec.num_kv_heads
        # Rounded up to a whole page, because a row within the budget reads its last page, too.
        chosen = policy.chosen_pages(
            budget_tokens(policy.budget, spec.max_tokens, policy.least_tokens) + policy.page - 1
        )
        return heads, policy.page * min(chosen, self.pages)

    @property
    def always_kept(self) -> tuple[int, int]:
        return 0, self.policy.recent_pages * self.policy.page

    def tail_start(self, state: PagedCache) -> Int[Array, " B"]:
        seen, recent, page = state.cache.seen, self.policy.recent, self.policy.page
        return jnp.maximum(seen - recent, 0) // page * page if recent else seen

    @property
    def bytes_read(self) -> int:
        """Bytes of keys, values and page bounds that one decoding step reads.

        Bytes read several times count several times: each query head gathers its own selection.
        """
        rows = self.selection_shape[0] * self.slots_read + self.spec.num_kv_heads * self.pages
        return self.spec.batch * rows * 2 * self.spec.head_dim * self.spec.dtype.itemsize

    def init(self, total: Int[Array, " B"] | None = None) -> PagedCache:
        spec, kept = self.spec, cache.empty(self.spec, self.capacity)
        bounds = jnp.zeros((spec.batch, spec.num_kv_heads, self.pages, 2 * spec.head_dim), spec.dtype)
        return PagedCache(kept, bounds, budget_rows(self.policy.budget, spec.totals(total), self.policy.least_tokens))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[PagedCache, Carry]:
        spec = self.spec
        keys, inside = paged(prompt.k_rotated.astype(spec.dtype), prompt.lengths, self.policy.page, self.pages)
        some = jnp.any(inside, axis=3)
        zero = jnp.zeros((), keys.dtype)
        low = jnp.where(some, jnp.min(keys, axis=3, where=inside, initial=jnp.inf), zero)
        high = jnp.where(some, jnp.max(keys, axis=3, where=inside, initial=-jnp.inf), zero)
        bounds = jnp.concatenate([low, high], axis=-1)
        budget, page = budget_rows(self.policy.budget, prompt.total, self.policy.least_tokens), self.policy.page
        budget = jnp.where(reads_all(spec, prompt, budget), -(-budget // page) * page, budget)
        return PagedCache(cache.from_prompt(spec, self.capacity, prompt), bounds, budget), carry

    def read_block(
        self, state: PagedCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], PagedCache, Carry]:
        kept = cache.insert_block(state.cache, block)
        out = cache.attend_block(self.spec, kept, block)
        return out, dataclasses.replace(state, cache=kept, bounds=self._widened(state, block)), carry

    def _widened(self, state: PagedCache, block: TokenBlock) -> Float[Array, "B K P E"]:
        """Bounds of all pages after a block's tokens were added."""
        page, dtype = self.policy.page, self.spec.dtype
        pages = (block.size + page - 2) // page + 1  # maximum number of pages that the block touches
        begin, offset = block.position // page, block.position % page
        place = jnp.arange(pages * page, dtype=jnp.int32) - offset[:, None]
        keys = jnp.take_along_axis(block.k_rotated, jnp.maximum(place, 0)[..., None, None], axis=1, mode="clip")
        keys = einops.rearrange(keys.astype(dtype), "b (p s) k h -> b k p s h", s=page)
        inside = (place >= 0) & (place < block.count[:, None])
        inside = einops.rearrange(inside, "b (p s) -> b 1 p s 1", s=page)

        rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in state.bounds.shape[:2])
        some = jnp.any(inside, axis=(3, 4))[:, 0]
        which = begin[:, None] + jnp.arange(pages, dtype=jnp.int32)
        at = rows[:, None, None], heads[:, None], jnp.where(some, which, self.pages)[:, None]  # out of bounds: dropped
        old = state.bounds.at[at].get(mode="clip")
        begun = ((which * page < block.position[:, None]) & some)[:, None, :, None]  # pages that already have tokens
        low, high = jnp.split(old, 2, axis=-1)
        low = jnp.minimum(jnp.min(keys, axis=3, where=inside, initial=jnp.inf), jnp.where(begun, low, jnp.inf))
        high = jnp.maximum(jnp.max(keys, axis=3, where=inside, initial=-jnp.inf), jnp.where(begun, high, -jnp.inf))
        return state.bounds.at[at].set(jnp.concatenate([low, high], axis=-1).astype(dtype), mode="drop")

    def append(self, state: PagedCache, token: Token) -> PagedCache:
        state = super().append(state, token)
        bounds = widen_bounds(state.bounds, token.key, token.slot(token.position), page=self.policy.page)
        return dataclasses.replace(state, bounds=bounds)

    def select(self, state: PagedCache, query: Rotated) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """Return the tokens of the pages with the highest bounds, in the order of the pages."""
        index, valid = slots_of(*self._best(state, query), self.policy.page)
        return index, valid & (index < state.cache.seen[:, None, None])

    def pages_to_read(
        self, state: PagedCache, query: Rotated, position: Int[Array, " B"]
    ) -> tuple[Int[Array, "B R P"], Bool[Array, "B R L"]]:
        """Return the selected pages directly, if nothing else is read."""
        if self.policy.recent or self.spec.window is not None or self.page != self.policy.page:
            return super().pages_to_read(state, query, position)
        return self._best(state, query)

    def _best(self, state: PagedCache, query: Rotated) -> tuple[Int[Array, "B R P"], Bool[Array, "B R P"]]:
        """Return the pages with the highest bounds, and which of them are valid."""
        size = self.selection_shape[1] // self.policy.page
        return top_k_indices(self.scores(state, query), self.policy.chosen_pages(state.budget)[:, None], size)

    def scores(self, state: PagedCache, query: Rotated) -> Float[Array, "B R P"]:
        """Upper bound of rotated queries' products with the keys of each page before the tail, -inf for other pages."""
        scores = page_scores(query, state.bounds, self.tail_start(state), page=self.policy.page)
        if self.policy.gqa == "query_head":
            return scores
        return einops.reduce(scores, "b (k g) p -> b k p", self.policy.gqa, k=self.spec.num_kv_heads)
