"""ShadowKV: low-rank keys of the prompt, values that can be offloaded, and exact outliers."""

import dataclasses
from typing import Any, ClassVar

import einops
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Rotated, Token
from kvjax.pallas_kernels import decode_attention, heads_of, top_k
from kvjax.pallas_kernels.sinks import with_sinks

from .base import Policy
from .budget import budget_rows, budget_tokens, check_least
from .families.dense import DenseLayer
from .families.pages import best_pages, paged, slots_of
from .families.sparse import SparseLayer, gathered
from .fields import check_fields
from .info import PolicyInfo
from .layer import CacheLayer, Carry
from .registry import register


@flax.struct.dataclass
class ShadowCache:
    """A ShadowKV cache. B rows, K KV heads, T prompt tokens, M chunks, r rank, C exact slots, H head dim.

    Attributes:
        cache: rotated keys, and values, of tokens that every query reads: outlier chunks, the prompt's end, and new
            tokens.
        v: values of all prompt tokens.
        coefficients, basis: factors of the prompt's unrotated keys.
        landmarks: mean rotated key of every chunk.
        selectable: chunks that a query may select, those that are not exact.
        budget: number of chunks that a query selects.
    """

    cache: LayerCache
    v: Float[Array, "B K T H"]
    coefficients: Float[Array, "B T r"]
    basis: Float[Array, "B K r H"]
    landmarks: Float[Array, "B K M H"]
    selectable: Bool[Array, "B K M"]
    budget: Int[Array, " B"]


