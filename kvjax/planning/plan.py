"""`plan`: whether a model, a policy and a context fit some devices, and how fast decoding can be. Needs no weights or devices.

    for way in kvjax.plan("meta-llama/Llama-3.1-70B", device="h200", count=4, context=1_000_000, policy="catekv"):
        print(way.mesh, way.peak_bytes, way.fits, way.largest_batch, way.floor_ms)

Bytes of weights and cache are those of an `Engine` for the devices' shapes. The programs' temporary memory comes from
XLA's memory analysis if it is requested and the compiler is installed, and otherwise from a formula (`workspace`).
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from kvjax._util.arguments import whole
from kvjax._util.suggestions import hint
from kvjax.bench import floor
from kvjax.bench.case import bound_policy, read_policy
from kvjax.cache import layer_specs
from kvjax.config import ModelConfig
from kvjax.conversion.shapes import shapes_of
from kvjax.devices import PRESETS
from kvjax.models import Params
from kvjax.models.sharding import AXES, bytes_per_device, parse_mesh
from kvjax.policies import Policy, PolicyError, get_policy
from kvjax.policies.unbound import check_unbound
from kvjax.runtime import absent_tpu
from kvjax.runtime.engine import Engine, Memory
from kvjax.runtime.generation import BLOCK

from .sums import step_sums, sums_seconds
from .workspace import cache_bytes, workspace

Kind = Literal["float", "int8", "int4", "as stored"]

WEIGHTS: tuple[Kind, ...] = ("float", "int8", "int4")
"""Kinds of weights that are planned by default, in order of increasing quantisation error."""

_LEAST_LOST: tuple[Kind, ...] = ("float", "as stored", "int8", "int4")

SHARES: Mapping[str, Mapping[str, float]] = {"catekv": {"adaptive": 0.4}, "duoattention": {"retrieval": 0.5}}
"""Fraction of heads that keep everything if there is no profile of the model: r = 0.4 of CateKV's evaluation (section 4.2), and DuoAttention's published sparsity for models with grouped-query attention.
"""

CHIPS: Mapping[tuple[str, int], str] = {
    ("v5e", 1): "v5e",
    ("v5p", 1): "v5p",
    ("v6e", 1): "v6e",
    ("v5e", 4): "v5e:2x2",
    ("v5p", 4): "v5p:2x2x1",
    ("v6e", 8): "v6e:2x4",
}
"""Device and count → name in `kvjax.runtime.absent_tpu.mesh`."""

_Sizes = tuple[int, ...]
"""Number of devices along each of `AXES`."""

_BUDGET_STEP = 256
"""Proposed budgets are multiples of this number."""

_CUT = "snapkv"
"""Policy whose budgets are proposed if the requested policy has none and does not fit."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to run a model. Bytes and times are per device.

    Attributes:
        device, count: kind and number of devices.
        mesh: mesh, as for `kvjax.load`.
        policy: the policy.
        weights: kind of the layers' matrices; the floating-point type if they are not quantised.
        context, new_tokens: number of prompt tokens and new tokens per sequence.
        batch: number of sequences over all devices, at least one per device along `data`.
        block: block size of chunked prefill in tokens; 0 for whole prompts.
        memory: available memory, in bytes.
        weight_bytes, cache_bytes: bytes of weights and cache.
        host_cache_bytes: bytes of the cache in host memory, not included in the others.
        workspace_bytes: largest temporary memory of the programs.
        memory_by: source of `workspace_bytes`: "formula" or "compiler".
        largest_batch: maximum number of sequences that fit, by the formula.
        step_bytes: bytes that a decode step reads.
        floor_ms: bandwidth bound: milliseconds per decode step to read `step_bytes`. None if the bandwidth is unknown.
        sums: number of all-reduces and gathers per decode step.
        sums_ms: milliseconds per decode step for these, from a measured table; None if there is none for the device.
        notes: remarks.
        refused: reason why this way is impossible; most byte counts are then 0.
    """

    device: str
    count: int
    mesh: str
    policy: str
    weights: str
    context: int
    new_tokens: int
    batch: int
    block: int = 0
    memory: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    host_cache_bytes: int = 0
    workspace_bytes: int = 0
    memory_by: Literal["formula", "compiler"] = "formula"
    largest_batch: int = 0
    step_bytes: int = 0
    floor_ms: float | None = None
    sums: int = 0
    sums_ms: float | None = None
    notes: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def peak_bytes(self) -> int:
        """Peak memory: weights, cache and workspace."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.refused is None and self.peak_bytes <= self.memory

    @property
    def ms(self) -> float | None:
        """Estimated milliseconds per decode step: bandwidth bound plus communication. None if the bandwidth is unknown."""
        return None if self.floor_ms is None else self.floor_ms + (self.sums_ms or 0.0)


