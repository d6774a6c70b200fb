"""`plan`: whether a model, a policy and a context fit some devices, and how fast they may be, before there are weights or devices.

    for way in kvjax.plan("meta-llama/Llama-3.1-70B", device="h200", count=4, context=1_000_000, policy="catekv"):
        print(way.mesh, way.peak_bytes, way.fits, way.largest_batch, way.floor_ms)

Bytes of weights and cache are those of an `Engine` for the devices' shapes. What programs need besides is the compiler's word where it is
asked for and is here, and else `workspace`, a formula.
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
from kvjax.runtime import ahead_of_time
from kvjax.runtime.engine import Engine, Memory
from kvjax.runtime.generation import BLOCK

from .sums import step_sums, sums_seconds
from .workspace import cache_bytes, workspace

Kind = Literal["float", "int8", "int4", "as stored"]

WEIGHTS: tuple[Kind, ...] = ("float", "int8", "int4")
"""Kinds of weights that are planned for unasked, from what loses least."""

_LEAST_LOST: tuple[Kind, ...] = ("float", "as stored", "int8", "int4")

SHARES: Mapping[str, Mapping[str, float]] = {"catekv": {"adaptive": 0.4}, "duoattention": {"retrieval": 0.5}}
"""Shares of heads that keep everything where a model has no profile: r = 0.4 of CateKV's evaluation (section 4.2), and DuoAttention's
published sparsity for models whose query heads share KV heads."""

CHIPS: Mapping[tuple[str, int], str] = {
    ("v5e", 1): "v5e",
    ("v5p", 1): "v5p",
    ("v6e", 1): "v6e",
    ("v5e", 4): "v5e:2x2",
    ("v5p", 4): "v5p:2x2x1",
    ("v6e", 8): "v6e:2x4",
}
"""What `kvjax.runtime.ahead_of_time.mesh` calls so many chips."""

_Sizes = tuple[int, ...]
"""Devices along each of `AXES`."""

_BUDGET_STEP = 256
"""What budgets that are proposed are multiples of."""

_CUT = "snapkv"
"""Whose budgets are proposed where a policy that has none does not fit."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to run a model. Bytes and times are those of each device.

    Attributes:
        device, count: what it runs on.
        mesh: how devices share the work, as `kvjax.load` takes it.
        policy: how the cache is kept.
        weights: how the layers' matrices are held; the type, of floats.
        context, new_tokens: tokens of the prompt and after it, in each row.
        batch: rows, over all devices: at least one for each along `data`.
        block: tokens of the prompt that are read at a time; 0 if it is read whole.
        memory: bytes that programs may have.
        weight_bytes, cache_bytes: what stays.
        host_cache_bytes: of the cache in the host's memory, no part of the others.
        workspace_bytes: what the program that holds most has besides.
        memory_by: "formula" or "compiler": whose word `workspace_bytes` is.
        largest_batch: the most rows that fit, by the formula.
        step_bytes: bytes that a decoding step reads.
        floor_ms: milliseconds per token, or step of all rows, that `step_bytes` take by the data sheet's bandwidth. None if that is unknown.
        sums: how often devices add up in a step, or put together what each has found in its slots.
        sums_ms: milliseconds of it, by a measured table; None where there is none for the device.
        notes: what else is to be known.
        refused: why this is impossible, where it is; mostly there are no bytes then.
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
        """The most that is held at a time."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool:
        """Whether that is within the device's memory."""
        return self.refused is None and self.peak_bytes <= self.memory

    @property
    def ms(self) -> float | None:
        """Milliseconds per token by floor and sums; None where the floor is unknown."""
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
    """What each way to share a model among some devices takes and allows.

    Args:
        model: a checkpoint, of which only headers are read; a hub id or `config.json`, without weights; a shape's name
            (`kvjax.models.PRESETS`); or a `ModelConfig`. The default model if None.
        device: a key of `kvjax.devices.PRESETS`, or "cpu", this machine's, for which `memory` is to be given.
        count: devices, alike and of one host.
        mesh: how they share the work, such as "data=2,model=4"; by default every way to do so, along "sequence" only where KV heads cannot be
            dealt to more devices.
        context: tokens of each row's prompt; by default the trained window less `new_tokens`.
        new_tokens: tokens that follow.
        batch: rows; rounded up to what a mesh deals.
        policy, budget: as for `kvjax.generate`. Where CateKV and DuoAttention have no profile of the model, heads are shared out as
            `SHARES` has it; `share_adaptive=0.3` among CateKV's hyperparameters says otherwise.
        weights: "float", "int8", "int4" or "as stored", one or several; by default the first three.
        embedding: the same, of embedding and head; floats by default.
        dtype: type of floats, and of the cache.
        prefill_block: tokens of the prompt to read at a time; by default 4096 where the policy can, else the whole prompt.
        memory: bytes that programs may have on each device, instead of the preset's.
        compile: ask the compiler for the memory of the first way that fits, or else of the first, if it is here: for TPUs by
            libtpu, for the CPU by XLA. This takes minutes for a large model.
        fit: only the way that loses least among those that fit: with the widest weights; where nothing fits, with those that take least and
            the largest budget that then does, of SnapKV if the policy has none or no budget will do. Empty if there is none.

    Returns:
        Those that fit first, by their milliseconds per token; then those that do not by what they hold; then those that are refused.

    Raises:
        ValueError: a number, a device or a mesh is none.
        CheckpointError: see `kvjax.conversion.describe`.
        PolicyError: the policy is unknown, or cannot work with this model or length.
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
    """What is asked, less weights and policy; attributes as `plan`'s arguments."""

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
            raise ValueError("device='cpu' has no memory of its own in the table; give memory, in bytes")
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
        """One for each mesh."""
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
        """Those that fit, the best first; none where the policy cannot work with so small a budget."""
        try:
            return tuple(way for way in _best_first(self.ways(kind, policy, budget)) if way.fits)
        except PolicyError:
            return ()

    def compiled(self, way: Plan) -> Plan:
        """The same with the compiler's word for what it holds, or a note that there is none."""
        sizes = parse_mesh(way.mesh)
        try:
            memory = self._compiled(way, tuple(sizes.get(axis, 1) for axis in AXES))
        except RuntimeError as error:
            told = str(error).partition("\n")[0]
            if "RESOURCE_EXHAUSTED" in told:
                return dataclasses.replace(way, memory_by="compiler", refused=f"the compiler refuses it: {told}")
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
            block = BLOCK if all(policy.layer(spec).traits.reading == "blocks" for spec in specs) else None
        return Engine(shapes, policy, **options, mesh=mesh, block=block)

    def _way(self, shapes: Params, kind: Kind, asked: str, notes: tuple[str, ...], sizes: _Sizes) -> Plan:
        policy = self.bound[asked]
        data = sizes[0]
        batch = -(-self.batch // data) * data
        name = shapes.dtype.name if kind == "float" else kind
        # The third axis is named where there is one.
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
        read = floor.weight_bytes(engine.weights) + cache_read
        sums = step_sums(engine.config) + engine.dealt_caches if engine.shard.model > 1 else 0
        per_sum = 4 * batch // data * engine.config.hidden_size
        sums_s = None if device is None else sums_seconds(device, sums, per_sum)
        if engine.shard.copies > 1:
            notes = (*notes, f"{mesh}: {engine.shard.copies} devices hold the same KV heads")
        if repeated := engine.repeated_cache_bytes:
            share = f"{100 * repeated / cached:.0f} % of the cache of a device"
            notes = (*notes, f"{mesh}: {share} is the same on all {engine.shard.slots} that share slots")
        if on_host:
            notes = (*notes, "what is read over the bus to the host is not in the time")
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
        """Rows that fit, of which each takes as much as another."""

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
                raise RuntimeError(f"{self.count} CPU devices are asked for, and JAX has {len(there)} here")
            return engine(None if self.count == 1 else there[: self.count]).compile()
        chips = CHIPS.get((self.device, self.count))
        if chips is None:
            raise RuntimeError(f"{self.count} x {self.device} has no compiler that works ahead of time here")
        return ahead_of_time.memory_of(engine(ahead_of_time.mesh(chips).devices))


def _every_mesh(count: int, config: ModelConfig, policy: Policy) -> list[_Sizes]:
    """Every way to share work among so many devices, along the third axis only where the second cannot deal so many KV heads, nor slots."""
    sizes = [(n, m, count // (n * m)) for n in range(1, count + 1) for m in range(1, count + 1) if not count % (n * m)]
    return [
        (data, model, slots)
        for data, model, slots in sizes
        if slots == 1 or (not policy.info.joint_heads and math.gcd(config.num_kv_heads, model * slots) == model)
    ]


def bound_for(
    config: ModelConfig, policy: str | Policy, budget: int | float | None = None
) -> tuple[str, Policy, tuple[str, ...]]:
    """A policy as text and bound to a model, and what is to be said of it: where heads are of kinds and no profile tells which, by `SHARES`.

    Raises:
        PolicyError: the policy is unknown, does not take this budget, or needs something of the model that is not known.
    """
    if isinstance(policy, str) and "share_" in policy:
        name, settings = read_policy(policy)
        settings |= {} if budget is None else {"budget": budget}
        text = ",".join(f"{key}={value}" for key, value in settings.items())
        return f"{name}:{text}", bound_policy(config, name, settings), ()
    found = get_policy(policy, budget=budget)
    shares = SHARES.get(found.info.name)
    try:
        return str(found), found.bind(config), ()
    except PolicyError:
        if shares is None or getattr(found, "profile", None) is not None:
            raise
    settings = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    settings |= {f"share_{kind}": share for kind, share in shares.items()}
    told = ", ".join(f"{100 * share:.0f} % of heads are taken to be {kind}" for kind, share in shares.items())
    note = f"no profile of this model's heads: {told}, spread evenly"
    return str(found), bound_policy(config, found.info.name, settings), (note,)


def _fitting(given: _Question, ways: Sequence[Plan], kinds: Sequence[Kind], policy: str | Policy) -> tuple[Plan, ...]:
    """The ways that lose least of those that fit, the fastest first."""
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
