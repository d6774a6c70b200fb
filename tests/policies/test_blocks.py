"""Texts that are read in blocks, against the definition; and that its two ends are prefill and decoding."""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from policies import oracle_blocks as oracle
from policies import oracle_recompress, oracle_thresholded
from policies.driver import TINY, Case, compiled, compositions, every_policy, make_case
from policies.facts import all_facts, block_cases, facts_of
from policies.oracle_arrays import ROPE, rotate, shares
from policies.oracle_quest import QuestHead

from kvjax.cache import LayerSpec, Token, TokenBlock, attention, where_rows
from kvjax.cache.packing import PackedCache
from kvjax.pallas_kernels import block_attention
from kvjax.policies import (
    H2O,
    TOVA,
    AdaKV,
    ByLayer,
    CaM,
    CateKV,
    Chelsea,
    ChunkKV,
    ClusterKV,
    DuoAttention,
    ExpectedAttention,
    Full,
    KeyDiff,
    KNorm,
    Policy,
    PolicyError,
    PyramidKV,
    Quest,
    Random,
    SnapKV,
    StreamingLLM,
    TreeKV,
    by_head,
    get_policy,
    offloaded,
    quantized,
    recompress,
    thresholded,
    treekv,
)
from kvjax.policies.chelsea import SCHEDULES
from kvjax.policies.clusterkv import ClusteredCache
from kvjax.policies.families.noise import uniform
from kvjax.policies.transforms.coded import CodedCache

ROWS = 104
"""Rows of a batch of random texts."""


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """Kernels for GPUs see by slots what others see by positions: where the two differ attention is NaN."""

    def checked(q, k, v, q_pos, pos, weight=None, *, run, **options):
        out = block_attention(q, k, v, q_pos, pos, weight, run=run, **options)
        slot, query = (jnp.arange(n, dtype=jnp.int32) for n in (pos.shape[-1], q_pos.shape[-1]))
        by_slot = (slot >= run.first[..., None, None]) & (slot <= run.own[..., None, None] + query[:, None])
        asked, live = (q_pos >= 0)[:, None, :, None], (pos >= 0)[:, :, None]
        same = (by_slot & live) == (live & (pos[:, :, None] <= q_pos[:, None, :, None]))
        right = jnp.all(same | ~asked, axis=(1, 2, 3))
        return jnp.where(right[:, None, None, None], out, jnp.nan)

    monkeypatch.setattr(attention, "block_attention", checked)


# Reading.


@functools.cache
def reader(policy: Policy, spec: LayerSpec) -> Any:
    """Reads one block of so many tokens in each row: outputs, the state, positions and which of them are held."""
    layer = policy.layer(spec)

    @jax.jit
    def read(state: Any, q: Any, k: Any, v: Any, position: Any, count: Any, total: Any) -> Any:
        out, state, _ = layer.read_block(state, TokenBlock(q, k, v, position, count, total, spec.rope), {})
        slots = layer.view(state)
        return out, state, slots.pos, slots.live

    return read


def spec_of(case: Case, size: int, layer: int = 0) -> LayerSpec:
    """The layer of a case that is read in blocks of so many tokens."""
    return dataclasses.replace(case.spec, block=size, layer=layer)


def start(policy: Policy, spec: LayerSpec, totals: np.ndarray) -> Any:
    """A state before the first token."""
    return jax.jit(policy.layer(spec).init)(totals.astype(np.int32))


def counts(seed: int, lengths: np.ndarray, size: int) -> list[np.ndarray]:
    """Tokens of each row in every block: rows start late, pause, have blocks of any size, and finish when they may."""
    random = np.random.default_rng(seed)
    left, late, plan = lengths.copy(), random.integers(0, 3, size=len(lengths)), []
    while left.any():
        full = random.random(len(left)) < 0.4
        some = np.where(full, size, random.integers(0, size + 1, size=len(left)))
        some = np.minimum(np.where(len(plan) < late, 0, some), left)
        plan.append(some.astype(np.int32))
        left = left - some
    return plan