def plan(
    model: str | Path | ModelConfig | None = None,
    *,
    device: str,
    count: int = 1,
    mesh: str | None = None,
    context: int | None = None,
    new_tokens: int = 128,
    batch: int = 1,
    policy: str | Policy = "full",
    budget: int | float | None = None,
    weights: Kind | Sequence[Kind] | None = None,
    embedding: Kind | None = None,
    dtype: Any = "bfloat16",
    prefill_block: int | None = None,
    memory: int | None = None,
    compile: bool = False,
    fit: bool = False,
) -> tuple[Plan, ...]:
    """Estimate memory and speed for each way to share a model among devices.

    Args:
        model: a checkpoint, whose headers are read; a hub id or `config.json`, without weights; the name of a
            preset (`kvjax.config`); or a `ModelConfig`. None is the default model.
        device: a key of `kvjax.devices.PRESETS`, or "cpu" for this machine, which needs `memory`.
        count: number of devices of the same kind on one host.
        mesh: mesh such as "data=2,model=4". By default all meshes are planned, with "sequence" only where KV heads
            cannot be sharded further.
        context: prompt tokens per sequence; by default the context length minus `new_tokens`.
        new_tokens: new tokens per sequence.
        batch: number of sequences, rounded up to a multiple of the `data` axis.
        policy, budget: as for `kvjax.generate`. Without a profile of the model, CateKV and DuoAttention use the
            fractions in `SHARES`; `share_adaptive=0.3` among CateKV's hyperparameters overrides this.
        weights: "float", "int8", "int4" or "as stored", or several of them; by default the first three.
        embedding: kind of embedding and head; floats by default.
        dtype: type of unquantised weights and of the cache.
        prefill_block: block size of chunked prefill in tokens. The default is 4096 if the policy supports it, and
            otherwise whole prompts.
        memory: bytes available on each device, instead of the preset's.
        compile: whether to compile the first way that fits (or else the first way) and use XLA's memory analysis. It
            needs libtpu for TPUs, and takes minutes for large models.
        fit: return only one way: of those that fit, the one with the least quantisation. If none fits, use the smallest
            weights and the largest budget that fits, of SnapKV if the policy has no suitable budget. Empty if nothing
            fits.

    Returns:
        Ways that fit, by milliseconds per step; then ways that do not fit, by memory; then impossible ways.

    Raises:
        ValueError: a number, device or mesh is invalid.
        CheckpointError: see `kvjax.conversion.describe`.
        PolicyError: the policy is unknown, or does not support this model or length.

    Example:
        >>> best, *others = kvjax.plan("llama-3.1-8b", device="h100", policy="treekv", budget=4096)
        >>> best.fits, round(best.ms, 2)  # milliseconds per step
        (True, 1.79)
    """
    given = _Question(model, device, count, mesh, context, new_tokens, batch, embedding, dtype, prefill_block, memory)
    kinds: Sequence[Kind] = WEIGHTS if weights is None else (weights,) if isinstance(weights, str) else weights
    if not isinstance(policy, str) or "share_" not in policy:
        check_unbound(get_policy(policy, budget=budget), given.block, over_mesh=given.count > 1)
    ways = _best_first(way for kind in kinds for way in given.ways(kind, policy, budget))
    if fit:
        ways = _fitting(given, ways, kinds, policy)[:1]
    if compile and ways and ways[0].refused is None:
        ways = (given.compiled(ways[0]), *ways[1:])
    return ways


