"""InfiniGen: which tokens a layer will attend to is predicted from the layer before, by a few channels of queries and keys."""

import dataclasses
import math
from fractions import Fraction
from typing import Any, ClassVar

import einops
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Rotated, Token, prompt_mask
from kvjax.config import ModelConfig
from kvjax.pallas_kernels import heads_of, top_k

from .base import CacheLayer, Carry, Policy, Queries
from .budget import budget_rows, budget_tokens, check_least
from .families.dense import DenseLayer
from .families.pages import best_pages
from .families.skewing import SkewProfile
from .families.sparse import SparseLayer, reads_all, reads_everything
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .profile import find
from .registry import register

PROMPT = "prompt"
"""What to say for directions of the prompt's own queries, instead of a profile."""

NOISE = 1e-5
"""Of the largest squared singular value, what is no more than rounding."""


@flax.struct.dataclass
class SpeculativeCache:
    """All tokens of a layer, token p in slot p, with a part of their keys. B rows, K KV heads, C slots, H head dim, P channels.

    Attributes:
        cache: rotated keys, and values.
        skew: the directions of rotated queries and keys that scores are told by.
        partial: keys in these directions; zeros in places for directions that queries and keys did not choose apart.
        budget: tokens that a query reads at most, the newest included.
    """

    cache: LayerCache
    skew: Float[Array, "B K H P"]
    partial: Float[Array, "B K C P"]
    budget: Int[Array, " B"]


LEAST = 2
"""Tokens that a query reads at least: the newest, and another one."""


