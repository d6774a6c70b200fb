"""ClusterKV: every query reads the clusters of keys nearest to it."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import einops
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax import cache
from kvjax._util.randomness import uniform
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Rotated, TokenBlock, stable_order
from kvjax.pallas_kernels import Always, centroid_scores, cluster_tokens, heads_of, kmeans

from .base import Policy
from .budget import budget_rows, budget_tokens, check_least
from .families.dense import DenseLayer
from .families.noise import head_keys
from .families.sparse import SparseLayer, reads_everything
from .fields import check_fields
from .info import PolicyInfo
from .layer import CacheLayer, Carry, Reads, When, check_reads_blocks
from .registry import register


@flax.struct.dataclass
class ClusteredCache:
    """All tokens of a layer, token p in slot p, and their clusters.

    B rows, K KV heads, C slots, M clusters, H head dim.

    Attributes:
        cache: rotated keys, and values.
        centroids: mean of each cluster's keys, in float32.
        sizes: number of tokens of each cluster.
        starts: first place of each cluster's tokens in `order`.
        order: slots sorted by cluster: sinks, then cluster by cluster, each ascending, then the tail.
        clusters: number of clusters of each row.
        clustered: tokens of each row in sinks and clusters. Later tokens are the tail.
        budget: tokens that a query reads besides the tail.
    """

    cache: LayerCache
    centroids: Float[Array, "B K M H"]
    sizes: Int[Array, "B K M"]
    starts: Int[Array, "B K M"]
    order: Int[Array, "B K C"]
    clusters: Int[Array, " B"]
    clustered: Int[Array, " B"]
    budget: Int[Array, " B"]


@register
@dataclasses.dataclass(frozen=True)
class ClusterKV(Policy):
    """Keep everything, cluster keys, and read the clusters whose centroids match a query best (Liu et al. 2024).

    After the prompt, k-means clusters the keys of each KV head, without the sinks (section III-B). A query ranks the
    clusters by its inner product with their centroids, and reads them in that order until the budget is full. The last
    cluster is cut, latest tokens first (sections III-C and IV-C). The query also reads the sinks and the tail, which
    are generated tokens without a cluster. When the tail has `window` tokens, they form new clusters. In chunked
    prefill, a block attends to all earlier tokens and then forms new clusters. Tokens too few for a cluster wait for
    the next block.

    Nothing is dropped, so the cache is slightly larger than the full one. Decoding reads less of it. A layer whose
    budget covers the whole sequence keeps no clusters and reads everything. In layers with a sliding window, selected
    tokens outside of it are not attended to.

    Attributes:
        budget: B, tokens that a query reads, sinks included and the tail excluded: a number, or a fraction of prompt +
            new tokens.
        sinks: first tokens, always read.
        dense_layers: first layers, which read everything (section V-A).
        tokens_per_cluster: prompt tokens per cluster: 80, the paper's L / 80.
        n_clusters: C₀, a fixed number of clusters of a prompt. Overrides `tokens_per_cluster`.
        iterations: number of k-means iterations, fixed as in the authors' code.
        window: m, generated tokens that are clustered together.
        new_clusters: C₊, number of clusters that they form.
        cluster_decode: whether generated tokens are clustered. Otherwise all of them are always read.
        gqa: "query_head" selects for each query head, "mean" for each KV head by the mean of its queries.
        distance: distance of k-means. Section V-B compares "cosine", "l2" and "ip" (inner product).
        seed: of the keys that k-means starts from, drawn without replacement in each head.

    Example:
        >>> policy = kvjax.ClusterKV(budget=64, dense_layers=0)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.bytes_read(*sizes) / kvjax.Full().bytes_read(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes that a step reads
        ('clusterkv:budget=64,dense_layers=0', 0.82)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="clusterkv",
        paper="Liu et al. 2024, ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression",
        summary="every token; a query reads the clusters of keys nearest to it",
        memory="sparse",
        stage="both",
    )

    budget: int | float = 1024
    sinks: int = 16
    dense_layers: int = 2
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
            dense_layers=0,
            tokens_per_cluster=1,
            n_clusters=1,
            iterations=1,
            window=1,
            new_clusters=1,
        )

    def validate(self, tokens: int) -> None:
        needs = f"but {self.sinks} sinks and at least one selected token need {self.sinks + 1}. Raise budget or lower sinks."
        check_least(self.info.name, self.budget, tokens, self.sinks + 1, needs, "tokens to read")

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        if reads_everything(spec, self.budget, self.dense_layers, self.sinks + 1):
            return DenseLayer(self, spec)
        return ClusterKVLayer(self, spec)

    def longest_tail(self, spec: LayerSpec) -> int:
        """Maximum number of tokens without a cluster, if none are clustered while decoding."""
        return spec.new_tokens + (self.tokens_per_cluster - 1 if spec.block else 0)


