"""InfiniGen: a layer's selection is predicted during the previous layer, from a few channels of queries and keys."""

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

from .base import Policy
from .budget import budget_rows, budget_tokens, check_least
from .families.dense import DenseLayer
from .families.pages import best_pages
from .families.skewing import SkewProfile
from .families.sparse import SparseLayer, reads_all, reads_everything
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .layer import CacheLayer, Carry, Queries
from .profile import find
from .registry import register

PROMPT = "prompt"
"""Value of `profile` that derives the directions from the prompt's own queries."""

NOISE = 1e-5
"""Threshold relative to the largest squared singular value, below which a direction is rounding noise."""


@flax.struct.dataclass
class SpeculativeCache:
    """All tokens of a layer, token p in slot p, with partial keys. B rows, K KV heads, C slots, H head dim, P channels.

    Attributes:
        cache: rotated keys, and values.
        skew: directions in which rotated queries and keys are scored.
        partial: keys in these directions. Columns are zero if queries and keys selected fewer than P directions.
        budget: maximum number of tokens that a query reads, including the newest.
    """

    cache: LayerCache
    skew: Float[Array, "B K H P"]
    partial: Float[Array, "B K C P"]
    budget: Int[Array, " B"]


LEAST = 2
"""Minimum number of tokens that a query reads: the newest, and another one."""


