"""RocketKV: SnapKV keeps a part of the prompt, and every query reads the tokens of its best pages."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import einops
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Rotated, Token, layer_specs
from kvjax.config import ModelConfig
from kvjax.pallas_kernels import heads_of, top_k_indices
from kvjax.pallas_kernels.masking import MASKED

from .budget import budget_counts, budget_rows, budget_tokens, check_least
from .families.scoring import PromptScorerLayer
from .families.sparse import SparseLayer
from .families.staged import StagedLayer, second_spec
from .info import PolicyError, PolicyInfo
from .layer import CacheLayer, Carry
from .registry import register
from .snapkv import SnapKV

LEAST = 2
"""Minimum budget: half of it is read."""

TINY = float(np.finfo(np.float32).tiny)
"""Divisor in place of zero."""


@register
@dataclasses.dataclass(frozen=True)
class RocketKV(SnapKV):
    """Evict from the prompt, then select by page and channel (Behnam et al. 2025, sections 3.3 to 3.6, Algorithm 1).

    The budget t is the number of tokens whose keys and values a step may read, per KV head. For sequences of S tokens
    (prompt and new ones), c = S / t is the compression ratio. It is split into c^r for the first stage and c^(1 - r)
    for the second, r = min(0.2 + 0.06 log2(c), 0.8).

    1. SnapKV with wide pooling leaves S / c^r tokens, new ones included: 3.2k of 32k for t = 512. It leaves at least as
       many tokens of the prompt as new ones will come, and at least the window.
    2. n tokens are left, and x = n / t. Pages of ⌈√x⌉ tokens (1 if x < 2) store the minimum and maximum of each key
       channel. A step takes the ⌊d · page / x⌋ of d channels with the largest |q|, summed over the query group. It reads
       the maximum of a channel where the group's queries have a positive sum, else the minimum. The products of each
       query with a page are divided by √(d · Σ|q| of these channels / Σ|q|). Their softmax over all tokens is averaged
       over the group. The t / 2 tokens with the highest averages are read, the first ones where pages tie.

    So each of the two parts of the second stage reads as many bytes as t / 2 tokens have. Rows whose tokens fit into
    the budget read all of them. (The published code reads half of the budget there, too.) Prompts are prefilled whole.
    The memory is that of S / c^r tokens, and 2 / page of their keys.

    RocketKV-MT, which keeps the whole prompt for later turns, is not implemented.

    Attributes:
        budget: t, tokens that a step may read: a number, or a fraction of prompt + new tokens.
        window, pool: see `SnapKV`.
        kernel: tokens pooled over, odd.

    Example:
        >>> policy = kvjax.RocketKV(budget=64, window=16)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.bytes_read(*sizes) / kvjax.Full().bytes_read(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes that a step reads
        ('rocketkv:budget=64,window=16', 0.38)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="rocketkv",
        paper="Behnam et al. 2025, RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression",
        summary="the prompt's most attended tokens in wide neighbourhoods and all new ones, and a query reads the pages whose keys could score highest",
        memory="freed",
        stage="both",
        budget_excludes_new_tokens=True,
    )
    keeps_highest: ClassVar[bool] = False  # of its scores alone: queries read a selection

    kernel: int = 63

    @property
    def query_window(self) -> None:
        """None: scores alone, in `recompress`, would leave the second stage out."""
        return

    def bind(self, config: ModelConfig) -> "RocketKV":
        for spec in layer_specs(config, 1, 64, 64, jnp.float32):
            self.layer(spec)  # raises if the model has sliding windows
        return self

    def validate(self, tokens: int) -> None:
        needs = f"but a step reads half of them, and needs {LEAST}. Raise budget."
        check_least(self.info.name, self.budget, tokens, LEAST, needs, "tokens to read")

    def row_budgets(self, spec: LayerSpec, lengths: Int[Array, " B"], total: Int[Array, " B"]) -> Int[Array, " B"]:
        left = jnp.asarray(tokens_left(self.budget, spec.max_tokens))[jnp.minimum(total, spec.max_tokens)]
        new = total - lengths
        return jnp.maximum(jnp.maximum(left, jnp.minimum(2 * new, total)) - new, self.window)

    def max_budget(self, spec: LayerSpec) -> int:
        tokens = np.arange(spec.max_tokens + 1)
        prompt = tokens_left(self.budget, spec.max_tokens) - np.maximum(tokens - spec.prompt_len, 0)
        return max(int(prompt.max(initial=0)), min(spec.new_tokens, spec.prompt_len), self.window)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        if spec.window is not None:
            raise PolicyError(
                f"{self.info.name}: layers with a sliding window are not supported. Use snapkv with window={self.window}."
            )
        first = PromptScorerLayer(self, spec)
        second = HybridLayer(self, second_spec(first), before=spec)
        return first if second.covers_all else RocketKVLayer(self, spec, first=first, second=second)