@register
@dataclasses.dataclass(frozen=True)
class ShadowKV(Policy):
    """Keep low-rank keys, and rebuild those of selected chunks (Sun et al. 2024, section 4, Algorithms 1 and 2).

    Unrotated keys of all heads together have low rank. `rank` components of their singular value decomposition are
    kept. The prompt is cut into chunks, and the mean rotated key of a chunk is its landmark. A KV head reads the chunks
    whose landmarks receive the most attention from one of its queries (softmax over landmarks, maximum over the group).
    Their keys are rebuilt and rotated, and their values fetched. Exact are the chunks with the most dissimilar keys (by
    the minimum cosine of a key with the landmark), the prompt's last chunks, and all new tokens.

    Values remain in full: `offloaded(ShadowKV())` keeps them in host memory, and fetches selected ones. Keys need rank
    / (K · H) of their memory. A layer keeps everything if the selection and the exact chunks would cover the prompt.

    Attributes:
        budget: prompt tokens that a query selects, in whole chunks, besides the exact ones: a number, or a fraction of
            prompt + new tokens.
        rank: r, rank of the keys, at most the number of components.
        chunk: tokens in a chunk.
        outlier_chunks: chunks of each head that stay exact.
        local_chunks: last chunks of the prompt that stay exact, with the remainder after them.

    Example:
        >>> policy = kvjax.ShadowKV(budget=64, rank=8, outlier_chunks=2)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.bytes_read(*sizes) / kvjax.Full().bytes_read(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes that a step reads
        ('shadowkv:budget=64,rank=8,outlier_chunks=2', 0.63)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="shadowkv",
        paper="Sun et al. 2024, ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference",
        summary="the prompt's keys at low rank, all values, and exactly the chunks that stand out and new tokens",
        memory="sparse",
        stage="prompt",
        heads_coupled=True,
    )

    budget: int | float = 1024
    rank: int = 160
    chunk: int = 8
    outlier_chunks: int = 48
    local_chunks: int = 4

    def __post_init__(self) -> None:
        check_fields(self, rank=1, chunk=1, outlier_chunks=0, local_chunks=0)

    def validate(self, tokens: int) -> None:
        needs = f"fewer than a chunk of {self.chunk}. Raise budget or lower chunk."
        check_least(self.info.name, self.budget, tokens, self.chunk, needs, "tokens to select")

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        layer = ShadowKVLayer(self, spec)
        return layer if layer.selection_shape[1] + layer.exact < spec.prompt_len else DenseLayer(self, spec)


@dataclasses.dataclass(frozen=True)
class ShadowKVLayer(SparseLayer[ShadowKV]):
    """A layer that rebuilds keys, see `ShadowKV`."""

    @property
    def exact(self) -> int:
        """Maximum number of prompt tokens that stay exact."""
        return (self.policy.outlier_chunks + self.policy.local_chunks + 1) * self.policy.chunk

    @property
    def chunks(self) -> int:
        """Number of chunks of the longest prompt."""
        return -(-self.spec.prompt_len // self.policy.chunk)

    @property
    def rank(self) -> int:
        """Rank of the keys: `ShadowKV.rank`, or the number of components."""
        return min(self.policy.rank, self.spec.num_kv_heads * self.spec.head_dim)

    @property
    def capacity(self) -> int:
        return cache.round_slots(self.exact + self.spec.new_tokens)

    @property
    def selection_shape(self) -> tuple[int, int]:
        chunk = self.policy.chunk
        budget = budget_tokens(self.policy.budget, self.spec.max_tokens, chunk)
        return self.spec.num_kv_heads, min(budget // chunk, self.chunks) * chunk

    @property
    def always_kept(self) -> tuple[int, int]:
        return 0, 0  # tokens that every query reads are in a separate cache

    @property
    def slots_read(self) -> int:
        return self.selection_shape[1]

    def store(self, state: ShadowCache) -> tuple[Array, ...]:
        return (state.v,)

    def with_store(self, state: ShadowCache, store: tuple[Array, ...]) -> ShadowCache:
        return dataclasses.replace(state, v=store[0])

    @property
    def bytes_read(self) -> int:
        """Bytes that a decoding step reads: exact slots, landmarks, and coefficients and values of selected tokens."""
        spec, dim = self.spec, self.spec.head_dim
        numbers = self.capacity * 2 * dim + self.slots_read * (dim + self.rank) + (self.chunks + self.rank) * dim
        return spec.batch * spec.num_kv_heads * numbers * spec.dtype.itemsize

    def init(self, total: Int[Array, " B"] | None = None) -> ShadowCache:
        spec, kept = self.spec, cache.empty(self.spec, self.capacity)
        heads = spec.batch, spec.num_kv_heads
        return ShadowCache(
            cache=kept,
            v=jnp.zeros((*heads, spec.prompt_len, spec.head_dim), spec.dtype),
            coefficients=jnp.zeros((spec.batch, spec.prompt_len, self.rank), spec.dtype),
            basis=jnp.zeros((*heads, self.rank, spec.head_dim), spec.dtype),
            landmarks=jnp.zeros((*heads, self.chunks, spec.head_dim), spec.dtype),
            selectable=jnp.zeros((*heads, self.chunks), bool),
            budget=self._budget(spec.totals(total)),
        )

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[ShadowCache, Carry]:
        policy, spec, k, v = self.policy, self.spec, prompt.k, prompt.v
        chunks = jnp.maximum(prompt.lengths // policy.chunk - policy.local_chunks, 0)
        landmarks, selectable = self._landmarks(prompt.k_rotated, chunks)
        exact = jnp.repeat(~selectable, policy.chunk, axis=-1)[..., : prompt.size]
        kept, _ = cache.keep(spec, self.capacity, prompt, exact)
        inside = prompt.mask
        coefficients, basis = low_rank(jnp.where(inside[..., None, None], k, jnp.zeros((), k.dtype)), self.rank)
        values = jnp.where(inside[:, None, :, None], jnp.swapaxes(v, 1, 2), jnp.zeros((), v.dtype))
        state = ShadowCache(
            cache=kept,
            v=values.astype(spec.dtype),
            coefficients=coefficients.astype(spec.dtype),
            basis=basis.astype(spec.dtype),
            landmarks=landmarks.astype(spec.dtype),
            selectable=selectable,
            budget=self._budget(prompt.total),
        )
        return state, carry

    def query(self, token: Token, carry: Carry) -> Rotated:
        return token.q_rotated  # materialised, because attention reads it twice as well

    def select(self, state: ShadowCache, query: Rotated) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """Return the tokens of the chunks whose landmarks get the most attention, in the order of the chunks."""
        spec, chunk = self.spec, self.policy.chunk
        grouped = einops.rearrange(heads_of(query), "b (k g) h -> b k g h", k=spec.num_kv_heads)
        logits = jnp.einsum("bkgh,bkmh->bkgm", grouped, state.landmarks, preferred_element_type=jnp.float32)
        scores = jax.nn.softmax(logits * spec.scale, axis=-1, where=state.selectable[:, :, None])
        size = self.selection_shape[1] // chunk
        return slots_of(*best_pages(jnp.max(scores, axis=2), state.selectable, state.budget, size), chunk)

    def attend(
        self, state: ShadowCache, token: Token, carry: Carry
    ) -> tuple[Float[Array, "B N H"], ShadowCache, Carry]:
        index, valid = self.select(state, self.query(token, carry))
        values = jnp.take_along_axis(state.v, index[..., None], axis=2)
        return self.attend_to(state, token, index, valid, (values,)), state, carry

    def attend_to(
        self,
        state: ShadowCache,
        token: Token,
        index: Int[Array, "B R S"],
        valid: Bool[Array, "B R S"],
        fetched: tuple[Array, ...],
    ) -> Float[Array, "B N H"]:
        keys = self._keys(state, index)
        rebuilt = gathered(keys.astype(self.spec.dtype), fetched[0], index, valid, state.cache.seen)
        parts = [self._attended(kept, token) for kept in (rebuilt, state.cache)]
        share = jax.nn.sigmoid(parts[0].logsumexp - parts[1].logsumexp)[..., None]
        out, exact = (part.out.astype(jnp.float32) for part in parts)
        total = jnp.logaddexp(parts[0].logsumexp, parts[1].logsumexp)
        return with_sinks(share * out + (1 - share) * exact, total, token.sinks).astype(token.q.dtype)

    def view(self, state: ShadowCache) -> LayerCache:
        """All tokens, with the prompt's keys rebuilt where they are not exact."""
        size, kept = state.v.shape[2], state.cache
        index = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), state.v.shape[:3])
        valid = jnp.repeat(state.selectable, self.policy.chunk, axis=-1)[..., :size]
        keys = self._keys(state, index).astype(self.spec.dtype)
        rebuilt = gathered(keys, state.v, index, valid, kept.seen)

        def joined(name: str) -> Array:
            return jnp.concatenate([getattr(rebuilt, name), getattr(kept, name)], axis=2)

        return LayerCache(joined("k"), joined("v"), joined("pos"), joined("weight"), kept.next, kept.seen)

    def _attended(self, kept: LayerCache, token: Token) -> Any:
        weight = kept.weight
        if self.spec.window is not None:
            weight = jnp.where(kept.pos > token.position[:, None, None] - self.spec.window, weight, 0.0)
        return decode_attention(token.q_rotated, kept.k, kept.v, weight, scale=self.spec.scale)

    def _keys(self, state: ShadowCache, index: Int[Array, "B K S"]) -> Float[Array, "B K S H"]:
        """Rebuild rotated keys of prompt tokens."""
        rows = jnp.arange(self.spec.batch, dtype=jnp.int32)[:, None, None]
        keys = jnp.einsum(
            "bksr,bkrh->bksh",
            state.coefficients[rows, index],
            state.basis,
            preferred_element_type=jnp.float32,
            precision="highest",
        )
        return self.spec.rope.rotate(keys, index)

    def _landmarks(
        self, keys: Float[Array, "B T K H"], chunks: Int[Array, " B"]
    ) -> tuple[Float[Array, "B K M H"], Bool[Array, "B K M"]]:
        """Return the mean key of each of the first `chunks` chunks, and whether the chunk is selectable."""
        chunk = self.policy.chunk
        parts, inside = paged(keys.astype(jnp.float32), chunks * chunk, chunk, self.chunks)
        parts = jnp.where(inside, parts, 0.0)
        means = jnp.mean(parts, axis=3)
        lengths = jnp.linalg.norm(parts, axis=-1) * jnp.linalg.norm(means, axis=-1)[..., None]
        cosine = jnp.einsum("bkmch,bkmh->bkmc", parts, means, precision="highest") / jnp.maximum(lengths, 1e-12)
        exists = (jnp.arange(self.chunks, dtype=jnp.int32) < chunks[:, None])[:, None]
        unlike = jnp.where(exists, -jnp.min(cosine, axis=-1), -jnp.inf)
        return means, exists & ~top_k(unlike, jnp.full_like(chunks, self.policy.outlier_chunks)[:, None])

    def _budget(self, tokens: Int[Array, " B"]) -> Int[Array, " B"]:
        """Number of chunks that a query selects in each row, for sequences of `tokens` tokens."""
        return budget_rows(self.policy.budget, tokens, self.policy.chunk) // self.policy.chunk


def low_rank(k: Float[Array, "B T K H"], rank: int) -> tuple[Float[Array, "B T r"], Float[Array, "B K r H"]]:
    """Approximate keys by a product of rank `rank`, in float32: the optimum for all heads as one matrix of T rows.

    Args:
        k: keys, zeros where there is no token.
        rank: rank of the product.

    Returns:
        U Σ and Vᵀ of the singular value decomposition, computed from the eigenvectors of KᵀK, which is [K · H, K · H].
    """
    flat = einops.rearrange(k.astype(jnp.float32), "b t k h -> b t (k h)")
    gram = jnp.einsum("btx,bty->bxy", flat, flat, precision="highest")
    basis = jnp.swapaxes(jnp.linalg.eigh(gram)[1][..., -rank:], 1, 2)
    coefficients = jnp.einsum("btx,brx->btr", flat, basis, precision="highest")
    return coefficients, einops.rearrange(basis, "b r (k h) -> b k r h", h=k.shape[-1])