@dataclasses.dataclass
class _Question:
    """The arguments of `plan`, without weights and policy."""

    model: str | Path | ModelConfig | None
    device: str
    count: int
    mesh: str | None
    context: int | None
    new_tokens: int
    batch: int
    embedding: Kind | None
    dtype: Any
    block: int | None
    memory: int | None

    def __post_init__(self) -> None:
        if self.device != "cpu" and self.device not in PRESETS:
            allowed = [*PRESETS, "cpu"]
            raise ValueError(f"device={self.device!r} is not one of {', '.join(allowed)}.{hint(self.device, allowed)}")
        if self.device == "cpu" and self.memory is None:
            raise ValueError("device='cpu' has no memory in the table of devices; give memory, in bytes")
        self.count = whole("count", self.count, 1)
        self.new_tokens = whole("new_tokens", self.new_tokens, 1)
        self.batch = whole("batch", self.batch, 1)
        self.memory = None if self.memory is None else whole("memory", self.memory, 1)
        self.block = None if self.block is None else whole("prefill_block", self.block, 1)
        self.shapes: dict[str, Params] = {}
        self.bound: dict[str, Policy] = {}
        if self.mesh is not None:
            sizes = parse_mesh(self.mesh)
            asked = math.prod(sizes.values())
            if self.count not in (1, asked):
                raise ValueError(f"mesh={self.mesh!r} is of {asked} devices, but count={self.count}; give one of them")
            self.count, self.meshes = asked, [tuple(sizes.get(axis, 1) for axis in AXES)]
        else:
            self.meshes = []

    def ways(self, kind: Kind, policy: str | Policy, budget: int | float | None) -> Iterator[Plan]:
        """One plan per mesh."""
        shapes = self._shapes(kind)
        config = shapes.config
        context = self._context(config)
        asked, bound, notes = bound_for(config, policy, budget)
        bound.validate(context + self.new_tokens)
        self.bound[asked] = bound
        if context + self.new_tokens > config.context_length:
            notes = (*notes, f"beyond the {config.context_length} tokens that the model was trained on")
        for mesh in self.meshes or _every_mesh(self.count, config, bound):
            yield self._way(shapes, kind, asked, notes, mesh)

    def fitting(self, kind: Kind, policy: str | Policy, budget: int) -> tuple[Plan, ...]:
        """Plans that fit, best first; empty if the policy does not support so small a budget."""
        try:
            return tuple(way for way in _best_first(self.ways(kind, policy, budget)) if way.fits)
        except PolicyError:
            return ()

    def compiled(self, way: Plan) -> Plan:
        """The plan with memory from XLA's memory analysis, or with a note why that is not available."""
        sizes = parse_mesh(way.mesh)
        try:
            memory = self._compiled(way, tuple(sizes.get(axis, 1) for axis in AXES))
        except RuntimeError as error:
            told = str(error).partition("\n")[0]
            if "RESOURCE_EXHAUSTED" in told:
                return dataclasses.replace(way, memory_by="compiler", refused=f"it does not compile: {told}")
            return dataclasses.replace(way, notes=(*way.notes, f"not compiled: {told}"))
        rest = memory.peak - memory.weights - memory.cache
        return dataclasses.replace(
            way,
            weight_bytes=memory.weights,
            cache_bytes=memory.cache,
            workspace_bytes=max(rest, 0),
            memory_by="compiler",
        )

    def _shapes(self, kind: Kind) -> Params:
        if kind not in self.shapes:
            self.shapes[kind] = shapes_of(self.model, dtype=self.dtype, weights=kind, embedding=self.embedding)
        return self.shapes[kind]

    def _context(self, config: ModelConfig) -> int:
        if self.context is None:
            return max(config.context_length - self.new_tokens, 1)
        return whole("context", self.context, 1)

    def _engine(self, shapes: Params, policy: Policy, batch: int, mesh: Any) -> Engine:
        context = self._context(shapes.config)
        options: dict[str, Any] = {"batch": batch, "prompt_len": context, "max_new_tokens": self.new_tokens}
        block = self.block
        if block is None and context > BLOCK:
            specs = layer_specs(shapes.config, 1, context, self.new_tokens, shapes.dtype, block=BLOCK)
            block = BLOCK if all(policy.layer(spec).reads == "blocks" for spec in specs) else None
        return Engine(shapes, policy, **options, mesh=mesh, block=block, mixed=False)

    def _way(self, shapes: Params, kind: Kind, asked: str, notes: tuple[str, ...], sizes: _Sizes) -> Plan:
        policy = self.bound[asked]
        data = sizes[0]
        batch = -(-self.batch // data) * data
        name = shapes.dtype.name if kind == "float" else kind
        # The third axis is shown only if it is used.
        mesh = ",".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True) if axis != AXES[2] or size > 1)
        tokens = self._context(shapes.config), self.new_tokens
        device = PRESETS.get(self.device)
        memory = self.memory if self.memory is not None else device.usable if device else 0
        bare = Plan(self.device, self.count, mesh, asked, name, *tokens, batch, memory=memory)
        abstract_mesh = None if self.count == 1 else AbstractMesh(sizes, AXES)
        try:
            engine = self._engine(shapes, policy, batch, abstract_mesh)
        except ValueError as error:
            return dataclasses.replace(bare, refused=str(error))
        cached, on_host, cache_read = cache_bytes(engine)
        stays, rest = bytes_per_device(engine.weights), self._workspace(engine)
        read = floor.weight_bytes(engine.weights, engine.batch // engine.shard.data) + cache_read
        sums = step_sums(engine.config) + engine.sharded_caches if engine.shard.model > 1 else 0
        per_sum = 4 * batch // data * engine.config.hidden_size
        sums_s = None if device is None else sums_seconds(device, sums, per_sum)
        if engine.shard.copies > 1:
            notes = (*notes, f"{mesh}: {engine.shard.copies} devices hold the same KV heads")
        if repeated := engine.repeated_cache_bytes:
            share = f"{100 * repeated / cached:.0f} % of the cache of a device"
            notes = (*notes, f"{mesh}: {share} is replicated on all {engine.shard.slots} that share slots")
        if on_host:
            notes = (*notes, "the time excludes reads from host memory")
        return dataclasses.replace(
            bare,
            block=engine.block,
            weight_bytes=stays,
            cache_bytes=cached,
            host_cache_bytes=on_host,
            workspace_bytes=rest,
            largest_batch=self._largest(shapes, policy, abstract_mesh, data, memory, (batch, stays + cached + rest)),
            step_bytes=read,
            floor_ms=None if device is None else 1e3 * read / device.bandwidth,
            sums=sums,
            sums_ms=None if sums_s is None else 1e3 * sums_s,
            notes=notes,
        )

    def _workspace(self, engine: Engine) -> int:
        device = PRESETS.get(self.device)
        return max(workspace(engine, tpu=device is not None and device.kind.startswith("TPU")))

    def _largest(
        self, shapes: Params, policy: Policy, mesh: Any, data: int, memory: int, known: tuple[int, int]
    ) -> int:
        """Maximum number of sequences that fit, assuming that each takes the same memory."""

        def held(batch: int) -> int:
            engine = self._engine(shapes, policy, batch, mesh)
            return bytes_per_device(engine.weights) + cache_bytes(engine)[0] + self._workspace(engine)

        batch, there = known
        each = max(held(batch + data) - there, 1)
        most = max(batch // data + (memory - there) // each, 0)
        while most and (over := held(most * data) - memory) > 0:
            most = max(most + min(-over // each, -1), 0)
        return most * data

    def _compiled(self, way: Plan, sizes: _Sizes) -> Memory:
        kind: Any = way.weights if way.weights in ("int8", "int4", "as stored") else "float"
        shapes = self._shapes(kind)
        policy = self.bound[way.policy]

        def engine(devices: Any) -> Engine:
            mesh = None if devices is None else Mesh(np.asarray(devices).reshape(sizes), AXES)
            return self._engine(shapes, policy, way.batch, mesh)

        if self.device == "cpu":
            there = jax.devices("cpu")
            if len(there) < self.count or jax.default_backend() != "cpu":
                raise RuntimeError(f"{self.count} CPU devices are needed, but JAX has {len(there)} here")
            return engine(None if self.count == 1 else there[: self.count]).compile()
        chips = CHIPS.get((self.device, self.count))
        if chips is None:
            raise RuntimeError(f"{self.count} x {self.device} has no ahead-of-time compiler here")
        return absent_tpu.memory_of(engine(absent_tpu.mesh(chips).devices))


def _every_mesh(count: int, config: ModelConfig, policy: Policy) -> list[_Sizes]:
    """All meshes of `count` devices. `sequence` is used only where neither KV heads nor slots can be sharded along `model`."""
    sizes = [(n, m, count // (n * m)) for n in range(1, count + 1) for m in range(1, count + 1) if not count % (n * m)]
    return [
        (data, model, slots)
        for data, model, slots in sizes
        if slots == 1 or (not policy.info.heads_coupled and math.gcd(config.num_kv_heads, model * slots) == model)
    ]


def bound_for(
    config: ModelConfig, policy: str | Policy, budget: int | float | None = None
) -> tuple[str, Policy, tuple[str, ...]]:
    """A policy as text and bound to a model, with notes. Without a profile of the model's heads, `SHARES` applies.

    Raises:
        PolicyError: the policy is unknown, does not support this budget, or needs unknown properties of the model.
    """
    if isinstance(policy, str) and "share_" in policy:
        name, settings = read_policy(policy)
        settings |= {} if budget is None else {"budget": budget}
        text = ",".join(f"{key}={value}" for key, value in settings.items())
        return f"{name}:{text}", bound_policy(config, name, settings), ()
    found = get_policy(policy, budget=budget)
    shares = SHARES.get(found.info.name)
    try:
        return str(found), found.for_model(config), ()
    except PolicyError:
        if shares is None or getattr(found, "profile", None) is not None:
            raise
    settings = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    settings |= {f"share_{kind}": share for kind, share in shares.items()}
    told = ", ".join(f"{100 * share:.0f} % of heads are taken to be {kind}" for kind, share in shares.items())
    note = f"no profile of this model's heads: {told}, spread evenly"
    return str(found), bound_policy(config, found.info.name, settings), (note,)


def _fitting(given: _Question, ways: Sequence[Plan], kinds: Sequence[Kind], policy: str | Policy) -> tuple[Plan, ...]:
    """The ways with the least quantisation among those that fit, fastest first."""
    float_name = jnp.dtype(given.dtype).name
    called: list[tuple[Kind, str]] = [
        (kind, float_name if kind == "float" else kind) for kind in _LEAST_LOST if kinds.count(kind)
    ]
    for _, name in called:
        if found := tuple(way for way in ways if way.fits and way.weights == name):
            return found
    possible = [way for way in ways if way.refused is None]
    if not possible:
        return ()
    least = min(possible, key=lambda way: way.peak_bytes).weights
    smallest: Kind = next(kind for kind, name in called if name == least)
    longest = -(-max(way.context for way in ways) // _BUDGET_STEP)
    for cut in dict.fromkeys([policy] * _takes_budget(policy) + [_CUT]):
        low, high, best = 0, longest, ()
        while high - low > 1:
            middle = (low + high) // 2
            if found := given.fitting(smallest, cut, middle * _BUDGET_STEP):
                low, best = middle, found
            else:
                high = middle
        if best and cut == policy:
            return best
        if best:
            told = f"{policy} does not fit with any budget, so {cut} is proposed"
            return tuple(dataclasses.replace(way, notes=(*way.notes, told)) for way in best)
    return ()


def _takes_budget(policy: str | Policy) -> bool:
    name = policy.partition(":")[0] if isinstance(policy, str) and "share_" in policy else policy
    return get_policy(name).info.takes_budget


def _best_first(ways: Iterable[Plan]) -> tuple[Plan, ...]:
    def rank(way: Plan) -> tuple[Any, ...]:
        held = way.peak_bytes - way.memory
        return way.refused is not None, not way.fits, way.ms or 0.0 if way.fits else held

    return tuple(sorted(ways, key=rank))