@register
@dataclasses.dataclass(frozen=True)
class InfiniGen(Policy):
    """Keep everything, and read the tokens that are expected to matter, as seen a layer ahead (Lee et al. 2024, section 4).

    While a layer computes, the next one's queries are told from this one's attention input, which changes little from layer to
    layer, with the next one's weights. Their scores are taken in a few directions: each head's queries and keys are turned so
    that most of their size is in few channels (by the singular vectors of a sample text's queries, which `kvjax calibrate
    infinigen` finds once for a model), and those channels are used in which the prompt's queries have the largest sums of absolute
    values, and those in which its keys have: of either a `share` of the head dim, rounded down, so up to twice that in all. A layer's heads read as many tokens as on average have a score within `alpha` of their
    head's highest, and each takes its best. So what is selected is known before the layer begins, which is what
    moving it from the host takes: `offloaded(InfiniGen())`.

    Which channels these are follows the authors' accuracy code. (Their speed code takes the queries' alone; the paper adds both sums up
    and takes the largest.) Differences: the paper keeps the part of the query weights that the directions need; here the whole query projection is computed
    ahead. Query heads that share keys share their directions, and are averaged. A cache that begins without a prompt takes a
    profile's first directions. (The published code for Llama takes the first head's highest score
    for all heads; here each has its own, as in the paper.)

    Attributes:
        budget: tokens that a query reads at most: a number, or a fraction of prompt + new tokens (the paper caps at 0.2).
        alpha: α, how far below its head's highest score, scaled as in attention, a token's may be to count. 5 is published for Llama-2, 4
            for OPT.
        share: of the channels, that queries choose and that keys choose, one at least (the published scripts have 0.2, the default of
            the published code is 0.1).
        dense_layers: first layers, which read everything.
        profile: the directions: a `SkewProfile` or a file of one; "prompt" for those of the prompt's own queries; None for the profile
            that comes with kvjax for the model, and "prompt" for models that none comes for.
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="infinigen",
        paper=(
            "Lee et al. 2024, InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache Management"
        ),
        summary="every token, of which a query reads those that the layer before expects to matter",
        memory="sparse",
        stage="decoding",
    )

    budget: int | float = 0.2
    alpha: float = 5.0
    share: float = 0.2
    dense_layers: int = 2
    profile: SkewProfile | str | None = None

    def __post_init__(self) -> None:
        check_fields(self, alpha=0, dense_layers=0)
        if not 0 < self.share <= 1:
            raise PolicyError(
                f"{self.info.name}: share={self.share}; give a share of the channels, above 0 and up to 1"
            )
        if not isinstance(self.profile, SkewProfile | str | None):
            raise PolicyError(
                f"{self.info.name}: profile={self.profile!r}; give a SkewProfile, the file of one, or {PROMPT!r}"
            )

    def bind(self, config: ModelConfig) -> Policy:
        """The policy with the profile itself, or "prompt"."""
        if self.profile == PROMPT:
            return self
        found = find(self.info.name, config, self.profile, SkewProfile)
        return dataclasses.replace(self, profile=PROMPT if found is None else found)

    def validate(self, tokens: int) -> None:
        needs = f"but the newest and at least one other need {LEAST}; raise budget"
        check_least(self.info.name, self.budget, tokens, LEAST, needs, "tokens to read")

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        dense = reads_everything(spec, self.budget, self.dense_layers, LEAST)
        return DenseLayer(self, spec) if dense else InfiniGenLayer(self, spec)

    def directions(self, spec: LayerSpec) -> Float[Array, "K H H"] | None:
        """The profile's for this layer's heads, if there is a profile."""
        if not isinstance(self.profile, SkewProfile):
            return None
        matrices = self.profile.layer(spec.layer, spec.head_dim)
        return jnp.asarray(matrices)[spec.head_ids if spec.kv_heads is None else jnp.asarray(spec.kv_heads)]


@dataclasses.dataclass(frozen=True)
class InfiniGenLayer(SparseLayer[InfiniGen]):
    """One layer that reads what was seen a layer ahead; see `InfiniGen`."""

    @property
    def reduces_heads(self) -> bool:
        return True

    @property
    def selection_shape(self) -> tuple[int, int]:
        return self.spec.num_kv_heads, budget_tokens(self.policy.budget, self.spec.max_tokens, LEAST) - 1

    @property
    def always_kept(self) -> tuple[int, int]:
        return 0, 1

    def tail_start(self, state: SpeculativeCache) -> Int[Array, " B"]:
        return jnp.maximum(state.cache.seen - 1, 0)

    @property
    def bytes_read(self) -> int:
        """Bytes that one decoding step reads at most: partial keys, and keys and values of as many tokens as the budget allows."""
        spec = self.spec
        partial = (self.capacity + spec.head_dim) * self._channels
        pairs = self.slots_read * 2 * spec.head_dim
        return spec.batch * spec.num_kv_heads * (partial + pairs) * spec.dtype.itemsize

    def init(self, total: Int[Array, " B"] | None = None) -> SpeculativeCache:
        spec, kept, channels = self.spec, cache.empty(self.spec, self.capacity), self._channels
        vectors = self.policy.directions(spec)
        skew = jnp.eye(spec.head_dim, dtype=jnp.float32) if vectors is None else vectors
        return SpeculativeCache(
            cache=kept,
            skew=jnp.broadcast_to(skew[..., :channels].astype(spec.dtype), (*kept.next.shape, spec.head_dim, channels)),
            partial=jnp.zeros((*kept.pos.shape, channels), spec.dtype),
            budget=budget_rows(self.policy.budget, spec.totals(total), LEAST),
        )

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[SpeculativeCache, Carry]:
        spec, kept = self.spec, cache.from_prompt(self.spec, self.capacity, prompt)
        skew = self._skew(prompt.q_rotated, prompt.k_rotated, prompt.lengths).astype(spec.dtype)
        partial = jnp.einsum("bkch,bkhp->bkcp", kept.k, skew, preferred_element_type=jnp.float32)
        return SpeculativeCache(kept, skew, partial.astype(spec.dtype), self._budgets(prompt)), carry

    def append(self, state: SpeculativeCache, token: Token) -> SpeculativeCache:
        spec, key = self.spec, token.k_rotated.astype(self.spec.dtype)
        part = jnp.einsum("bkh,bkhp->bkp", key, state.skew, preferred_element_type=jnp.float32).astype(spec.dtype)
        rows = jnp.arange(spec.batch, dtype=jnp.int32)[:, None]
        heads = jnp.arange(spec.num_kv_heads, dtype=jnp.int32)[None, :]
        partial = state.partial.at[rows, heads, state.cache.next].set(part)
        return dataclasses.replace(super().append(state, token), partial=partial)

    def look_ahead(self, queries: Queries, position: Int[Array, " B"], carry: Carry) -> Carry:
        """Tells itself the rotated queries that it will select by."""
        return carry | {self.key: self.spec.rope.rotate(queries(), position[:, None])}

    def query(self, token: Token, carry: Carry) -> Rotated:
        return carry.get(self.key, token.query)

    def select(self, state: SpeculativeCache, query: Rotated) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """The tokens before the newest that score highest, best first; in all heads as many as are near the highest on average."""
        spec = self.spec
        heads = heads_of(query).astype(jnp.float32)
        mean = einops.reduce(heads, "b (k g) h -> b k h", "mean", k=spec.num_kv_heads)
        projected = jnp.einsum("bkh,bkhp->bkp", mean, state.skew.astype(jnp.float32))
        scores = jnp.einsum(
            "bkp,bkcp->bkc", projected.astype(spec.dtype), state.partial, preferred_element_type=jnp.float32
        )
        pos = jnp.arange(scores.shape[-1], dtype=jnp.int32)
        candidates = jnp.broadcast_to((pos < self.tail_start(state)[:, None])[:, None], scores.shape)
        scores = jnp.where(candidates, scores * spec.scale, -jnp.inf)
        near = candidates & (scores > jnp.max(scores, axis=-1, keepdims=True) - self.policy.alpha)
        near = spec.shard.sum_over_heads(jnp.sum(near, axis=(1, 2), dtype=jnp.int32))
        count = near // (spec.num_kv_heads * spec.shard.heads)
        count = jnp.clip(count, jnp.where(state.budget >= spec.max_tokens, state.budget - 1, 1), state.budget - 1)
        return best_pages(scores, candidates, count, self.selection_shape[1])

    def _budgets(self, prompt: PromptKV) -> Int[Array, " B"]:
        """Budget of each row; as many tokens as there can be where a row would read all of them alone, see `reads_everything`."""
        budget = budget_rows(self.policy.budget, prompt.total, LEAST)
        return jnp.where(reads_all(self.spec, prompt, budget), jnp.maximum(budget, self.spec.max_tokens), budget)

    def _skew(
        self, q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], lengths: Int[Array, " B"]
    ) -> Float[Array, "B K H P"]:
        """Of the directions, those in which a group's rotated queries and keys are largest."""
        spec = self.spec
        inside = prompt_mask(lengths, k.shape[1])[..., None, None]
        q, k = (jnp.where(inside, x, jnp.zeros((), x.dtype)).astype(jnp.float32) for x in (q, k))
        grouped = einops.rearrange(q, "b t (k g) h -> b t k g h", k=spec.num_kv_heads)
        vectors = self.policy.directions(spec)
        if vectors is None:  # the right singular vectors of all the prompt's queries
            sizes, vectors = jnp.linalg.eigh(jnp.einsum("btkgh,btkgi->bkhi", grouped, grouped, precision="highest"))
            if self._channels < spec.head_dim:
                # Those that no query has are any that are at right angles to the others: rounding would choose them.
                vectors = jnp.where((sizes > NOISE * sizes[..., -1:])[..., None, :], vectors, 0.0)
        vectors = jnp.broadcast_to(vectors, (spec.batch, *vectors.shape[-3:]))
        of_queries, of_keys = (
            jnp.sum(jnp.abs(jnp.einsum(f"{axes},bkhi->{axes[:-1]}i", x, vectors, precision="highest")), axis=summed)
            for x, axes, summed in ((grouped, "btkgh", (1, 3)), (k, "btkh", 1))
        )
        count = jnp.asarray(self._largest, jnp.int32)
        index, valid = cache.compact_indices(top_k(of_queries, count) | top_k(of_keys, count), self._channels)
        return jnp.where(valid[:, :, None], jnp.take_along_axis(vectors, index[:, :, None], axis=-1), 0.0)

    @property
    def _largest(self) -> int:
        """Channels that queries choose, and as many that keys choose."""
        return max(math.floor(Fraction(self.policy.share).limit_denominator(10_000) * self.spec.head_dim), 1)

    @property
    def _channels(self) -> int:
        """The most that both can have chosen."""
        return min(2 * self._largest, self.spec.head_dim)
