"""ClusterKV: every query recalls the clusters of keys that point its way."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, Slots
from kvjax.pallas_kernels import Always, DeferredRope, centroid_scores, cluster_tokens, heads_of, kmeans

from .base import Carry, Due, PolicyError, Stage, State, budget_rows, budget_tokens, check_fields
from .recalling import Recalling
from .registry import register


@flax.struct.dataclass
class Clusters:
    """All tokens of a layer, token p in slot p, and their clusters. B rows, K KV heads, C slots, M clusters, H head dim.

    Attributes:
        slots: rotated keys, and values.
        centroids: mean of a cluster's keys, in float32.
        sizes: tokens of a cluster.
        starts: where a cluster's tokens begin in `order`.
        order: slots sorted by cluster: sinks first, then the clusters one after the other, each ascending, then the tail.
        clusters: how many clusters a row has.
        clustered: tokens a row has in sinks and clusters; those from here on are its tail.
        budget: tokens that a query reads besides the tail.
    """

    slots: Slots
    centroids: Float[Array, "B K M H"]
    sizes: Int[Array, "B K M"]
    starts: Int[Array, "B K M"]
    order: Int[Array, "B K C"]
    clusters: Int[Array, " B"]
    clustered: Int[Array, " B"]
    budget: Int[Array, " B"]


@register
@dataclasses.dataclass(frozen=True)
class ClusterKV(Recalling):
    """Keep everything, cluster it by key, and read the clusters whose centroids a query likes best (Liu et al. 2024).

    After the prompt, k-means groups the keys of each KV head (section III-B); the first tokens stay apart. A query ranks the
    clusters by its inner product with their centroids and reads them in that order until the budget is full; the last
    one is cut, latest tokens first (sections III-C and IV-C). It also reads the sinks and all tokens that are in no cluster
    yet: those generated since the last time that `window` of them were grouped into clusters of their own.

    Nothing is forgotten, so memory is that of the full cache and a little more; what is saved is reading it. A layer whose
    budget covers the whole sequence keeps no clusters and reads everything. In layers with a sliding window, recalled tokens
    outside of it are not attended to.

    Attributes:
        budget: tokens that a query reads, sinks included and the tail not: a number, or a fraction of prompt + new tokens.
        sinks: first tokens, always read.
        exempt: first layers, which read everything (section V-A).
        tokens_per_cluster: prompt tokens to one cluster: 80, the paper's L / 80.
        n_clusters: clusters of a prompt of any length, instead.
        iterations: of k-means; a fixed number of them, as in the authors' code.
        window: generated tokens that are clustered together.
        new_clusters: clusters that they form.
        cluster_decode: whether generated tokens are clustered at all; otherwise all of them are always read.
        gqa: "query_head" recalls for each query head, "mean" for each KV head by the mean of its queries.
        distance: of k-means; section V-B compares "cosine", "l2" and "ip" (inner product).
        seed: of the choice of keys, without replacement in each head, that k-means starts from.
    """

    name: ClassVar[str] = "clusterkv"
    paper: ClassVar[str] = "Liu et al. 2024, ClusterKV: Manipulating LLM KV Cache in Semantic Space"
    keeps: ClassVar[str] = "every token, of which a query reads the clusters of keys nearest to it"
    stage: ClassVar[Stage] = "both"

    budget: int | float = 1024
    sinks: int = 16
    exempt: int = 2
    tokens_per_cluster: int = 80
    n_clusters: int | None = None
    iterations: int = 20
    window: int = 320
    new_clusters: int = 4
    cluster_decode: bool = True
    gqa: Literal["query_head", "mean"] = "query_head"
    distance: Literal["cosine", "l2", "ip"] = "cosine"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(
            self,
            sinks=0,
            exempt=0,
            tokens_per_cluster=1,
            n_clusters=1,
            iterations=1,
            window=1,
            new_clusters=1,
        )
        if isinstance(self.budget, int):
            self.check(0)

    def check(self, tokens: int) -> None:
        budget = budget_tokens(self.budget, tokens)
        if budget <= self.sinks:
            raise PolicyError(
                f"{self.name}: a budget of {self.budget} gives {budget} tokens to read, but {self.sinks} sinks and at least one "
                f"recalled token need {self.sinks + 1}; raise budget or lower sinks"
            )

    def recalls(self, spec: LayerSpec) -> bool:
        return spec.layer >= self.exempt and budget_tokens(self.budget, spec.max_tokens) < spec.max_tokens

    def selects(self, spec: LayerSpec) -> tuple[int, int]:
        heads = spec.num_kv_heads if self.gqa == "mean" else spec.num_heads
        return heads, budget_tokens(self.budget, spec.max_tokens) - self.sinks

    def ends(self, spec: LayerSpec) -> tuple[int, int]:
        return self.sinks, self._tail(spec)

    def tail(self, state: Clusters) -> Int[Array, " B"]:
        return state.clustered

    def layer_bytes_read(self, spec: LayerSpec) -> int:
        """Bytes of keys, values and cluster metadata that one decoding step reads.

        Read more than once, a byte counts as often: each query head gathers its own selection.
        """
        if not self.recalls(spec):
            return super().layer_bytes_read(spec)
        heads, _ = self.selects(spec)
        indices = 4 * heads * (2 * self._clusters(spec) + self.reads(spec))  # sizes, starts and order
        centroids = 4 * spec.num_kv_heads * self._clusters(spec) * spec.head_dim
        pairs = heads * self.reads(spec) * 2 * spec.head_dim * spec.dtype.itemsize
        return spec.batch * (pairs + centroids + indices)

    def init(self, spec: LayerSpec) -> State:
        slots = cache.empty(spec, self.capacity(spec))
        if not self.recalls(spec):
            return slots
        return self._unclustered(
            spec, slots, budget_rows(self.budget, jnp.full((spec.batch,), spec.new_tokens, jnp.int32))
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
        slots, carry = super().prefill(spec, q, k, v, lengths, carry)
        if not self.recalls(spec):
            return slots, carry
        state = self._unclustered(spec, slots, budget_rows(self.budget, lengths + spec.new_tokens))
        tokens = k.shape[1]
        pos = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (spec.batch, tokens))
        inside = (pos >= self.sinks) & (pos < lengths[:, None])
        count = self._prompt_clusters(lengths)
        centroids, labels = self._cluster(spec, slots.k[:, :, :tokens], pos, inside, count, state.sizes.shape[-1])
        # Sinks come before all clusters, and padding after them.
        sizes, starts, order = _index(jnp.where(pos[:, None] < self.sinks, -1, labels), state.sizes.shape[-1])
        return (
            dataclasses.replace(
                state,
                centroids=centroids,
                sizes=sizes,
                starts=starts,
                order=state.order.at[:, :, :tokens].set(order),
                clusters=count,
                clustered=jnp.maximum(lengths, self.sinks).astype(jnp.int32),
            ),
            carry,
        )

    def due(self, spec: LayerSpec, state: State) -> Due:
        """Rows whose tail has reached `window` tokens."""
        if not (self.recalls(spec) and self.cluster_decode and spec.new_tokens >= self.window):
            return "never"
        return state.slots.seen - state.clustered >= self.window

    def regroup(self, spec: LayerSpec, state: State, keys: Callable[[Array], Array]) -> State:
        """The state with the tail clustered in rows where it has reached `window` tokens (section III-B)."""
        due = self.due(spec, state)
        if isinstance(due, str):
            return state
        # The store itself does not pass through the branches, which would copy it.
        metadata = dataclasses.replace(state, slots=None)
        grouped = jax.lax.cond(jnp.any(due), lambda m: self._cluster_tail(spec, keys, m, due), lambda m: m, metadata)
        return dataclasses.replace(grouped, slots=state.slots)

    def selected(
        self, spec: LayerSpec, state: Clusters, q: Float[Array, "B N H"] | DeferredRope
    ) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """The tokens of the clusters that rotated queries like best, in the order in which they are taken (section IV-C)."""
        return self._taken(spec, state, q, None)

    def recall(
        self, spec: LayerSpec, state: Clusters, q: Float[Array, "B N H"] | DeferredRope
    ) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        always = Always(*self.ends(spec), self.tail(state), state.slots.seen, self.reads(spec))
        return self._taken(spec, state, q, always)

    def _taken(
        self, spec: LayerSpec, state: Clusters, q: Float[Array, "B N H"] | DeferredRope, always: Always | None
    ) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """The tokens of the best clusters, and what is always read besides."""
        heads, size = self.selects(spec)
        if self.gqa == "mean":
            grouped = heads_of(q).reshape(spec.batch, spec.num_kv_heads, -1, spec.head_dim).astype(jnp.float32)
            q = jnp.mean(grouped, axis=2)
        scores = centroid_scores(q, state.centroids)
        room = jnp.maximum(state.budget - self.sinks, 0)
        taken = cluster_tokens(scores, state.sizes, state.starts, state.order, room, size, always)
        index, live = (x.reshape(spec.batch, heads, -1) for x in taken)
        return index, live

    def shuffled(self, spec: LayerSpec, pos: Int[Array, "B T"], inside: Bool[Array, "B T"]) -> Int[Array, "B K T"]:
        """Places in `pos`, in the random order in which k-means takes them for its first centroids; `inside` ones first.

        A token's rank depends on its position, head, layer and `seed` alone, hence not on padding or on other rows.
        """
        layer = jnp.asarray(spec.layer, jnp.int32)
        return _shuffled(spec.num_kv_heads, spec.max_tokens, self.seed, layer, pos, inside)

    def _cluster(
        self,
        spec: LayerSpec,
        keys: Float[Array, "B K T H"],
        pos: Int[Array, "B T"],
        inside: Bool[Array, "B T"],
        count: Int[Array, " B"],
        size: int,
    ) -> tuple[Float[Array, "B K M H"], Int[Array, "B K T"]]:
        """k-means over the tokens `inside`, from `count` random ones of them; arrays are for `size` clusters."""
        first = self.shuffled(spec, pos, inside)[:, :, :size]
        first = jnp.pad(first, ((0, 0), (0, 0), (0, size - first.shape[-1])))
        # There may be fewer tokens than clusters, and anything where none is.
        there = jnp.take_along_axis(jnp.broadcast_to(inside[:, None], keys.shape[:3]), first, axis=2)[..., None]
        init = jnp.where(there, jnp.take_along_axis(keys, first[..., None], axis=2), jnp.zeros((), keys.dtype))
        return kmeans(keys, inside, init, count, iterations=self.iterations, distance=self.distance)

    def _cluster_tail(
        self, spec: LayerSpec, keys: Callable[[Array], Array], state: Clusters, due: Bool[Array, " B"]
    ) -> Clusters:
        """The metadata with the first `window` tokens of the tail as clusters of their own, in the rows that are `due`."""
        added = min(self.new_clusters, self.window)
        pos = state.clustered[:, None] + jnp.arange(self.window, dtype=jnp.int32)
        inside = jnp.broadcast_to(due[:, None], pos.shape)
        centroids, labels = self._cluster(spec, keys(pos), pos, inside, jnp.full_like(state.clusters, added), added)
        sizes, starts, order = _index(labels, added)

        rows = jnp.arange(spec.batch, dtype=jnp.int32)[:, None, None]
        heads = jnp.arange(spec.num_kv_heads, dtype=jnp.int32)[None, :, None]
        new = state.clusters[:, None] + jnp.arange(added, dtype=jnp.int32)
        new = rows, heads, jnp.where(due[:, None], new, state.sizes.shape[-1])[:, None]  # out of range, hence dropped
        slot = rows, heads, jnp.where(due[:, None], pos, state.order.shape[-1])[:, None]
        offset = state.clustered[:, None, None]
        return dataclasses.replace(
            state,
            centroids=state.centroids.at[new].set(centroids, mode="drop"),
            sizes=state.sizes.at[new].set(sizes, mode="drop"),
            starts=state.starts.at[new].set(offset + starts, mode="drop"),
            order=state.order.at[slot].set(offset + order, mode="drop"),
            clusters=state.clusters + jnp.where(due, added, 0),
            clustered=state.clustered + jnp.where(due, self.window, 0),
        )

    def _unclustered(self, spec: LayerSpec, slots: Slots, budget: Int[Array, " B"]) -> Clusters:
        """A state in which every token but the sinks is tail."""
        sizes = jnp.zeros((*slots.next.shape, self._clusters(spec)), jnp.int32)
        places = jnp.arange(slots.pos.shape[-1], dtype=jnp.int32)
        return Clusters(
            slots=slots,
            centroids=jnp.zeros((*sizes.shape, spec.head_dim), jnp.float32),
            sizes=sizes,
            starts=jnp.zeros_like(sizes),
            order=jnp.broadcast_to(places, slots.pos.shape),
            clusters=jnp.zeros((spec.batch,), jnp.int32),
            clustered=jnp.full((spec.batch,), self.sinks, jnp.int32),
            budget=budget,
        )

    def _prompt_clusters(self, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        """Clusters of each row's prompt, C₀ in the paper: never more than there are tokens for them."""
        wanted = jnp.maximum(lengths // self.tokens_per_cluster, 1) if self.n_clusters is None else self.n_clusters
        return jnp.minimum(wanted, jnp.maximum(lengths - self.sinks, 0)).astype(jnp.int32)

    def _clusters(self, spec: LayerSpec) -> int:
        """The most clusters that a row can come to have, at least 1."""
        wanted = max(spec.prompt_len // self.tokens_per_cluster, 1) if self.n_clusters is None else self.n_clusters
        prompt = min(wanted, max(spec.prompt_len - self.sinks, 0))
        windows = spec.new_tokens // self.window if self.cluster_decode else 0
        return max(prompt + windows * min(self.new_clusters, self.window), 1)

    def _tail(self, spec: LayerSpec) -> int:
        """The most tokens that are in no cluster when a query attends."""
        return min(self.window, spec.new_tokens) if self.cluster_decode else spec.new_tokens


@partial(jax.jit, static_argnums=(0, 1, 2))
def _shuffled(
    heads: int, tokens: int, seed: int, layer: Int[Array, ""], pos: Int[Array, "B T"], inside: Bool[Array, "B T"]
) -> Int[Array, "B K T"]:
    """`ClusterKV.shuffled`, traced once for all layers."""
    key = jax.random.fold_in(jax.random.key(seed), layer)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(heads, dtype=jnp.int32))
    # JAX draws the nth number of a list from n alone, however long the list.
    draws = jax.vmap(lambda head: jax.random.uniform(head, (tokens,)))(keys)
    draws = jnp.moveaxis(jnp.take(draws, pos, axis=1, mode="clip"), 0, 1)
    return jnp.argsort(jnp.where(inside[:, None], draws, 2.0), axis=-1, stable=True)


@partial(jax.jit, static_argnums=1)
def _index(
    labels: Int[Array, "B K T"], size: int
) -> tuple[Int[Array, "B K M"], Int[Array, "B K M"], Int[Array, "B K T"]]:
    """Sizes of `size` clusters, where each begins among the tokens sorted by label, and those tokens (Figure 8)."""
    order = jnp.argsort(labels, axis=-1, stable=True)
    ranked = jnp.take_along_axis(labels, order, axis=-1)
    clusters = jnp.arange(size + 1, dtype=jnp.int32)
    search = partial(jnp.searchsorted, v=clusters, method="scan_unrolled")  # two steps a kernel, not a loop
    bounds = jax.vmap(jax.vmap(search))(ranked).astype(jnp.int32)
    return bounds[..., 1:] - bounds[..., :-1], bounds[..., :-1], order.astype(jnp.int32)