def read(policy: Policy, case: Case, spec: LayerSpec, plan: list[np.ndarray]) -> Any:
    """Outputs [B, S, N, H], the state and what is held, after each block. What stands behind a block's end is the text that follows."""
    step, position = reader(policy, spec), np.zeros(len(case.lengths), np.int32)
    totals = (case.lengths + case.steps).astype(np.int32)
    state = start(policy, spec, totals)
    yield None, jax.device_get(state), None
    for count in plan:
        at = np.minimum(position[:, None] + np.arange(spec.block), case.q.shape[1] - 1)
        taken = [np.take_along_axis(x, at[..., None, None], axis=1) for x in (case.q, case.k, case.v)]
        out, state, pos, live = step(state, *taken, position, count, totals)
        position = position + count
        pos, live = np.asarray(pos), np.asarray(live)
        held = [[set(p[m].tolist()) for p, m in zip(*row, strict=True)] for row in zip(pos, live, strict=True)]
        yield np.asarray(out), jax.device_get(state), held


def leaves_of(state: Any, row: Any) -> list[np.ndarray]:
    """All that a state says of some rows."""
    return [np.asarray(leaf)[row] for leaf in jax.tree.leaves(state)]


# The policies against the oracle.

Make = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Numbers [K, 70] of the first positions, drawn when a test asks for some."""

    kv_heads: int
    seed: int

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        spec = dataclasses.replace(make_case(0, [1], 1).spec, num_kv_heads=self.kv_heads)
        draw = jax.jit(lambda pos: uniform(spec, self.seed, pos))
        return np.asarray(draw(np.arange(70, dtype=np.int32)), np.float64)

    def __getitem__(self, at: Any) -> Any:
        return self.numbers[at]


def same(cls: Any, definition: Any, **options: Any) -> tuple[Policy, Make]:
    """A policy and its oracle with options of the same names."""
    return cls(**options), partial(definition, **options)


def cate(order: str = "max_then_sum", eta: float = 1.0, heads: int = 4, budget: int = 24, **options: int):
    """A consistent head and an adaptive one."""
    layout = {"sinks": 2, "recent": 4, "chunk": 4, "window": 6} | options | {"budget": budget, "order": order}
    config = TINY.with_attention(num_heads=heads)
    policy = CateKV(**layout, eta=eta, profile=(("consistent", "adaptive"),) * 2).bind(config)
    kinds = {(0,): partial(oracle.CateKV, **layout), (1,): partial(oracle.CateKV, **layout, kind="adaptive", eta=eta)}
    return policy, partial(oracle.ByHead, parts=kinds)


def duo(heads: int, **options: int):
    """A head that keeps everything and one that streams where it stood."""
    config = TINY.with_attention(num_heads=heads)
    policy = DuoAttention(**options, profile=(("retrieval", "streaming"),) * 2).bind(config)
    kinds = {(0,): oracle.Text, (1,): partial(oracle.Streaming, **options, by_place=False)}
    return policy, partial(oracle.ByHead, parts=kinds)


def rounds(cls: Any, definition: Any, every: int, **options: Any) -> tuple[Policy, Make]:
    """A scorer of prompts that goes on in rounds."""
    return recompress(cls(**options), every=every), partial(definition, **options, every=every)


def mixed():
    """Heads that share a choice beside one that streams and a tree."""
    parts = {
        "tova": same(TOVA, oracle.TOVA, budget=13),
        "stream": same(StreamingLLM, oracle.Streaming, budget=11, sinks=2),
        "tree": same(TreeKV, oracle.TreeKV, budget=14, sinks=2, block=4),
    }
    policy = by_head({name: part[0] for name, part in parts.items()}, [["tova", "stream", "tova", "tree"]] * 2)
    heads = {(0, 2): parts["tova"][1], (1,): parts["stream"][1], (3,): parts["tree"][1]}
    return policy, partial(oracle.ByHead, parts=heads)


def chelsea(schedule: str, **options: Any):
    return Chelsea(**options, schedule=schedule), partial(oracle.Chelsea, **options, schedule=SCHEDULES[schedule])


def cluster(kv_heads: int, **options: Any):
    """The choice of first centroids is the policy's own."""
    policy = ClusterKV(**{"budget": 20, "sinks": 3, "dense_layers": 0, "iterations": 3} | options)

    @functools.cache
    def rank() -> np.ndarray:
        spec = dataclasses.replace(make_case(0, [64], 6).spec, num_kv_heads=kv_heads, num_heads=kv_heads)
        pos = np.arange(70, dtype=np.int32)[None]
        shuffled = jax.jit(policy.layer(spec).shuffled)(pos, np.ones_like(pos, bool))
        return np.argsort(np.asarray(shuffled)[0], axis=-1)

    return policy, partial(
        oracle.ClusterKV, policy=policy, order=lambda head, positions: np.argsort(rank()[head][positions])
    )


