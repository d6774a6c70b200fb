"""Chelsea: clusters of similar keys, each kept as one centroid that counts as often as the tokens it stands for."""

import dataclasses
from fractions import Fraction
from functools import lru_cache, partial
from typing import ClassVar, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, Slots
from kvjax.models.config import ModelConfig
from kvjax.pallas_kernels import Clusters, copy_clusters
from kvjax.pallas_kernels.gradients import without_gradient

from . import soft_matching
from .base import Carry, Memory, Policy, PolicyError, Stage, budget_rows, budget_tokens, check_fields, rotated
from .compose import by_head
from .full import Full
from .offload import offloaded
from .profile import HeadProfile, find
from .registry import register

SCHEDULES = {"llama-2": (0.45, 0.05, 3), "llama-3": (0.35, 0.1, 2), "qwen": (0.2, 0.1, 2), "constant": (0.25, 0.0, 0)}
"""r_init, alpha and number of decreasing steps by model family (appendix C.2); "constant" is the paper's needle test."""

OUTLIER, CLUSTERED = "outlier", "clustered"
"""Labels of heads in a profile."""

MOST = 32
"""Steps of which it is taken for granted that a row needs them."""

_UNIT = 10_000
"""Ratios are counted in parts of this, so that the number of merges is exact."""


@flax.struct.dataclass
class Centroids:
    """A Chelsea cache. B rows.

    Attributes:
        slots: rotated keys, and values, in order; those of a row fill equally many slots in every head.
        steps: i, clustering steps that each row has been through, which the ratio schedule depends on.
        budget: B, slots that clustering leaves.
    """

    slots: Slots
    steps: Int[Array, " B"]
    budget: Int[Array, " B"]


@flax.struct.dataclass
class Loop:
    """Clustering between two steps. A step reads one place and writes to another, and the places take turns. B rows.

    Attributes:
        tokens: all of them, those that are never merged among them.
        room: as much again, to write to.
        size: tokens of each row.
        steps: clustering steps that each row has been through.
    """

    tokens: Clusters
    room: Clusters
    size: Int[Array, " B"]
    steps: Int[Array, " B"]


