"""ShadowKV: a prompt's keys as a product of small matrices, its values wherever there is room, and what stands out exact."""

import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, Slots
from kvjax.pallas_kernels import DeferredRope, decode_attention, heads_of, top_k

from .base import Carry, PolicyError, Stage, State, budget_rows, budget_tokens, check_fields, rotated
from .pages import best_pages, paged, tokens_of
from .recalling import Recalling, gathered
from .registry import register


@flax.struct.dataclass
class Shadow:
    """A layer's cache. B rows, K KV heads, T prompt tokens, M chunks, r rank, C exact slots, H head dim.

    Attributes:
        slots: rotated keys, and values, of tokens that every query reads: outlier chunks, the prompt's end, and new tokens.
        v: values of all prompt tokens.
        coefficients, basis: the prompt's unrotated keys, as a product.
        landmarks: mean rotated key of every chunk.
        recallable: chunks that a query may select: those that are not exact.
        budget: chunks that a query selects.
    """

    slots: Slots
    v: Float[Array, "B K T H"]
    coefficients: Float[Array, "B T r"]
    basis: Float[Array, "B K r H"]
    landmarks: Float[Array, "B K M H"]
    recallable: Bool[Array, "B K M"]
    budget: Int[Array, " B"]


@register
@dataclasses.dataclass(frozen=True)
class ShadowKV(Recalling):
    """Keep a prompt's keys at low rank, and rebuild those of the chunks that a query likes (Sun et al. 2024, section 4, Algorithms 1, 2).

    Before they are rotated, a prompt's keys of all heads together have low rank: of their singular value decomposition `rank`
    components are kept. The prompt is cut into chunks, with the mean of its rotated keys as landmark. A KV head reads the chunks
    whose landmarks one of its queries attends to most (softmax over landmarks, the largest of the group); their keys are
    rebuilt and rotated, their values fetched. Exact are the chunks with the most unlike keys (by the least cosine of a key with
    the landmark), the prompt's last chunks, and all new tokens.

    Values are what is left of the full cache: `offloaded(ShadowKV())` keeps them in the host's memory, and moves those that are
    selected. Keys take rank / (K · H) of their memory. A layer whose prompt has no room for this keeps everything.

    Attributes:
        budget: prompt tokens that a query selects, in whole chunks, besides the exact ones: a number, or a fraction of prompt + new
            tokens.
        rank: r of the keys; all components where there are fewer.
        chunk: tokens in a chunk.
        outlier_chunks: chunks of each head that stay exact.
        local_chunks: last chunks of the prompt that stay exact, with what is left over after them.
    """

    name: ClassVar[str] = "shadowkv"
    paper: ClassVar[str] = (
        "Sun et al. 2024, ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference"
    )
    keeps: ClassVar[str] = (
        "the prompt's keys at low rank, all values, and exactly the chunks that stand out and new tokens"
    )
    stage: ClassVar[Stage] = "prompt"

    budget: int | float = 1024
    rank: int = 160
    chunk: int = 8
    outlier_chunks: int = 48
    local_chunks: int = 4

    def __post_init__(self) -> None:
        check_fields(self, rank=1, chunk=1, outlier_chunks=0, local_chunks=0)
        if isinstance(self.budget, int):
            self.check(0)

    def check(self, tokens: int) -> None:
        budget = budget_tokens(self.budget, tokens)
        if budget < self.chunk:
            raise PolicyError(
                f"{self.name}: a budget of {self.budget} gives {budget} tokens to select, fewer than a chunk of {self.chunk}; raise "
                "budget or lower chunk"
            )

    def recalls(self, spec: LayerSpec) -> bool:
        return self.selects(spec)[1] + self._exact(spec) < spec.prompt_len

    def selects(self, spec: LayerSpec) -> tuple[int, int]:
        chunks = min(budget_tokens(self.budget, spec.max_tokens) // self.chunk, self._chunks(spec))
        return spec.num_kv_heads, chunks * self.chunk

    def ends(self, spec: LayerSpec) -> tuple[int, int]:
        return 0, 0  # what every query reads is in a cache of its own

    def reads(self, spec: LayerSpec) -> int:
        return self.selects(spec)[1] if self.recalls(spec) else self.capacity(spec)

    def store(self, state: Shadow) -> tuple[Array, ...]:
        return (state.v,)

    def with_store(self, state: Shadow, store: tuple[Array, ...]) -> Shadow:
        return dataclasses.replace(state, v=store[0])

    def layer_bytes_read(self, spec: LayerSpec) -> int:
        """Bytes that one decoding step reads: exact slots, landmarks, and of what is selected coefficients and values."""
        if not self.recalls(spec):
            return super().layer_bytes_read(spec)
        heads, dim, rank = spec.num_kv_heads, spec.head_dim, self._rank(spec)
        exact = self._slots(spec) * 2 * dim
        selected = self.reads(spec) * (dim + rank)
        return spec.batch * heads * (exact + selected + (self._chunks(spec) + rank) * dim) * spec.dtype.itemsize

    def init(self, spec: LayerSpec) -> State:
        if not self.recalls(spec):
            return super().init(spec)
        heads = spec.batch, spec.num_kv_heads
        slots, chunks = cache.empty(spec, self._slots(spec)), self._chunks(spec)
        return Shadow(
            slots=slots,
            v=jnp.zeros((*heads, spec.prompt_len, spec.head_dim), spec.dtype),
            coefficients=jnp.zeros((spec.batch, spec.prompt_len, self._rank(spec)), spec.dtype),
            basis=jnp.zeros((*heads, self._rank(spec), spec.head_dim), spec.dtype),
            landmarks=jnp.zeros((*heads, chunks, spec.head_dim), spec.dtype),
            recallable=jnp.zeros((*heads, chunks), bool),
            budget=budget_rows(self.budget, jnp.full_like(slots.seen, spec.new_tokens)) // self.chunk,
        )

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[State, Carry]:
        if not self.recalls(spec):
            return super().prefill(spec, q, k, v, lengths, carry)
        size, turned = k.shape[1], rotated(spec, k)
        chunks = jnp.maximum(lengths // self.chunk - self.local_chunks, 0)
        landmarks, recallable = self._landmarks(turned, chunks, self._chunks(spec))
        exact = jnp.repeat(~recallable, self.chunk, axis=-1)[..., :size]
        slots, _ = cache.select(spec, self._slots(spec), turned, v, exact, lengths)
        inside = cache.in_prompt(lengths, size)
        coefficients, basis = low_rank(jnp.where(inside[..., None, None], k, jnp.zeros((), k.dtype)), self._rank(spec))
        values = jnp.where(inside[:, None, :, None], jnp.swapaxes(v, 1, 2), jnp.zeros((), v.dtype))
        state = Shadow(
            slots=slots,
            v=values.astype(spec.dtype),
            coefficients=coefficients.astype(spec.dtype),
            basis=basis.astype(spec.dtype),
            landmarks=landmarks.astype(spec.dtype),
            recallable=recallable,
            budget=budget_rows(self.budget, lengths + spec.new_tokens) // self.chunk,
        )
        return state, carry

    def selected(
        self, spec: LayerSpec, state: Shadow, q: Float[Array, "B N H"] | DeferredRope
    ) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """The tokens of the chunks whose landmarks get most attention, in the order of these."""
        grouped = heads_of(q).reshape(spec.batch, spec.num_kv_heads, -1, spec.head_dim)
        logits = jnp.einsum("bkgh,bkmh->bkgm", grouped, state.landmarks, preferred_element_type=jnp.float32)
        scores = jax.nn.softmax(logits * spec.scale, axis=-1, where=state.recallable[:, :, None])
        size = self.selects(spec)[1] // self.chunk
        chunks, live = best_pages(jnp.max(scores, axis=2), state.recallable, state.budget, size)
        return tokens_of(chunks, live, self.chunk)

    def attend(
        self, spec: LayerSpec, state: State, q: Float[Array, "B N H"], pos: Int[Array, " B"], carry: Carry
    ) -> tuple[Float[Array, "B N H"], State, Carry]:
        if not self.recalls(spec):
            return super().attend(spec, state, q, pos, carry)
        q = spec.rope.rotate(q, pos[:, None])
        index, live = self.selected(spec, state, q)
        values = jnp.take_along_axis(state.v, index[..., None], axis=2)
        return self.read(spec, state, q, pos, index, live, (values,)), state, carry

    def read(
        self,
        spec: LayerSpec,
        state: Shadow,
        q: Float[Array, "B N H"],
        pos: Int[Array, " B"],
        index: Int[Array, "B R S"],
        live: Bool[Array, "B R S"],
        got: tuple[Array, ...],
    ) -> Float[Array, "B N H"]:
        keys = self._keys(spec, state, index)
        recalled = gathered(keys.astype(spec.dtype), got[0], index, live, state.slots.seen)
        parts = [self._attended(spec, slots, q, pos) for slots in (recalled, state.slots)]
        share = jax.nn.sigmoid(parts[0].logsumexp - parts[1].logsumexp)[..., None]
        out, exact = (part.out.astype(jnp.float32) for part in parts)
        return (share * out + (1 - share) * exact).astype(q.dtype)

    def slots(self, spec: LayerSpec, state: State) -> Slots:
        """Everything: the prompt's keys rebuilt where they are not exact."""
        if isinstance(state, Slots):
            return state
        size = state.v.shape[2]
        index = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), state.v.shape[:3])
        live = jnp.repeat(state.recallable, self.chunk, axis=-1)[..., :size]
        keys = self._keys(spec, state, index).astype(spec.dtype)
        rebuilt = gathered(keys, state.v, index, live, state.slots.seen)

        def joined(name: str) -> Array:
            return jnp.concatenate([getattr(rebuilt, name), getattr(state.slots, name)], axis=2)

        return Slots(joined("k"), joined("v"), joined("pos"), joined("weight"), state.slots.next, state.slots.seen)

    def _attended(self, spec: LayerSpec, slots: Slots, q: Array, pos: Array) -> Any:
        weight = slots.weight
        if spec.window is not None:
            weight = jnp.where(slots.pos > pos[:, None, None] - spec.window, weight, 0.0)
        return decode_attention(q, slots.k, slots.v, weight, scale=spec.scale)

    def _keys(self, spec: LayerSpec, state: Shadow, index: Int[Array, "B K S"]) -> Float[Array, "B K S H"]:
        """Rotated keys of prompt tokens, rebuilt."""
        rows = jnp.arange(spec.batch, dtype=jnp.int32)[:, None, None]
        keys = jnp.einsum(
            "bksr,bkrh->bksh",
            state.coefficients[rows, index],
            state.basis,
            preferred_element_type=jnp.float32,
            precision="highest",
        )
        return spec.rope.rotate(keys, index)

    def _landmarks(
        self, keys: Float[Array, "B T K H"], chunks: Int[Array, " B"], size: int
    ) -> tuple[Float[Array, "B K M H"], Bool[Array, "B K M"]]:
        """The mean key of every one of the first `chunks` chunks, and whether it is no outlier."""
        parts, inside = paged(keys.astype(jnp.float32), chunks * self.chunk, self.chunk, size)
        parts = jnp.where(inside, parts, 0.0)
        means = jnp.mean(parts, axis=3)
        lengths = jnp.linalg.norm(parts, axis=-1) * jnp.linalg.norm(means, axis=-1)[..., None]
        cosine = jnp.einsum("bkmch,bkmh->bkmc", parts, means, precision="highest") / jnp.maximum(lengths, 1e-12)
        exists = (jnp.arange(size, dtype=jnp.int32) < chunks[:, None])[:, None]
        unlike = jnp.where(exists, -jnp.min(cosine, axis=-1), -jnp.inf)
        return means, exists & ~top_k(unlike, jnp.full_like(chunks, self.outlier_chunks)[:, None])

    def _rank(self, spec: LayerSpec) -> int:
        return min(self.rank, spec.num_kv_heads * spec.head_dim)

    def _chunks(self, spec: LayerSpec) -> int:
        """Chunks that the longest prompt has."""
        return -(-spec.prompt_len // self.chunk)

    def _exact(self, spec: LayerSpec) -> int:
        """The most prompt tokens that stay exact."""
        return (self.outlier_chunks + self.local_chunks + 1) * self.chunk

    def _slots(self, spec: LayerSpec) -> int:
        return cache.round_slots(self._exact(spec) + spec.new_tokens)


def low_rank(k: Float[Array, "B T K H"], rank: int) -> tuple[Float[Array, "B T r"], Float[Array, "B K r H"]]:
    """The best approximation of keys, as a matrix of T rows for all heads together, by a product of rank `rank`, in float32.

    Args:
        k: zeros where there is no token.

    Returns:
        U Σ and Vᵀ of the singular value decomposition. They come from the eigenvectors of KᵀK, which has the size of a token.
    """
    batch, size, heads, dim = k.shape
    flat = k.astype(jnp.float32).reshape(batch, size, heads * dim)
    gram = jnp.einsum("btx,bty->bxy", flat, flat, precision="highest")
    basis = jnp.swapaxes(jnp.linalg.eigh(gram)[1][..., -rank:], 1, 2)
    coefficients = jnp.einsum("btx,brx->btr", flat, basis, precision="highest")
    return coefficients, jnp.swapaxes(basis.reshape(batch, rank, heads, dim), 1, 2)