def everything(policy: Policy) -> tuple[Policy, Make]:
    """What keeps all tokens, and attends to all of them while it reads."""
    return policy, oracle.Text


# By name: a policy and its oracle, query heads, KV heads, the layer of two.
CASES: dict[str, tuple[tuple[Policy, Make], int, int, int]] = {
    "full": (everything(Full()), 4, 2, 0),
    "quest": (everything(Quest(budget=16, page=4, dense_layers=0)), 4, 2, 0),
    "quest, odd pages": (everything(Quest(budget=16, page=5, dense_layers=0, recent=3)), 2, 2, 0),
    "clusterkv": (cluster(2, tokens_per_cluster=5, window=20, new_clusters=2), 4, 2, 0),
    "clusterkv, window below a cluster": (cluster(2, tokens_per_cluster=9, window=4, new_clusters=2), 2, 2, 0),
    "clusterkv, reading alone": (cluster(1, tokens_per_cluster=6, cluster_decode=False, sinks=0), 2, 1, 0),
    "clusterkv, few clusters": (cluster(1, tokens_per_cluster=29, cluster_decode=False, sinks=0), 2, 1, 0),
    "streaming_llm": (same(StreamingLLM, oracle.Streaming, budget=12, sinks=2), 4, 2, 0),
    "streaming_llm, fraction": (same(StreamingLLM, oracle.Streaming, budget=0.4, sinks=0), 3, 1, 0),
    "duoattention": (duo(4, budget=12, sinks=3), 4, 2, 0),
    "duoattention, MHA": (duo(2, budget=7, sinks=0), 2, 2, 0),
    "snapkv": (same(SnapKV, oracle.SnapKV, budget=16, window=4), 4, 2, 0),
    "snapkv, the class's defaults": (
        same(SnapKV, oracle.SnapKV, budget=19, window=3, pool="avg", kernel=5),
        2,
        2,
        0,
    ),
    "snapkv, fraction": (same(SnapKV, oracle.SnapKV, budget=0.3, window=1, pool=None), 4, 2, 0),
    "pyramidkv, below": (same(PyramidKV, oracle.PyramidKV, budget=16, window=4, beta=3), 4, 2, 0),
    "pyramidkv, above": (
        (PyramidKV(budget=17, window=3, beta=4), partial(oracle.PyramidKV, budget=17, window=3, beta=4, layer=1)),
        2,
        2,
        1,
    ),
    "adakv": (same(AdaKV, oracle.AdaKV, budget=16, window=4), 4, 2, 0),
    "adakv, no safeguard": (
        same(AdaKV, oracle.AdaKV, budget=11, window=3, alpha=0.0, pool="avg", kernel=3),
        3,
        3,
        0,
    ),
    "chunkkv": (same(ChunkKV, oracle.ChunkKV, budget=22, chunk=4, window=4), 4, 2, 0),
    "chunkkv, fraction, means, pooled": (
        same(ChunkKV, oracle.ChunkKV, budget=0.5, chunk=6, window=3, agg="mean", pool=5),
        2,
        2,
        0,
    ),
    "chunkkv, raw, one choice for all heads": (
        same(ChunkKV, oracle.ChunkKV, budget=20, chunk=3, window=5, score="raw", shared_heads=True),
        4,
        2,
        0,
    ),
    "catekv": (cate(), 4, 2, 0),
    "catekv, a share": (cate(eta=0.5, heads=2, budget=19, chunk=5), 2, 2, 0),
    "catekv, as printed": (cate("sum_then_max", eta=0.3, sinks=0, recent=3, chunk=3), 4, 2, 0),
    "expected_attention": (same(ExpectedAttention, oracle.ExpectedAttention, budget=18, sinks=2, future=8), 4, 2, 0),
    "expected_attention, MHA": (
        same(ExpectedAttention, oracle.ExpectedAttention, budget=15, sinks=0, future=5, epsilon=0.0),
        2,
        2,
        0,
    ),
    "h2o": (same(H2O, oracle.H2O, budget=16), 4, 2, 0),
    "h2o, last queries": (
        (H2O(budget=13, recent=2, observers="last", window=5), partial(oracle.H2O, budget=13, recent=2, observers=5)),
        2,
        2,
        0,
    ),
    "tova": (same(TOVA, oracle.TOVA, budget=14), 4, 2, 0),
    "tova, newest kept": ((TOVA(budget=9, keep_newest=True), partial(oracle.TOVA, budget=9, last=1)), 2, 2, 0),
    "keydiff": (same(KeyDiff, oracle.KeyDiff, budget=14), 4, 2, 0),
    "keydiff, MHA": (same(KeyDiff, oracle.KeyDiff, budget=9), 3, 3, 0),
    "knorm": ((KNorm(budget=14, dense_layers=0), partial(oracle.KNorm, budget=14)), 4, 2, 0),
    "knorm, fraction": ((KNorm(budget=0.4, dense_layers=0), partial(oracle.KNorm, budget=0.4)), 3, 3, 0),
    "random": ((Random(budget=14, seed=3), partial(oracle.Random, budget=14, drawn=Drawn(2, 3))), 4, 2, 0),
    "random, fraction": ((Random(budget=0.4), partial(oracle.Random, budget=0.4, drawn=Drawn(3, 0))), 3, 3, 0),
    "cam": ((CaM(budget=14, merge=4), partial(oracle.CaM, budget=14, merge=4, drawn=Drawn(2, 0))), 4, 2, 0),
    "treekv": (same(TreeKV, oracle.TreeKV, budget=24, sinks=2, recent=9, block=4), 4, 2, 0),
    "treekv, default regions": (same(TreeKV, oracle.TreeKV, budget=20, sinks=3, block=5), 4, 1, 0),
    "treekv, printed cycle": (
        same(TreeKV, oracle.TreeKV, budget=16, sinks=2, recent=4, block=2, cycle="printed"),
        2,
        1,
        0,
    ),
    "treekv, keep left": (same(TreeKV, oracle.TreeKV, budget=17, sinks=1, recent=5, block=3, keep="left"), 2, 2, 0),
    "chelsea": (chelsea("llama-3", budget=24, sinks=2, recent=5, chunk=4, every=5), 4, 2, 0),
    "chelsea, after each block": (chelsea("llama-2", budget=17, sinks=1, recent=4, chunk=6, every=1), 2, 2, 0),
    "chelsea, fraction, no chunks": (chelsea("qwen", budget=0.3, sinks=0, recent=3, chunk=None, every=2), 2, 1, 0),
    "recompress(snapkv)": (rounds(SnapKV, oracle_recompress.SnapKV, 9, budget=16, window=4), 4, 2, 0),
    "recompress(tova)": (rounds(TOVA, oracle_recompress.TOVA, 4, budget=12), 4, 2, 0),
    "thresholded(knorm)": (
        (
            thresholded(KNorm(budget=16, dense_layers=0), -2.8, window=3),
            partial(oracle_thresholded.KNorm, budget=16, threshold=-2.8, window=3),
        ),
        4,
        2,
        0,
    ),
    "mixed": (mixed(), 4, 4, 0),
}
for _name, (_oracle, _options, *_heads) in block_cases().items():
    _policy = get_policy(_name.partition(",")[0], **_options)
    CASES[_name] = ((_policy, partial(_oracle, **_options)), *_heads, 0)