@dataclasses.dataclass(frozen=True)
class ClusterKVLayer(SparseLayer[ClusterKV]):
    """A layer that reads clusters, see `ClusterKV`."""

    @property
    def when(self) -> When:
        return "when_full" if self.compress_reads_kv else "never"

    @property
    def reads(self) -> Reads:
        return "blocks" if self.policy.n_clusters is None else "whole"

    @property
    def compress_reads_kv(self) -> bool:
        """Whether the tail can reach `window` tokens, and is then clustered."""
        return self.policy.cluster_decode and self.policy.longest_tail(self.spec) >= self.policy.window

    @property
    def selection_shape(self) -> tuple[int, int]:
        policy, spec = self.policy, self.spec
        heads = spec.num_kv_heads if policy.gqa == "mean" else spec.num_heads
        return heads, budget_tokens(policy.budget, spec.max_tokens, policy.sinks + 1) - policy.sinks

    @property
    def always_kept(self) -> tuple[int, int]:
        policy, longest = self.policy, self.policy.longest_tail(self.spec)
        waiting = policy.tokens_per_cluster if self.spec.block else 0  # upper bound, including the newest token
        return policy.sinks, min(max(policy.window, waiting), longest) if policy.cluster_decode else longest

    def tail_start(self, state: ClusteredCache) -> Int[Array, " B"]:
        return state.clustered

    @property
    def bytes_read(self) -> int:
        """Bytes of keys, values and cluster metadata that one decoding step reads.

        Bytes read several times count several times: each query head gathers its own selection.
        """
        spec, (heads, _) = self.spec, self.selection_shape
        indices = 4 * heads * (2 * self._clusters + self.slots_read)  # sizes, starts and order
        centroids = 4 * spec.num_kv_heads * self._clusters * spec.head_dim
        pairs = heads * self.slots_read * 2 * spec.head_dim * spec.dtype.itemsize
        return spec.batch * (pairs + centroids + indices)

    def init(self, total: Int[Array, " B"] | None = None) -> ClusteredCache:
        spec = self.spec
        budget = budget_rows(self.policy.budget, spec.totals(total), self.policy.sinks + 1)
        return self._unclustered(cache.empty(spec, self.capacity), budget)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[ClusteredCache, Carry]:
        policy, spec, lengths, tokens = self.policy, self.spec, prompt.lengths, prompt.size
        kept = cache.from_prompt(spec, self.capacity, prompt)
        state = self._unclustered(kept, budget_rows(policy.budget, prompt.total, policy.sinks + 1))
        pos = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (spec.batch, tokens))
        inside = (pos >= policy.sinks) & (pos < lengths[:, None])
        count = self._prompt_clusters(lengths)
        centroids, labels = self._cluster(kept.k[:, :, :tokens], pos, inside, count, state.sizes.shape[-1])
        # Sinks come before all clusters, and padding after them.
        sizes, starts, order = _index(jnp.where(pos[:, None] < policy.sinks, -1, labels), state.sizes.shape[-1])
        state = dataclasses.replace(
            state,
            centroids=centroids,
            sizes=sizes,
            starts=starts,
            order=state.order.at[:, :, :tokens].set(order),
            clusters=count,
            clustered=jnp.maximum(lengths, policy.sinks).astype(jnp.int32),
        )
        return state, carry

    def read_block(
        self, state: ClusteredCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], ClusteredCache, Carry]:
        check_reads_blocks(self)
        policy, kept = self.policy, cache.insert_block(state.cache, block)
        out = cache.attend_block(self.spec, kept, block)
        pos = state.clustered[:, None] + jnp.arange(block.size + self.always_kept[1], dtype=jnp.int32)
        tail = kept.seen - state.clustered
        first = state.clusters == 0  # sinks count in the first block, as in a prompt
        wanted = jnp.where(
            first, jnp.maximum(kept.seen // policy.tokens_per_cluster, 1), tail // policy.tokens_per_cluster
        )
        count = jnp.where(block.count > 0, jnp.minimum(wanted, jnp.maximum(tail, 0)), 0)
        inside = (pos < kept.seen[:, None]) & (count > 0)[:, None]
        keys = cache.keys_at(kept, pos)
        size = max(pos.shape[-1] // policy.tokens_per_cluster, 1)
        grouped = self._grouped(keys, dataclasses.replace(state, cache=None), pos, inside, count, size)
        return out, dataclasses.replace(grouped, cache=kept), carry

    def is_due(self, state: ClusteredCache) -> Bool[Array, " B"]:
        """Rows whose tail has reached `window` tokens."""
        return state.cache.seen - state.clustered >= self.policy.window

    def regroup(self, state: ClusteredCache, keys: Callable[[Array], Array]) -> ClusteredCache:
        """Cluster the tail in rows where it has reached `window` tokens (section III-B)."""
        if self.when == "never":
            return state
        full = self.is_due(state)
        # Keys and values bypass the branches of `cond`, which would copy them.
        metadata = dataclasses.replace(state, cache=None)
        grouped = jax.lax.cond(jnp.any(full), lambda m: self._cluster_tail(keys, m, full), lambda m: m, metadata)
        return dataclasses.replace(grouped, cache=state.cache)

    def select(self, state: ClusteredCache, query: Rotated) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """Return the tokens of the best clusters for rotated queries, in reading order (section IV-C)."""
        return self._taken(state, query, with_always_kept=False)

    def slots_to_read(self, state: ClusteredCache, query: Rotated) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        return self._taken(state, query, with_always_kept=True)

    def _taken(
        self, state: ClusteredCache, query: Rotated, *, with_always_kept: bool
    ) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """The tokens of the best clusters, and optionally the sinks and tail, which the same kernel appends."""
        spec, (heads, size) = self.spec, self.selection_shape
        if self.policy.gqa == "mean":
            query = heads_of(query).astype(jnp.float32)
            query = einops.reduce(query, "b (k g) h -> b k h", "mean", k=spec.num_kv_heads)
        scores = centroid_scores(query, state.centroids)
        always = Always(*self.always_kept, self.tail_start(state), state.cache.seen, self.slots_read)
        besides = always if with_always_kept else None
        remaining = jnp.maximum(state.budget - self.policy.sinks, 0)
        taken = cluster_tokens(scores, state.sizes, state.starts, state.order, remaining, size, besides)
        index, valid = (x.reshape(spec.batch, heads, -1) for x in taken)
        return index, valid

    def shuffled(self, pos: Int[Array, "B T"], inside: Bool[Array, "B T"]) -> Int[Array, "B K T"]:
        """Indices into `pos` in the random order in which k-means picks first centroids, those `inside` first.

        A token's rank depends only on its position, head, layer and `seed`, and so not on padding or other rows.
        """
        return _shuffled(self.spec.max_tokens, head_keys(self.spec, self.policy.seed), pos, inside)

    def _cluster(
        self,
        keys: Float[Array, "B K T H"],
        pos: Int[Array, "B T"],
        inside: Bool[Array, "B T"],
        count: Int[Array, " B"],
        size: int,
    ) -> tuple[Float[Array, "B K M H"], Int[Array, "B K T"]]:
        """Run k-means over the tokens `inside`, from `count` random ones. Arrays have room for `size` clusters."""
        first = self.shuffled(pos, inside)[:, :, :size]
        first = jnp.pad(first, ((0, 0), (0, 0), (0, size - first.shape[-1])))
        # There may be fewer tokens than clusters. Keys of the missing ones are arbitrary.
        exists = jnp.take_along_axis(jnp.broadcast_to(inside[:, None], keys.shape[:3]), first, axis=2)[..., None]
        init = jnp.where(exists, jnp.take_along_axis(keys, first[..., None], axis=2), jnp.zeros((), keys.dtype))
        policy = self.policy
        return kmeans(keys, inside, init, count, iterations=policy.iterations, distance=policy.distance)

    def _cluster_tail(
        self, keys: Callable[[Array], Array], state: ClusteredCache, full: Bool[Array, " B"]
    ) -> ClusteredCache:
        """Cluster the first `window` tokens of the tail in the rows that are `full`, and return the metadata."""
        window = self.policy.window
        added = min(self.policy.new_clusters, window)
        pos = state.clustered[:, None] + jnp.arange(window, dtype=jnp.int32)
        inside = jnp.broadcast_to(full[:, None], pos.shape)
        return self._grouped(keys(pos), state, pos, inside, jnp.where(full, added, 0), added)

    def _grouped(
        self,
        keys: Float[Array, "B K W H"],
        state: ClusteredCache,
        pos: Int[Array, "B W"],
        inside: Bool[Array, "B W"],
        count: Int[Array, " B"],
        size: int,
    ) -> ClusteredCache:
        """Cluster the first tokens of the tail, those `inside`, into `count` new clusters, and return the metadata.

        Arrays of the new clusters have room for `size`.
        """
        centroids, labels = self._cluster(keys, pos, inside, count, size)
        sizes, starts, order = _index(labels, size)

        rows = jnp.arange(self.spec.batch, dtype=jnp.int32)[:, None, None]
        heads = jnp.arange(self.spec.num_kv_heads, dtype=jnp.int32)[None, :, None]
        new = jnp.arange(size, dtype=jnp.int32)
        new = jnp.where(new < count[:, None], state.clusters[:, None] + new, state.sizes.shape[-1])  # else dropped
        at = rows, heads, new[:, None]
        slot = rows, heads, jnp.where(inside, pos, state.order.shape[-1])[:, None]
        offset = state.clustered[:, None, None]
        return dataclasses.replace(
            state,
            centroids=state.centroids.at[at].set(centroids, mode="drop"),
            sizes=state.sizes.at[at].set(sizes, mode="drop"),
            starts=state.starts.at[at].set(offset + starts, mode="drop"),
            order=state.order.at[slot].set(offset + order, mode="drop"),
            clusters=state.clusters + count,
            clustered=state.clustered + jnp.sum(inside, axis=-1, dtype=jnp.int32),
        )

    def _unclustered(self, kept: LayerCache, budget: Int[Array, " B"]) -> ClusteredCache:
        """Return a state whose tail has every token but the sinks."""
        sizes = jnp.zeros((*kept.next.shape, self._clusters), jnp.int32)
        places = jnp.arange(kept.pos.shape[-1], dtype=jnp.int32)
        return ClusteredCache(
            cache=kept,
            centroids=jnp.zeros((*sizes.shape, self.spec.head_dim), jnp.float32),
            sizes=sizes,
            starts=jnp.zeros_like(sizes),
            order=jnp.broadcast_to(places, kept.pos.shape),
            clusters=jnp.zeros((self.spec.batch,), jnp.int32),
            clustered=jnp.full((self.spec.batch,), self.policy.sinks, jnp.int32),
            budget=budget,
        )

    def _prompt_clusters(self, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        """C₀, number of clusters of each row's prompt, at most the number of tokens to cluster."""
        per, fixed = self.policy.tokens_per_cluster, self.policy.n_clusters
        wanted = jnp.maximum(lengths // per, 1) if fixed is None else fixed
        return jnp.minimum(wanted, jnp.maximum(lengths - self.policy.sinks, 0)).astype(jnp.int32)

    @property
    def _clusters(self) -> int:
        """Maximum number of clusters of a row, at least 1."""
        policy, spec = self.policy, self.spec
        fixed = policy.n_clusters
        wanted = max(spec.prompt_len // policy.tokens_per_cluster, 1) if fixed is None else fixed
        wanted += 1 if spec.block else 0  # even a short first block has a cluster
        prompt = min(wanted, max(spec.prompt_len - policy.sinks, 0))
        windows = policy.longest_tail(spec) // policy.window if policy.cluster_decode else 0
        return max(prompt + windows * min(policy.new_clusters, policy.window), 1)


@partial(jax.jit, static_argnums=0)
def _shuffled(
    tokens: int, keys: Key[Array, " K"], pos: Int[Array, "B T"], inside: Bool[Array, "B T"]
) -> Int[Array, "B K T"]:
    """`ClusterKVLayer.shuffled`, traced once for all layers."""
    draws = jax.vmap(lambda head: uniform(head, (tokens,)))(keys)
    draws = jnp.moveaxis(jnp.take(draws, pos, axis=1, mode="clip"), 0, 1)
    return stable_order(jnp.where(inside[:, None], draws, 2.0))


@partial(jax.jit, static_argnums=1)
def _index(
    labels: Int[Array, "B K T"], size: int
) -> tuple[Int[Array, "B K M"], Int[Array, "B K M"], Int[Array, "B K T"]]:
    """Sizes of `size` clusters, their starts among the tokens sorted by label, and the sorted tokens (Figure 8)."""
    clusters = jnp.arange(size + 1, dtype=jnp.int32)
    bounds = jnp.sum(labels[:, :, None] < clusters[:, None], axis=-1, dtype=jnp.int32)
    return bounds[..., 1:] - bounds[..., :-1], bounds[..., :-1], stable_order(labels)