@register
@dataclasses.dataclass(frozen=True)
class Chelsea(Policy):
    """Merge tokens with similar keys into centroids (Hu et al. 2025, Algorithm 1 and section 5).

    When a row holds `every` slots more than its budget, those between sinks and recent tokens go through Chunked Soft Matching
    (`kvjax.policies.soft_matching`), step after step until exactly the budget is left. A step removes a share
    r = max(r_min, r_init - alpha · min(steps, i)) of them, i counting all steps since the row began, though at least one and
    no more than the budget asks. A cluster of n tokens attends like n tokens: log n is added to its logit.

    Keys' cosines are compared in whole multiples of 2^-14 (6e-5; `kvjax.pallas_kernels.chunk_similarity.RESOLUTION`): of keys as
    similar as that the first are merged, and rounding does not decide. There is no gradient through clustering.

    Outlier heads, whose keys are less alike, keep everything if the model has a profile that names them, and the others' budget
    is reduced to pay for it: with a share f of such heads, from R to (R - f) / (1 - f) (appendix C.2). That is so for a budget
    that is a fraction; one of a number of tokens is a size that no head may outgrow, so there every head is clustered.

    Attributes:
        budget: slots in all: a number of tokens, or a fraction of prompt + new tokens.
        sinks: first tokens that are never merged.
        recent: latest tokens that are never merged. Where sinks and recent tokens would fill a row's budget, at most a quarter
            of it are sinks and at most half of it recent tokens.
        chunk: tokens among which similar ones are looked for; None for all of them (the paper's ablation).
        every: tokens in excess of the budget that clustering waits for, so that decoding clusters once in so many steps.
        schedule: a ratio schedule of the paper: "llama-2", "llama-3", "qwen", or "constant".
        r_init, alpha, steps: a schedule of one's own; what is None is taken from `schedule`.
        r_min: least ratio. The paper only asks that it exceed 0.
        outliers: whether outlier heads keep everything.
        offload_outliers: whether they keep it in the host's memory (see `offloaded`), as their share of a long text is large.
        profile: which heads they are: a profile, its file, or None for the one that comes with the library, if there is one.
    """

    name: ClassVar[str] = "chelsea"
    paper: ClassVar[str] = "Hu et al. 2025, Efficient Long-Context LLM Inference via KV Cache Clustering"
    keeps: ClassVar[str] = "sinks, recent tokens, and centroids of older tokens with similar keys"
    memory: ClassVar[Memory] = "freed"
    stage: ClassVar[Stage] = "both"
    merges: ClassVar[bool] = True

    budget: int | float = 0.2
    sinks: int = 16
    recent: int = 64
    chunk: int | None = 256
    every: int = 64
    schedule: Literal["llama-2", "llama-3", "qwen", "constant"] = "llama-3"
    r_init: float | None = None
    alpha: float | None = None
    steps: int | None = None
    r_min: float = 0.05
    outliers: bool = True
    offload_outliers: bool = False
    profile: HeadProfile | str | None = None

    def __post_init__(self) -> None:
        check_fields(self, sinks=0, recent=0, chunk=2, every=1, alpha=0, steps=0, r_min=0)
        if self.schedule not in SCHEDULES:
            raise PolicyError(f"{self.name}: schedule={self.schedule!r}; give one of {', '.join(map(repr, SCHEDULES))}")
        if min(self._ratios) <= 0 or max(self._ratios) > _UNIT // 2:
            raise PolicyError(
                f"{self.name}: ratios from {self._ratios[0] / _UNIT} to {self._ratios[-1] / _UNIT}; a step removes more than "
                "0 and at most 0.5 of the tokens, so raise r_min, or lower r_init"
            )

    def bind(self, config: ModelConfig) -> Policy:
        if not self.outliers or isinstance(self.budget, int):
            return self
        profile = find(self.name, config, self.profile)
        if profile is None or not profile.heads(OUTLIER):
            return self
        share = Fraction(len(profile.heads(OUTLIER)), config.num_layers * config.num_kv_heads)
        if self.budget <= share:
            raise PolicyError(
                f"{self.name}: budget={self.budget} is less than what the outlier heads alone take, which are "
                f"{float(share):.3f} of all; raise budget, or set outliers to False"
            )
        budget = float((Fraction(self.budget).limit_denominator(_UNIT) - share) / (1 - share))
        clustered = dataclasses.replace(self, budget=budget, outliers=False, offload_outliers=False, profile=None)
        full = offloaded(Full()) if self.offload_outliers else Full()
        return by_head({OUTLIER: full, CLUSTERED: clustered}, profile.labels).bind(config)

    def check(self, tokens: int) -> None:
        if budget_tokens(self.budget, tokens) < 1:
            raise PolicyError(f"{self.name}: a budget of {self.budget} gives 0 slots for {tokens} tokens; raise budget")

    @property
    def _ratios(self) -> tuple[int, ...]:
        """r at steps 0, 1, … until it no longer changes, in parts of `_UNIT`."""
        r_init, alpha, steps = SCHEDULES[self.schedule]
        r_init = r_init if self.r_init is None else self.r_init
        alpha = alpha if self.alpha is None else self.alpha
        steps = steps if self.steps is None else self.steps
        return tuple(round(max(r_init - alpha * i, self.r_min) * _UNIT) for i in range(steps + 1))

    def capacity(self, spec: LayerSpec) -> int:
        most = self._budget(spec) + self.every
        return cache.round_slots(min(most, spec.max_tokens))

    def init(self, spec: LayerSpec) -> Centroids:
        tokens = jnp.full((spec.batch,), spec.new_tokens, jnp.int32)
        return Centroids(cache.empty(spec, self.capacity(spec)), jnp.zeros_like(tokens), self._budgets(tokens))

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[Centroids, Carry]:
        capacity, prompt = self.capacity(spec), k.shape[1]
        slots = cache.whole(spec, max(capacity, prompt), rotated(spec, k), v, lengths)
        state = Centroids(slots, jnp.zeros_like(slots.seen), self._budgets(lengths + spec.new_tokens))
        budget = self._budget(spec)
        if prompt < budget + self.every:  # then shorter rows are not due either
            return state, carry
        return self._cluster(capacity, _usual(self, slots.pos.shape[-1], prompt, budget, 0), state), carry

    def append(
        self,
        spec: LayerSpec,
        state: Centroids,
        k: Float[Array, "B K H"],
        v: Float[Array, "B K H"],
        pos: Int[Array, " B"],
    ) -> Centroids:
        return dataclasses.replace(state, slots=super().append(spec, state.slots, k, v, pos))

    def attend(
        self, spec: LayerSpec, state: Centroids, q: Float[Array, "B N H"], pos: Int[Array, " B"], carry: Carry
    ) -> tuple[Float[Array, "B N H"], Centroids, Carry]:
        out, _, carry = super().attend(spec, state.slots, q, pos, carry)
        return out, state, carry

    def extend(
        self,
        spec: LayerSpec,
        state: Centroids,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        pos: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[Float[Array, "B S N H"], Centroids, Carry]:
        """Tokens between two clusterings at once, up to `every`: they see the same slots, and each other."""
        count, block = q.shape[1], min(self.every, q.shape[1])
        places = cache.places(pos, count)
        q, k = (spec.rope.rotate(x, places[..., None]) for x in (q, k))
        more = (0, 0), (0, block)
        tokens = [jnp.pad(x, more + ((0, 0),) * (x.ndim - 2)) for x in (q, k, v, places)]

        def unread(loop: tuple[Array, Centroids, Array]) -> Array:
            return loop[0] < count

        def read(loop: tuple[Array, Centroids, Array]) -> tuple[Array, Centroids, Array]:
            done, state, out = loop
            room = jnp.min(state.budget + self.every - state.slots.next[:, 0])  # until the first row is due
            fresh = jnp.minimum(jnp.minimum(room, block), count - done)
            q, k, v, at = (jax.lax.dynamic_slice_in_dim(x, done, block, axis=1) for x in tokens)
            slots = cache.insert_many(state.slots, k, v, at, fresh)
            # What stands beyond the fresh ones is overwritten by the next ones' output, or cut off.
            out = jax.lax.dynamic_update_slice_in_dim(out, cache.attend_many(spec, slots, q, at), done, axis=1)
            return done + fresh, self.compress(spec, dataclasses.replace(state, slots=slots)), out

        begin = jnp.zeros((), jnp.int32), state, jnp.zeros_like(tokens[0])
        _, state, out = jax.lax.while_loop(unread, read, begin)
        return out[:, :count], state, carry

    def compress(self, spec: LayerSpec, state: Centroids) -> Centroids:
        capacity = state.slots.pos.shape[-1]
        budget = self._budget(spec)
        usual = _usual(self, capacity, budget + self.every, budget, len(self._ratios))
        cluster = partial(self._cluster, capacity, usual)
        return jax.lax.cond(jnp.any(self._due(state)), cluster, lambda state: state, state)

    def due(self, spec: LayerSpec, state: Centroids) -> Bool[Array, " B"]:
        """Rows that have waited long enough."""
        return self._due(state)

    def _due(self, state: Centroids) -> Bool[Array, " B"]:
        return state.slots.next[:, 0] >= state.budget + self.every

    @partial(jax.jit, static_argnums=(0, 1, 2))
    def _cluster(self, capacity: int, usual: int, state: Centroids) -> Centroids:
        """The rows that are due, clustered to exactly their budgets, in `capacity` slots; traced once for all layers of one shape.

        Args:
            usual: steps that it takes most often: so many are taken at once, and only then rows are asked whether they need more,
                for which the host waits for the device (asked after every other step on an H200, that took 0.5 ms of the 2 ms
                of a layer of 32768 tokens and 8 heads).
        """
        endless = (
            "clustering goes on until the budget is reached, through which there is no gradient; take it of another policy, such as "
            "treekv or snapkv"
        )
        k, v = without_gradient((state.slots.k, state.slots.v), PolicyError(f"{self.name}: {endless}"))
        slots = dataclasses.replace(state.slots, k=k, v=v)
        places = slots.pos.shape[-1]
        chunk = self._chunk(places)
        sinks, recent = self._regions(state.budget)
        size = slots.next[:, 0]
        goal = jnp.where(self._due(state), state.budget, size)

        def step(loop: Loop) -> Loop:
            middle = jnp.maximum(loop.size - sinks - recent, 0)
            count = self._merges(middle, loop.steps, chunk, loop.size - goal)
            merged = soft_matching.merge(loop.tokens, sinks, loop.size - sinks, middle, count, chunk, loop.room)
            return Loop(merged, loop.tokens, loop.size - count, loop.steps + (count > 0).astype(jnp.int32))

        def back(loop: Loop) -> Loop:
            return Loop(copy_clusters(loop.tokens, loop.size, loop.room), loop.tokens, loop.size, loop.steps)

        tokens = Clusters(slots.k, slots.v, slots.pos, slots.weight)
        room = jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), tokens)
        loop = Loop(tokens, room, size, state.steps)
        # Two at a time, after which tokens and room are where they were, so that XLA need not copy them.
        loop = jax.lax.fori_loop(0, usual // 2, lambda _, loop: step(step(loop)), loop)
        if usual % 2:
            loop = step(loop)
        if usual % 2 and places == capacity:  # else they are copied anyway
            loop = back(loop)
        loop = jax.lax.while_loop(lambda loop: jnp.any(loop.size > goal), lambda loop: back(step(loop)), loop)

        live = (jnp.arange(capacity, dtype=jnp.int32) < loop.size[:, None])[:, None]
        k, v, pos, weight = (x[:, :, :capacity] for x in loop.tokens)
        slots = dataclasses.replace(
            slots,
            k=k,
            v=v,
            pos=jnp.where(live, pos, -1),
            weight=jnp.where(live, weight, 0.0),
            next=jnp.broadcast_to(loop.size[:, None], slots.next.shape),
        )
        return dataclasses.replace(state, slots=slots, steps=loop.steps)

    def _budget(self, spec: LayerSpec) -> int:
        """B of a row that holds all the tokens it can."""
        return max(budget_tokens(self.budget, spec.max_tokens), 1)

    def _budgets(self, tokens: Int[Array, " B"]) -> Int[Array, " B"]:
        """B of each row; all tokens can be merged into one, but no further."""
        return jnp.maximum(budget_rows(self.budget, tokens), 1)

    def _chunk(self, places: int) -> int:
        """c in a cache of so many places."""
        return places if self.chunk is None else min(self.chunk, places)

    def _regions(self, budget: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """How many first and how many latest tokens of each row are never merged."""
        fits = self.sinks + self.recent < budget
        sinks = jnp.where(fits, self.sinks, jnp.minimum(self.sinks, budget // 4))
        return sinks, jnp.where(fits, self.recent, jnp.minimum(self.recent, budget // 2))

    def _merges(
        self, middle: Int[Array, " B"], steps: Int[Array, " B"], chunk: int, excess: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        """M, how many edges the next step keeps among `middle` tokens."""
        table = jnp.asarray(self._ratios, jnp.int32)
        ratio = table[jnp.minimum(steps, len(self._ratios) - 1)]
        share = middle // _UNIT * ratio + middle % _UNIT * ratio // _UNIT
        most = jnp.minimum(middle // 2, soft_matching.edges(middle, chunk))
        return jnp.minimum(jnp.minimum(jnp.maximum(share, 1), most), excess)


@lru_cache(maxsize=256)
def _usual(policy: Chelsea, places: int, size: int, goal: int, steps: int) -> int:
    """Steps that a row of `size` tokens takes to `goal`, up to `MOST`, in a cache of so many places and after so many `steps`."""
    taken = 0
    with jax.ensure_compile_time_eval():
        fixed = sum(int(part[0]) for part in policy._regions(jnp.asarray([goal])))
        while size > goal and taken < MOST:
            middle, before = jnp.asarray([max(size - fixed, 0)]), jnp.asarray([steps + taken])
            size -= int(policy._merges(middle, before, policy._chunk(places), jnp.asarray([size - goal]))[0])
            taken += 1
    return taken
