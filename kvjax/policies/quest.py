"""Quest: every query reads the pages of the cache that could hold the keys it likes best."""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, Slots
from kvjax.pallas_kernels import DeferredRope, page_scores, top_k_indices, widen_bounds

from .base import Carry, PolicyError, Stage, State, budget_rows, budget_tokens, check_fields, rotated
from .pages import paged, tokens_of
from .recalling import Recalling
from .registry import register


@flax.struct.dataclass
class Pages:
    """All tokens of a layer, token p in slot p, and the range of keys in every page. B rows, K KV heads, P pages, H head dim.

    Attributes:
        slots: rotated keys, and values.
        bounds: least value of each channel among a page's keys, and then the greatest; zeros where a page has none.
        budget: tokens that a query reads.
    """

    slots: Slots
    bounds: Float[Array, "B K P 2*H"]
    budget: Int[Array, " B"]


@register
@dataclasses.dataclass(frozen=True)
class Quest(Recalling):
    """Keep everything, and read the pages whose keys a query could like best (Tang et al. 2024, section 3.3, Algorithm 1).

    Of each page the least and greatest value of every key channel are known. No key in it can have a larger product with a query
    than Σ_d max(q_d · low_d, q_d · high_d): by that bound every query head ranks the pages and reads the best, as many as the
    budget holds. The page that is being filled competes like the others, with the keys that it has.

    Nothing is forgotten, so memory is that of the full cache and 2 / `page` of its keys; what is saved is reading it. A layer
    whose budget covers the whole sequence reads everything. In layers with a sliding window, recalled tokens outside of it are
    not attended to.

    The published kernels always read the last page and take one other less: `recent=1`. (The published evaluation code does not,
    and never reads fewer than 3 pages.) CateKV's variant for adaptive heads is `page=8, recent=32, gqa="sum"`, or "max".

    Attributes:
        budget: tokens that a query reads, in whole pages: a number, or a fraction of prompt + new tokens.
        page: tokens in a page.
        exempt: first layers, which read everything (section 3.4).
        recent: how many latest tokens every query reads, with the rest of their pages, inside the budget.
        gqa: "query_head" selects for each query head; "sum" and "max" for each KV head, by what its queries' bounds come to.
    """

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "Tang et al. 2024, Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference"
    keeps: ClassVar[str] = "every token, of which a query reads the pages that could hold the keys it likes best"
    stage: ClassVar[Stage] = "decoding"

    budget: int | float = 1024
    page: int = 16
    exempt: int = 2
    recent: int = 0
    gqa: Literal["query_head", "sum", "max"] = "query_head"

    def __post_init__(self) -> None:
        check_fields(self, page=1, exempt=0, recent=0)
        if isinstance(self.budget, int):
            self.check(0)

    def check(self, tokens: int) -> None:
        budget, least = budget_tokens(self.budget, tokens), (self._tail_pages + 1) * self.page
        if budget < least:
            raise PolicyError(
                f"{self.name}: a budget of {self.budget} gives {budget} tokens to read, but pages of {self.page}, of which "
                f"{self._tail_pages} are always read and at least one is chosen, need {least}; raise budget, or lower page or recent"
            )

    def recalls(self, spec: LayerSpec) -> bool:
        return spec.layer >= self.exempt and budget_tokens(self.budget, spec.max_tokens) < spec.max_tokens

    def run_of(self, spec: LayerSpec) -> int:
        whole = self.capacity(spec) % self.page == 0 and self.reads(spec) % self.page == 0
        return self.page if whole else 1

    def selects(self, spec: LayerSpec) -> tuple[int, int]:
        heads = spec.num_heads if self.gqa == "query_head" else spec.num_kv_heads
        return heads, self.page * min(self._chosen(budget_tokens(self.budget, spec.max_tokens)), self._pages(spec))

    def ends(self, spec: LayerSpec) -> tuple[int, int]:
        return 0, self._tail_pages * self.page

    def tail(self, state: Pages) -> Int[Array, " B"]:
        seen = state.slots.seen
        return jnp.maximum(seen - self.recent, 0) // self.page * self.page if self.recent else seen

    def layer_bytes_read(self, spec: LayerSpec) -> int:
        """Bytes of keys, values and page bounds that one decoding step reads.

        Read more than once, a byte counts as often: each query head gathers its own selection.
        """
        if not self.recalls(spec):
            return super().layer_bytes_read(spec)
        heads, _ = self.selects(spec)
        rows = heads * self.reads(spec) + spec.num_kv_heads * self._pages(spec)
        return spec.batch * rows * 2 * spec.head_dim * spec.dtype.itemsize

    def init(self, spec: LayerSpec) -> State:
        slots = cache.empty(spec, self.capacity(spec))
        if not self.recalls(spec):
            return slots
        bounds = jnp.zeros((spec.batch, spec.num_kv_heads, self._pages(spec), 2 * spec.head_dim), spec.dtype)
        return Pages(slots, bounds, budget_rows(self.budget, jnp.full_like(slots.seen, spec.new_tokens)))

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[State, Carry]:
        slots, carry = super().prefill(spec, q, k, v, lengths, carry)
        if not self.recalls(spec):
            return slots, carry
        keys, inside = paged(rotated(spec, k).astype(spec.dtype), lengths, self.page, self._pages(spec))
        some = jnp.any(inside, axis=3)
        zero = jnp.zeros((), keys.dtype)
        low = jnp.where(some, jnp.min(keys, axis=3, where=inside, initial=jnp.inf), zero)
        high = jnp.where(some, jnp.max(keys, axis=3, where=inside, initial=-jnp.inf), zero)
        bounds = jnp.concatenate([low, high], axis=-1)
        return Pages(slots, bounds, budget_rows(self.budget, lengths + spec.new_tokens)), carry

    def append(
        self, spec: LayerSpec, state: State, k: Float[Array, "B K H"], v: Float[Array, "B K H"], pos: Int[Array, " B"]
    ) -> State:
        state = super().append(spec, state, k, v, pos)
        if not self.recalls(spec):
            return state
        bounds = widen_bounds(state.bounds, cache.turned(spec.rope, k, pos), pos, page=self.page)
        return dataclasses.replace(state, bounds=bounds)

    def selected(
        self, spec: LayerSpec, state: Pages, q: Float[Array, "B N H"] | DeferredRope
    ) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """The tokens of the pages with the highest bounds, in the order of these."""
        index, live = tokens_of(*self._best(spec, state, q), self.page)
        return index, live & (index < state.slots.seen[:, None, None])

    def runs(
        self, spec: LayerSpec, state: Pages, q: Float[Array, "B N H"] | DeferredRope, pos: Int[Array, " B"]
    ) -> tuple[Int[Array, "B R P"], Bool[Array, "B R L"]]:
        """Pages as they were chosen, where nothing else is read."""
        if self.recent or spec.window is not None or self.run_of(spec) != self.page:
            return super().runs(spec, state, q, pos)
        return self._best(spec, state, q)

    def _best(
        self, spec: LayerSpec, state: Pages, q: Float[Array, "B N H"] | DeferredRope
    ) -> tuple[Int[Array, "B R P"], Bool[Array, "B R P"]]:
        """The pages with the highest bounds, and which of them are meant."""
        size = self.selects(spec)[1] // self.page
        return top_k_indices(self.scores(spec, state, q), self._chosen(state.budget)[:, None], size)

    def scores(self, spec: LayerSpec, state: Pages, q: Float[Array, "B N H"] | DeferredRope) -> Float[Array, "B R P"]:
        """Of each page before the tail, the most that rotated queries can have as product with a key in it; of others -inf."""
        scores = page_scores(q, state.bounds, self.tail(state), page=self.page)
        if self.gqa == "query_head":
            return scores
        scores = scores.reshape(spec.batch, spec.num_kv_heads, -1, scores.shape[-1])
        return jnp.sum(scores, axis=2) if self.gqa == "sum" else jnp.max(scores, axis=2)

    @property
    def _tail_pages(self) -> int:
        """The most pages that `recent` tokens lie in."""
        return -(-(self.recent + self.page - 1) // self.page) if self.recent else 0

    def _chosen(self, budget: Any) -> Any:
        """Pages that a query chooses within a budget of tokens, one or an array of them."""
        return budget // self.page - self._tail_pages

    def _pages(self, spec: LayerSpec) -> int:
        """Pages that there is room for."""
        return -(-self.capacity(spec) // self.page)