@register
@dataclasses.dataclass(frozen=True)
class InfiniGen(Policy):
    """Keep everything, and read the tokens predicted to matter one layer ahead (Lee et al. 2024, section 4).

    While a layer computes, the next layer's queries are predicted: its query weights are applied to this layer's
    attention input, which changes little from layer to layer. Scores are computed in a few directions only:

    1. Each head's queries and keys are rotated so that few channels have most of their magnitude. The rotation is given
       by the singular vectors of a sample text's queries, which `kvjax calibrate infinigen` computes once per model.
    2. Channels are selected with the largest sums of absolute values over the prompt's queries, and over its keys. Each
       of the two selects a `share` of the head dim, rounded down. The union has up to twice as many.
    3. The number of tokens to read is the average over heads of the tokens whose score is within `alpha` of their
       head's highest. Each head reads its highest-scoring ones.

    The selection is known before the layer begins, which gives time to fetch it from host memory:
    `offloaded(InfiniGen())`.

    The choice of channels follows the authors' accuracy code. (Their speed code uses queries only. The paper adds both
    sums and takes the largest.) Differences: the paper keeps only the part of the query weights that the directions
    need, but here the whole query projection is computed ahead. Query heads that share keys share their directions, and
    are averaged. A cache without a prompt uses a profile's first directions. (The published code for Llama uses the
    first head's highest score for all heads. Here each head has its own, as in the paper.)

    Attributes:
        budget: maximum number of tokens that a query reads: a number, or a fraction of prompt + new tokens (the paper's
            cap is 0.2).
        alpha: α, how far below its head's highest score, scaled as in attention, a token's score may be to count.
            Published values are 5 for Llama-2 and 4 for OPT.
        share: share of the channels that queries select, and that keys select, at least one (0.2 in the published
            scripts, 0.1 by default in the published code).
        dense_layers: first layers, which read everything.
        profile: the directions: a `SkewProfile`, the path of one, or "prompt" for directions of the prompt's own
            queries. None uses the profile that comes with kvjax for the model, or "prompt" if there is none.

    Example:
        >>> policy = kvjax.InfiniGen(budget=0.25, dense_layers=0)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.bytes_read(*sizes) / kvjax.Full().bytes_read(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes that a step reads
        ('infinigen:budget=0.25,dense_layers=0', 0.43)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="infinigen",
        paper=(
            "Lee et al. 2024, InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache Management"
        ),
        summary="every token; a query reads those that the layer before expects to matter",
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
                f"{self.info.name}: share={self.share} is out of range. Give a share of the channels above 0 and up to 1."
            )
        if not isinstance(self.profile, SkewProfile | str | None):
            raise PolicyError(
                f"{self.info.name}: profile={self.profile!r} is not valid. Give a SkewProfile, its path, or {PROMPT!r}."
            )

    def bind(self, config: ModelConfig) -> Policy:
        """Return the policy with its profile loaded, or with "prompt"."""
        if self.profile == PROMPT:
            return self
        found = find(self.info.name, config, self.profile, SkewProfile)
        return dataclasses.replace(self, profile=PROMPT if found is None else found)

    def validate(self, tokens: int) -> None:
        needs = f"but the newest and at least one other need {LEAST}. Raise budget."
        check_least(self.info.name, self.budget, tokens, LEAST, needs, "tokens to read")

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        dense = reads_everything(spec, self.budget, self.dense_layers, LEAST)
        return DenseLayer(self, spec) if dense else InfiniGenLayer(self, spec)

    def directions(self, spec: LayerSpec) -> Float[Array, "K H H"] | None:
        """The profile's directions for this layer's heads, or None without a profile."""
        if not isinstance(self.profile, SkewProfile):
            return None
        matrices = self.profile.layer(spec.layer, spec.head_dim)
        return jnp.asarray(matrices)[spec.head_ids if spec.kv_heads is None else jnp.asarray(spec.kv_heads)]


@dataclasses.dataclass(frozen=True)
class InfiniGenLayer(SparseLayer[InfiniGen]):
    """A layer that reads what was selected one layer ahead, see `InfiniGen`."""

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
        """Maximum number of bytes that one decoding step reads: partial keys, and keys and values within the budget."""
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
        partial = state.partial.at[rows, heads, token.slot(state.cache.next)].set(part, mode="drop")
        return dataclasses.replace(super().append(state, token), partial=partial)

    def look_ahead(self, queries: Queries, position: Int[Array, " B"], carry: Carry) -> Carry:
        """Put the rotated queries to select by into the carry."""
        return carry | {self.key: self.spec.rope.rotate(queries(), position[:, None])}

    def query(self, token: Token, carry: Carry) -> Rotated:
        return carry.get(self.key, token.query)

    def select(self, state: SpeculativeCache, query: Rotated) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """Return the highest-scoring tokens before the newest, best first.

        All heads select equally many: the average number of scores near their head's highest.
        """
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
        """Budget of each row, raised to the maximum if the row alone would read everything."""
        budget = budget_rows(self.policy.budget, prompt.total, LEAST)
        return jnp.where(reads_all(self.spec, prompt, budget), jnp.maximum(budget, self.spec.max_tokens), budget)

    def _skew(
        self, q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], lengths: Int[Array, " B"]
    ) -> Float[Array, "B K H P"]:
        """The directions in which a group's rotated queries and keys are largest."""
        spec = self.spec
        inside = prompt_mask(lengths, k.shape[1])[..., None, None]
        q, k = (jnp.where(inside, x, jnp.zeros((), x.dtype)).astype(jnp.float32) for x in (q, k))
        grouped = einops.rearrange(q, "b t (k g) h -> b t k g h", k=spec.num_kv_heads)
        vectors = self.policy.directions(spec)
        if vectors is None:  # the right singular vectors of all the prompt's queries
            sizes, vectors = jnp.linalg.eigh(jnp.einsum("btkgh,btkgi->bkhi", grouped, grouped, precision="highest"))
            if self._channels < spec.head_dim:
                # Directions without queries are an arbitrary orthogonal complement, so rounding would select among them.
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
        """Number of channels that queries select. Keys select as many."""
        return max(math.floor(Fraction(self.policy.share).limit_denominator(10_000) * self.spec.head_dim), 1)

    @property
    def _channels(self) -> int:
        """Maximum number of channels that both select together."""
        return min(2 * self._largest, self.spec.head_dim)