@functools.lru_cache(maxsize=64)
def tokens_left(budget: int | float, longest: int) -> np.ndarray:
    """Tokens that the first stage leaves of sequences of 0 to `longest` tokens, new ones included."""
    tokens = np.arange(longest + 1)
    ratio = np.maximum(tokens / budget_counts(budget, tokens, LEAST), 1.0)
    split = np.minimum(0.2 + 0.06 * np.log2(ratio), 0.8)
    exact = 1 + 1e-12  # rounding does not make a whole number the one below
    left = np.floor(tokens / ratio**split * exact).astype(np.int32)
    left.flags.writeable = False
    return left


def page_size(tokens: Any, budget: Any, largest: int, numpy: Any) -> Any:
    """Tokens of a page, at most `largest`, where `tokens` are left. Arrays of NumPy or JAX."""
    squares = np.arange(1, largest, dtype=np.int32)[:, None] ** 2
    page = 1 + ((tokens - 1) // budget >= squares).sum(axis=0, dtype=np.int32)
    return numpy.where(tokens < 2 * budget, 1, page)


class Sizes(NamedTuple):
    """Maxima over the rows of a batch.

    Attributes:
        read: tokens that a query reads.
        page: tokens of a page.
        pages: pages of a row, rounded up.
        channels: share of the channels that a query reads of the bounds.
    """

    read: int
    page: int
    pages: int
    channels: float


@functools.lru_cache(maxsize=64)
def sizes(budget: int | float, shortest: int, longest: int, most: int) -> Sizes:
    """`Sizes` for sequences of `shortest` to `longest` tokens, if the first stage leaves at most `most`."""
    tokens = np.arange(shortest, longest + 1)
    budgets = budget_counts(budget, tokens, LEAST)
    low = float((tokens_left(budget, longest)[shortest:] / budgets).min())
    high = float((np.minimum(tokens, most) / budgets).max())
    page = math.ceil(math.sqrt(high))
    left, ample = np.arange(1, most + 1), int(budgets.max())
    pages = int((-(-left // page_size(left, ample, page, np))).max())
    # The share is page / x. It falls with x except where pages grow: at x = 2, and beyond the squares from 4 on.
    shares = [(low, (math.ceil(math.sqrt(low)) if low >= 2 else 1) / low), (2.0, 1.0)]
    shares += [(p**2, (p + 1) / p**2) for p in range(2, page)]
    channels = max(share for x, share in shares if low <= x <= high)
    return Sizes(min(ample if low <= 1 else ample // 2, most), page, cache.round_slots(pages), min(channels, 1.0))


@flax.struct.dataclass
class HybridCache:
    """Tokens of a layer, the p-th in slot p, and bounds of their pages. B rows, K KV heads, P pages, H head dim.

    Attributes:
        cache: rotated keys, and values.
        bounds: minimum of each channel over a page's keys, followed by the maximum. Arbitrary for empty pages.
        page: tokens of a page.
        channels: channels that a query reads of the bounds.
        count: tokens that a query reads.
    """

    cache: LayerCache
    bounds: Float[Array, "B K 2*H P"]
    page: Int[Array, " B"]
    channels: Int[Array, " B"]
    count: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class RocketKVLayer(StagedLayer[RocketKV]):
    """Both stages, see `RocketKV`. The second one is a `HybridLayer`."""

    def select_from(self, left: PromptKV, prompt: PromptKV, carry: Carry) -> tuple[HybridCache, Carry]:
        budget = budget_rows(self.policy.budget, prompt.total.astype(jnp.int32), LEAST)
        return self.second.of(left, budget), carry  # pyright: ignore[reportAttributeAccessIssue]


@dataclasses.dataclass(frozen=True)
class HybridLayer(SparseLayer[RocketKV]):
    """Hybrid sparse attention, the second stage of `RocketKV`.

    Attributes:
        before: spec of the layer with the whole prompt.
    """

    before: LayerSpec = dataclasses.field(kw_only=True)

    @property
    def covers_all(self) -> bool:
        """Whether the budget covers the longest possible sequence."""
        longest = self.before.max_tokens
        return budget_tokens(self.policy.budget, longest, LEAST) >= longest

    @property
    def sizes(self) -> Sizes:
        """Maxima over rows."""
        before = self.before
        return sizes(self.policy.budget, before.shortest_prompt, before.max_tokens, self.spec.max_tokens)

    @property
    def channels(self) -> int:
        """Maximum number of channels that a query reads of the bounds."""
        return min(int(self.spec.head_dim * self.sizes.channels + 1e-6), self.spec.head_dim)

    @property
    def selection_shape(self) -> tuple[int, int]:
        return self.spec.num_kv_heads, self.sizes.read

    @property
    def always_kept(self) -> tuple[int, int]:
        return 0, 0

    def tail_start(self, state: HybridCache) -> Int[Array, " B"]:
        return state.cache.seen

    @property
    def bytes_read(self) -> int:
        """Bytes of bounds, keys and values that one decoding step reads."""
        numbers = self.channels * self.sizes.pages + self.slots_read * 2 * self.spec.head_dim
        return self.spec.batch * self.spec.num_kv_heads * numbers * self.spec.dtype.itemsize

    def init(self, total: Int[Array, " B"] | None = None) -> HybridCache:
        tokens = self.spec.totals(total)
        return self._of(cache.empty(self.spec, self.capacity), tokens, budget_rows(self.policy.budget, tokens, LEAST))

    def of(self, left: PromptKV, budget: Int[Array, " B"]) -> HybridCache:
        """Return the state with the tokens that are left of a prompt, for these budgets."""
        state = self._of(cache.from_prompt(self.spec, self.capacity, left), left.total, budget)
        keys = jax.lax.stop_gradient(state.cache.k)
        first = jnp.arange(self.sizes.pages, dtype=jnp.int32) * state.page[:, None]

        def widened(i: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            """Bounds with the i-th key of each page."""
            exists = ((i < state.page[:, None]) & (first + i < left.lengths[:, None]))[:, None, :, None]
            key = jnp.take_along_axis(keys, (first + i)[:, None, :, None], axis=2, mode="clip")
            low, high = bounds
            return jnp.where(exists, jnp.minimum(low, key), low), jnp.where(exists, jnp.maximum(high, key), high)

        shape = (*keys.shape[:2], self.sizes.pages, keys.shape[3])
        none = jnp.full(shape, jnp.inf, keys.dtype), jnp.full(shape, -jnp.inf, keys.dtype)
        low, high = jax.lax.fori_loop(0, self.sizes.page, widened, none)
        bounds = jnp.swapaxes(jnp.concatenate([low, high], axis=-1), 2, 3)
        return dataclasses.replace(state, bounds=jnp.where(jnp.isfinite(bounds), bounds, jnp.zeros((), bounds.dtype)))

    def _of(self, kept: LayerCache, tokens: Int[Array, " B"], budget: Int[Array, " B"]) -> HybridCache:
        """Return a state with empty bounds. Rows end with `tokens` tokens."""
        spec, most = self.spec, self.sizes
        page = page_size(tokens, budget, most.page, jnp)
        channels = jnp.where(tokens > budget, spec.head_dim * page * budget // jnp.maximum(tokens, 1), spec.head_dim)
        return HybridCache(
            cache=kept,
            bounds=jnp.zeros((spec.batch, spec.num_kv_heads, 2 * spec.head_dim, most.pages), spec.dtype),
            page=page,
            channels=jnp.clip(channels, 1, self.channels),
            count=jnp.minimum(jnp.where(tokens <= budget, tokens, budget // 2), most.read),
        )

    def append(self, state: HybridCache, token: Token) -> HybridCache:
        state = super().append(state, token)
        key = heads_of(token.key).astype(state.bounds.dtype)
        rows, place = jnp.arange(len(key), dtype=jnp.int32), token.slot(token.position) // state.page
        low, high = jnp.split(state.bounds.at[rows, :, :, place].get(mode="clip"), 2, axis=-1)
        wider = jnp.concatenate([jnp.minimum(low, key), jnp.maximum(high, key)], axis=-1)
        begins = (token.position % state.page == 0)[:, None, None]
        bounds = state.bounds.at[rows, :, :, place].set(jnp.where(begins, jnp.tile(key, 2), wider), mode="drop")
        return dataclasses.replace(state, bounds=bounds)

    def select(self, state: HybridCache, query: Rotated) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """Return the tokens with the highest approximate attention."""
        scores, seen = self.scores(state, query), state.cache.seen[:, None, None]
        slots = jnp.arange(self.capacity, dtype=jnp.int32)
        page = jnp.minimum(slots // state.page[:, None], self.sizes.pages - 1)[:, None]
        scores = jnp.where(slots < seen, jnp.take_along_axis(scores, page, axis=-1), -jnp.inf)
        return top_k_indices(scores, state.count[:, None], self.selection_shape[1])

    def scores(self, state: HybridCache, query: Rotated) -> Float[Array, "B K P"]:
        """Approximate attention to each token of a page, mean over the query group."""
        size = self.spec.head_dim
        q = einops.rearrange(heads_of(query), "b (k g) h -> b k g h", k=self.spec.num_kv_heads).astype(jnp.float32)
        total, weight = jnp.sum(q, axis=2), jnp.abs(q)
        index, valid = top_k_indices(jnp.sum(weight, axis=2), state.channels[:, None], self.channels)
        some = jnp.where(valid[:, :, None], jnp.take_along_axis(q, index[:, :, None], axis=-1), 0.0)
        bound = jnp.where(jnp.take_along_axis(total, index, axis=-1) > 0, index + size, index)
        bounds = jnp.take_along_axis(state.bounds, bound[..., None], axis=2)
        some = some.astype(bounds.dtype)
        products = jnp.einsum("bkgr,bkrp->bkgp", some, bounds, preferred_element_type=jnp.float32, precision="highest")
        share = jnp.sum(jnp.abs(some), axis=-1, dtype=jnp.float32) / jnp.maximum(jnp.sum(weight, axis=-1), TINY)
        logits = products / jnp.maximum(jnp.sqrt(size * share), TINY)[..., None]
        page, first = state.page[:, None], jnp.arange(self.sizes.pages, dtype=jnp.int32) * state.page[:, None]
        tokens = jnp.clip(state.cache.seen[:, None] - first, 0, page)[:, None, None].astype(jnp.float32)  # in each page
        logits = jnp.where(tokens > 0, logits, MASKED)
        exps = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        return jnp.mean(exps / jnp.sum(tokens * exps, axis=-1, keepdims=True), axis=2)