FAST = {"full", "streaming_llm", "chunkkv", "catekv", "clusterkv", "treekv"}
"""One case of each kind, which is not among the slow ones; for one size of blocks."""

NAMED = [
    pytest.param(name, size, id=f"{name}, {size}", marks=marks)
    for name in CASES
    for size, marks in {
        2: pytest.mark.slow if name in FAST else pytest.mark.long,
        3: pytest.mark.long,
        7: () if name in FAST else pytest.mark.slow,
        16: pytest.mark.long,
    }.items()
]


@pytest.mark.rotating  # those of the default tier run for every commit, as of the tests below that are marked so
@pytest.mark.parametrize(("name", "size"), NAMED)
def test_equals_the_definition(name, size):
    """A ragged batch: what is kept after every block, the outputs of all its tokens; rows without one are as they were, bit for bit."""
    (policy, make), heads, kv_heads, layer = CASES[name]
    seed = len(name) + size
    lengths = np.random.default_rng(seed).integers(1, 61, size=ROWS)
    case = make_case(seed, lengths, 6, heads, kv_heads)
    check(name, policy, make, case, spec_of(case, size, layer), counts(seed, lengths, size))


def check(name: str, policy: Policy, make: Make, case: Case, spec: LayerSpec, plan: list[np.ndarray]) -> None:
    """Read a case block by block, and each row of it literally."""
    literals = []
    for row, length in enumerate(case.lengths.tolist()):
        text = (x[row, :length] for x in (case.q, case.k, case.v))
        literals.append(make(*text, length + case.steps, spec.block))
    states = read(policy, case, spec, plan)
    _, before, _ = next(states)
    for count, (out, after, held) in zip(plan, states, strict=True):
        for old, new in zip(leaves_of(before, count == 0), leaves_of(after, count == 0), strict=True):
            np.testing.assert_array_equal(old, new)
        before = after
        for row, n in enumerate(count.tolist()):
            if n:
                literal = literals[row]
                np.testing.assert_allclose(out[row, :n], literal.read(n), atol=3e-5, err_msg=f"row {row}")
                assert held[row] == literal.kept(), row
                check_state(name, after, row, literal)


SLIDING = ("full", "quest", "streaming_llm", "snapkv", "adakv", "chunkkv", "h2o", "tova", "rkv")


@pytest.mark.rotating
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "snapkv" else [pytest.mark.slow]) for name in SLIDING]
)
def test_sliding_windows(name):
    """In layers that have one, queries see no further, wherever what is kept stands."""
    (policy, make), heads, kv_heads, _ = CASES[name]
    lengths = np.random.default_rng(11).integers(1, 61, size=ROWS)
    case = make_case(12, lengths, 6, heads, kv_heads)
    spec = dataclasses.replace(spec_of(case, 6), window=11)
    check(name, policy, partial(make, sliding=11), case, spec, counts(13, lengths, 6))


def check_state(name: str, state: Any, row: int, literal: Any) -> None:
    """What else a state of a method holds."""
    if name.startswith("h2o"):
        for head, scores in enumerate(literal.score):
            slots = np.asarray(state.cache.pos)[row, head].tolist()
            got = [np.asarray(state.score)[row, head, slots.index(pos)] for pos in scores]
            np.testing.assert_allclose(got, list(scores.values()), rtol=1e-4)
    elif name.startswith("chelsea"):
        for head, own in enumerate(literal.clusterings):
            count = len(own.entries)
            assert state.cache.pos[row, head, :count].tolist() == [e["pos"] for e in own.entries]
            assert state.cache.weight[row, head, :count].tolist() == [e["n"] for e in own.entries]
            for part in "kv":
                expected = np.stack([e[part] for e in own.entries])
                np.testing.assert_allclose(getattr(state.cache, part)[row, head, :count], expected, atol=3e-5)
    elif name.startswith("treekv"):
        for head, own in enumerate(literal.trees):
            rank = np.argsort(state.rank[row, head], kind="stable")[: len(own.entries)]
            assert state.cache.pos[row, head, rank].tolist() == [e["pos"] for e in own.entries]
            np.testing.assert_allclose(state.score[row, head, rank], [e["S"] for e in own.entries], rtol=1e-4)
            np.testing.assert_array_equal(state.steps[row, head, rank], [e["C"] for e in own.entries])
    elif name.startswith("clusterkv"):
        for head, own in enumerate(literal.stores):
            assert int(state.clusters[row]) == len(own.clusters)
            assert int(state.clustered[row]) == max(literal.seen - len(own.tail), own.policy.sinks)
            spans = zip(state.starts[row, head], state.sizes[row, head], strict=True)
            order = state.order[row, head].tolist()
            assert [order[a : a + n] for a, n in spans][: len(own.clusters)] == own.clusters
            np.testing.assert_allclose(state.centroids[row, head, : len(own.clusters)], own.centroids, atol=3e-5)
    elif name.startswith("quest"):
        for head in range(literal.heads):
            page = CASES[name][0][0].page
            for at in range(0, literal.seen, page):
                keys = literal.k_turned[at : min(at + page, literal.seen), head]
                bounds = np.concatenate([keys.min(axis=0), keys.max(axis=0)])
                np.testing.assert_allclose(state.bounds[row, head, at // page], bounds, atol=3e-5)


# The ends: a whole prompt, and one token.


def reading(budget: int) -> list[Policy]:
    """Every policy that reads in blocks, and the compositions."""
    some = [dataclasses.replace(p, n_clusters=None) if isinstance(p, ClusterKV) else p for p in every_policy(budget)]
    spec = make_case(0, [60], 6).spec
    return [p for p in [*some, *compositions(budget)] if p.layer(spec).reads != "whole"]


def quick(policies: list[Policy], names: set[str]) -> list[Any]:
    """Policies as parameters of a test, of which only these are not slow."""
    kinds = [policy.info.name.partition("(")[0] for policy in policies]
    marks = [[] if kind in names else [pytest.mark.slow] for kind in kinds]
    return [pytest.param(p, id=p.info.name, marks=mark) for p, mark in zip(policies, marks, strict=True)]


def layer_of(policy: Policy) -> int:
    """The second of two where that is another."""
    return int(isinstance(policy, PyramidKV | ByLayer))


def test_what_reads_in_blocks():
    """Nearly everything does."""
    spec = make_case(0, [60], 6).spec
    names = {p.info.name for p in every_policy(16)} - {p.info.name for p in reading(16)}
    assert names == {name for name, facts in all_facts().items() if facts.whole_prompts}
    assert [p.info.name for p in reading(16) if p.layer(spec).reads == "tokens"] == ["cam"]


@pytest.mark.rotating
@pytest.mark.parametrize(
    "policy", quick([p for p in reading(16) if not isinstance(p, CaM)], {"snapkv", "treekv", "clusterkv"})
)
def test_one_block_is_a_prompt(policy):
    """A block that holds whole prompts, of any length up to its own: the same state in all that it says."""
    lengths = np.random.default_rng(3).integers(1, 65, size=40)
    case = make_case(4, lengths, 6)
    spec = spec_of(case, 64, layer_of(policy))
    *_, (_, got, _) = read(policy, case, spec, [lengths.astype(np.int32)])
    inside = (np.arange(64) < lengths[:, None])[..., None, None]
    whole = (np.where(inside, x[:, :64], 0) for x in (case.q, case.k, case.v))
    want = jax.device_get(compiled(policy, spec)[0](*whole, case.lengths))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    got, want = (said(policy.layer(spec), state) for state in (got, want))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


def said(layer: Any, state: Any) -> Any:
    """A state without what stands where clusters are none, and packed numbers unpacked where there are some."""
    if isinstance(state, PackedCache | CodedCache):
        return layer.view(jax.tree.map(to_jax, state))
    if not isinstance(state, ClusteredCache):
        return state
    used = (np.arange(state.sizes.shape[-1]) < state.clusters[:, None])[:, None]
    centroids = np.where(used[..., None], state.centroids, 0)
    return dataclasses.replace(state, centroids=centroids, starts=np.where(used, state.starts, 0))


@pytest.mark.rotating
@pytest.mark.parametrize(
    "policy",
    quick(
        [p for p in reading(16) if p.info.stage in ("both", "none") and not isinstance(p, ClusterKV)],
        {"tova", "by_head", "cam"},
    ),
)
def test_blocks_of_one_token_are_decoding(policy):
    """What is kept, with all that is known of it, and outputs, in rows that have a token."""
    lengths = np.random.default_rng(5).integers(20, 41, size=12)
    case = make_case(8, lengths, 6)
    spec, plan = spec_of(case, 1, layer_of(policy)), counts(8, lengths, 1)
    step, there = compiled(policy, spec)[1], jax.jit(where_rows)
    rows, position = np.arange(12), np.zeros(12, np.int32)
    blocks = read(policy, case, spec, plan)
    next(blocks)
    state = start(policy, spec, case.lengths + case.steps)
    for count, (out, got, _) in zip(plan, blocks, strict=True):
        token = (x[rows, position] for x in (case.q, case.k, case.v))
        expected, new = step(state, *token, position)
        some = count > 0
        state = there(some, new, state)
        np.testing.assert_allclose(out[some, 0], np.asarray(expected)[some], atol=2e-5)
        position = position + count
        got, want = (said(policy.layer(spec), own) for own in (got, state))
        for one, other in zip(slots_of(got, policy), slots_of(want, policy), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


def slots_of(state: Any, policy: Policy) -> list[np.ndarray]:
    """What each cache in a state holds, in order of position, and what else the state says."""
    if isinstance(state, tuple):
        return [array for own in state for array in slots_of(own, policy)]
    slots = state.cache
    live = np.asarray(slots.weight) > 0
    order = np.argsort(np.where(live, slots.pos, 10**6), axis=-1, kind="stable")
    known = [slots.k, slots.v, slots.pos, slots.weight]
    if state is not slots:  # KeyDiff's scores are of the moment
        left_out = {"cache", "score"} if isinstance(policy, KeyDiff) else {"cache"}
        known += [getattr(state, field.name) for field in dataclasses.fields(state) if field.name not in left_out]
    found = [np.sum(live, axis=-1), np.asarray(slots.seen)]
    for array in map(np.asarray, known):
        if array.shape[:3] == live.shape:
            array = array.reshape(*live.shape, -1)
            array = np.take_along_axis(np.where(live[..., None], array, 0), order[..., None], axis=2)
        found.append(array)
    return found


# Rows, and what follows.

KINDS = (
    "streaming_llm",
    "snapkv",
    "adakv",
    "chunkkv",
    "catekv",
    "expected_attention",
    "h2o",
    "quest",
    "clusterkv",
    "treekv",
    "chelsea",
    "cam",
    "rkv",
    "mixed",
)
"""One case of each kind of state."""


def kinds(*names: str) -> pytest.MarkDecorator:
    """One test for each of them, of which only these are not slow."""
    marks = {True: [], False: [pytest.mark.slow]}
    return pytest.mark.parametrize("name", [pytest.param(kind, marks=marks[kind in names]) for kind in KINDS])


@pytest.mark.rotating
@kinds("chunkkv")
def test_rows_are_read_as_if_alone(name):
    (policy, _), heads, kv_heads, layer = CASES[name]
    case = make_case(2, [50, 3, 17, 33, 60], 6, heads, kv_heads)
    plan = counts(3, case.lengths, 9)
    together = list(read(policy, case, spec_of(case, 9, layer), plan))[1:]
    for row in range(5):
        part = slice(row, row + 1)
        # As wide as the others' text, so that state and budgets have the same room.
        alone = Case(case.q[part], case.k[part], case.v[part], case.lengths[part], 6)
        own = read(policy, alone, dataclasses.replace(spec_of(case, 9, layer), batch=1), [n[part] for n in plan])
        next(own)
        for count, (out, state, held), (own_out, own_state, own_held) in zip(plan, together, own, strict=True):
            assert held[row] == own_held[0]
            np.testing.assert_allclose(out[row, : count[row]], own_out[0, : count[row]], atol=2e-5)
            for one, other in zip(leaves_of(state, row), leaves_of(own_state, 0), strict=True):
                np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


@pytest.mark.rotating
@kinds("snapkv", "clusterkv")
def test_decoding_goes_on_from_blocks(name):
    """A new token is held beside what was kept of the text, and attends to all of it, or to what a sparse method selects."""
    (policy, make), heads, kv_heads, index = CASES[name]
    lengths = np.random.default_rng(6).integers(1, 61, size=12)
    case, group = make_case(9, lengths, 6, heads, kv_heads), heads // kv_heads
    spec, plan = spec_of(case, 8, index), counts(9, lengths, 8)
    *_, (_, state, held) = read(policy, case, spec, plan)
    texts = [make(*(x[row, :n] for x in (case.q, case.k, case.v)), n + 6, 8) for row, n in enumerate(lengths.tolist())]
    for count in plan if policy.info.memory == "sparse" else []:
        for text, n in zip(texts, count.tolist(), strict=True):
            text.read(n) if n else None
    step = decoder(policy, spec)
    by_place = {"streaming_llm": {0, 1}, "treekv": {0, 1}, "cam": {0, 1}, "mixed": {1, 3}}.get(name, set())
    for i in range(case.steps):
        rows, pos = np.arange(12), (lengths + i).astype(np.int32)
        q, k, v = (x[rows, pos] for x in (case.q, case.k, case.v))
        out, state, slots, left = jax.device_get(step(state, q, k, v, pos))
        for row, head in np.ndindex(12, kv_heads):
            newest = int(pos[row])
            live = slots.weight[row, head] > 0
            places = np.flatnonzero(live)[np.argsort(slots.pos[row, head][live])]
            positions, queries = slots.pos[row, head, places], q[row, head * group : (head + 1) * group]
            assert set(positions.tolist()) == {*held[row][head], newest}
            if name == "quest":
                store = QuestHead(policy.budget, policy.page)
                for p in range(newest + 1):
                    store.append(case.k[row, p, head], case.v[row, p, head])
                expected = store.attend(queries)[0]
            elif name == "clusterkv":
                expected = texts[row].stores[head].step(queries, k[row, head], v[row, head], newest)[0]
            else:
                keys, at = slots.k[row, head, places].astype(np.float64), newest
                if head in by_place:
                    keys, at = rotate(ROPE, keys, np.arange(len(keys))), len(keys) - 1
                logs = np.log(slots.weight[row, head, places])
                probs = shares(rotate(ROPE, queries, at) @ keys.T / np.sqrt(8) + logs)
                expected = probs @ slots.v[row, head, places]
            np.testing.assert_allclose(out[row, head * group : (head + 1) * group], expected, atol=3e-5)
        held = [[set(p[m].tolist()) for p, m in zip(*row, strict=True)] for row in zip(*left, strict=True)]


@functools.cache
def decoder(policy: Policy, spec: LayerSpec) -> Any:
    """Decodes one token: outputs, the state, the slots that were attended to, and positions that are held after it, and which."""
    layer = policy.layer(spec)

    @jax.jit
    def step(state: Any, q: Any, k: Any, v: Any, pos: Any) -> Any:
        token = Token(q, k, v, pos, spec.rope)
        out, state, _ = layer.attend(layer.append(state, token), token, {})
        slots, state = layer.view(state), layer.compress(state)
        left = layer.view(state)
        return out, state, slots, (left.pos, left.live)

    return step


# By hand.


@pytest.mark.parametrize("keep", [pytest.param("left", marks=pytest.mark.slow), "score"])
def test_a_tree_of_equal_scores_is_that_of_any_block(keep, monkeypatch):
    """Blocks of S and of 2 S tokens, S a multiple of section 4.2's, give the same tree."""

    def equal(prompt, window, spec):
        return jnp.ones((spec.batch, spec.num_kv_heads, prompt.size), jnp.float32)

    monkeypatch.setattr(treekv, "last_queries", equal)
    policy = TreeKV(budget=28, sinks=4, recent=4, block=4, keep=keep)  # a tree of five blocks
    lengths = np.asarray([48, 144, 96, 16, 192])
    case = make_case(1, lengths, 8, 2, 1)
    trees = []
    for size in (4, 8, 48):
        plan = [np.clip(lengths - at, 0, size).astype(np.int32) for at in range(0, 192, size)]
        reader.cache_clear()  # compiled with these scores
        *_, (_, state, held) = read(policy, case, spec_of(case, size), plan)
        trees.append((held, state.scope.tolist()))
    reader.cache_clear()
    assert trees == trees[:1] * 3
    assert [len(head) for row in trees[0][0] for head in row] == [28, 28, 28, 16, 28]


WHOLE = [
    *(policy for policy in every_policy(16) if facts_of(policy.info.name).whole_prompts),
    ChunkKV(budget=16, chunk=4, window=4, rule="kvpress"),
    ChunkKV(budget=16, chunk=4, window=4, strict=True),
    ClusterKV(budget=16, sinks=2, dense_layers=0, n_clusters=5),
    offloaded(Full()),
    quantized(SnapKV(budget=16, window=4)),
    by_head({"a": Full(), "b": quantized(SnapKV(budget=16, window=4))}, [["a", "b"], ["a", "a"]]),
]


@pytest.mark.parametrize("policy", WHOLE, ids=str)
def test_what_needs_the_whole_prompt_says_so(policy):
    case = make_case(0, [60], 6)
    spec = spec_of(case, 8)
    count = to_jax([0])
    block = TokenBlock(*(to_jax(x[:, :8]) for x in (case.q, case.k, case.v)), count, count, count, spec.rope)
    layer = policy.bind(TINY).layer(spec)
    state = layer.init()
    with pytest.raises(PolicyError, match=r"chooses from the whole prompt.*Leave prefill_block out"):
        layer.read_block(state, block, {})
