"""ChunkKV against the literal algorithm."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from policies import oracle_chunkkv as oracle
from policies.driver import Case, make_case, run
from policies.oracle_arrays import ROPE, rotate, softmax
from policies.slots import after_prompt, kept

import kvjax
from kvjax.cache import layer_specs
from kvjax.models import transformer
from kvjax.policies import (
    ByLayer,
    ChunkKV,
    PolicyError,
    StreamingLLM,
    by_head,
    by_layer,
    chunk_eviction,
    chunk_token_hybrid,
)
from kvjax.policies.budget import budget_rows
from kvjax.runtime import decoding
from kvjax.runtime.engine import Engine

HAND = np.asarray([0.1] * 10 + [0.05] * 10 + [0.3] * 5)
"""Attention that the 25 tokens of a prompt get, of which the last 4 are the window."""


def keep(policy: ChunkKV, *heads) -> list[list[int]]:
    """What the policy keeps of one prompt whose tokens get this attention in each head."""
    scores = np.asarray(heads, np.float32)[None]
    sizes = (np.asarray([n], np.int32) for n in (scores.shape[-1], policy.budget))
    return [np.flatnonzero(head).tolist() for head in np.asarray(mask(policy, scores, *sizes))[0]]


@functools.partial(jax.jit, static_argnums=0)
def mask(policy: ChunkKV, scores, length, budget):
    return policy.keep_mask(scores, length, budget)


# The cases worked out by hand.


def test_whole_chunks_and_the_window():
    """Sums of the three chunks before the window: 1, 0.5, and 0.3 for the single token 20."""
    expected = [*range(10), *range(21, 25)]
    assert keep(ChunkKV(budget=14, window=4), HAND) == [expected]
    assert oracle.survivors([HAND], 14, 10, 4) == [expected]


def test_algorithm_3_to_the_letter():
    """The last chunk, 1.5 with the window's tokens in it, wins and adds one token to the window: 5 of 14 slots are used."""
    assert keep(ChunkKV(budget=14, window=4, strict=True), HAND) == [[20, 21, 22, 23, 24]]
    assert oracle.survivors([HAND], 14, 10, 4, strict=True) == [[20, 21, 22, 23, 24]]


def test_two_chunks():
    assert keep(ChunkKV(budget=24, window=4), HAND) == [[*range(20), *range(21, 25)]]


def test_a_mean_lets_a_short_chunk_win():
    assert keep(ChunkKV(budget=14, window=4, agg="mean"), HAND) == [list(range(20, 25))]


def test_equal_chunks_are_taken_from_the_left():
    assert keep(ChunkKV(budget=10, chunk=3, window=4), np.ones(20)) == [[0, 1, 2, 3, 4, 5, 16, 17, 18, 19]]


def test_heads_choose_apart_or_together():
    a, b = np.asarray([5.0, 1, 1, 0, 0]), np.asarray([0.0, 1, 6, 0, 0])
    assert keep(ChunkKV(budget=3, chunk=1, window=2), a, b) == [[0, 3, 4], [2, 3, 4]]
    assert keep(ChunkKV(budget=3, chunk=1, window=2, shared_heads=True), a, b) == [[2, 3, 4]] * 2


def test_pooling_lifts_the_neighbours():
    scores = np.asarray([0.0, 0, 0, 9, 0, 0, 5, 4, 0, 0])
    assert keep(ChunkKV(budget=5, chunk=1, window=2), scores) == [[3, 6, 7, 8, 9]]
    assert keep(ChunkKV(budget=5, chunk=1, window=2, pool=3), scores) == [[2, 3, 4, 8, 9]]


def test_a_whole_budget_of_window():
    assert keep(ChunkKV(budget=4, window=4), HAND) == [[21, 22, 23, 24]]


def test_kvpress_by_hand():
    """Of three chunks ⌊3 · 17 / 25⌋ = 2 are kept; the window scores 1.3, one more than the best token, so 20 to 24 are 1.1 on average."""
    policy = ChunkKV(budget=17, window=4, agg="mean", rule="kvpress")
    assert keep(policy, HAND) == [[*range(10), *range(20, 25)]]
    assert oracle.survivors([HAND], 17, 10, 4, agg="mean", rule="kvpress") == keep(policy, HAND)
    assert keep(dataclasses.replace(policy, budget=8), HAND) == [list(range(20, 25))]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 10, 20])
def test_kvpress_counts_in_whole_numbers(chunk):
    lengths, budgets = (x.reshape(-1) for x in np.mgrid[2:80, 1:80])
    lengths, budgets = lengths[budgets < lengths], budgets[budgets < lengths]
    policy = ChunkKV(chunk=chunk, rule="kvpress")
    lengths, budgets = np.append(lengths, 1_000_003), np.append(budgets, 900_001)
    counts = jax.jit(policy._count)(*(x.astype(np.int32) for x in (lengths, lengths, budgets)))
    chunks = -(-lengths // chunk)
    np.testing.assert_array_equal(counts, np.maximum(chunks * budgets // lengths, 1))


@pytest.mark.parametrize(("fraction", "chunks"), [(0.5, 13), (0.25, 6), (0.01, 1)])
def test_kvpress_takes_a_share_of_the_chunks(fraction, chunks):
    """517 tokens are 26 chunks of 20, whatever number of tokens the share is of them, and however many tokens follow."""
    policy, length = ChunkKV(budget=fraction, chunk=20, rule="kvpress"), to_jax([517], jnp.int32)
    counts = jax.jit(lambda length: policy._count(length, length, budget_rows(fraction, length)))
    assert counts(length).tolist() == [chunks]


KVPRESS = {"agg": "mean", "pool": 5, "shared_heads": True, "rule": "kvpress"}


def observed_and_kept(length: int, ratio: float, window: int, chunk: int) -> tuple[np.ndarray, list[list[int]]]:
    """Random attention of a window [K, G, w, n - w] as kvpress has it, and what the policy keeps of the same prompt."""
    case, held = make_case(length, [length], steps=3), kept_by_kvpress(ratio, window, chunk)[length]
    rotated_q, rotated_k = (rotate(ROPE, x, np.arange(x.shape[1])[:, None]) for x in (case.q, case.k))
    attention = np.zeros((2, 2, window, length - window))
    for head, n, i in np.ndindex(2, 2, window):
        pos = length - window + i
        logits = rotated_k[0, : pos + 1, head] @ rotated_q[0, pos, 2 * head + n] / np.sqrt(8)
        attention[head, n, i] = softmax(logits)[: length - window]
    return attention, [sorted(tokens) for tokens in held]


LENGTHS = (23, 96, 117, 135, 260)
RATIOS = pytest.mark.parametrize(("length", "ratio"), [(n, ratio) for n in LENGTHS for ratio in (0.5, 0.75)])


@functools.cache
def kept_by_kvpress(ratio: float, window: int, chunk: int) -> dict[int, list[set[int]]]:
    """What the policy keeps, by length, of prompts that are rows of one batch."""
    policy = ChunkKV(budget=1 - ratio, chunk=chunk, window=window, **KVPRESS)
    rows = [make_case(length, [length], steps=3) for length in LENGTHS]
    width = max(row.q.shape[1] for row in rows)

    def together(name: str) -> np.ndarray:
        arrays = (getattr(row, name) for row in rows)
        return np.concatenate([np.pad(x, ((0, 0), (0, width - x.shape[1]), (0, 0), (0, 0))) for x in arrays])

    case = Case(*map(together, "qkv"), np.asarray(LENGTHS, np.int32), steps=3)
    return dict(zip(LENGTHS, kept(policy, case, after_prompt(policy, case)), strict=True))


@RATIOS
def test_kvpress_keeps_the_same(length, ratio):
    """Whole and partial last chunks, one with a single token of the window, and a prompt shorter than a chunk."""
    attention, held = observed_and_kept(length, ratio, window=16, chunk=24)
    assert held == oracle.kvpress(attention, ratio, chunk=24, pool=5)


@pytest.mark.oracle
@RATIOS
def test_kvpress_in_torch_keeps_the_same(length, ratio):
    """Its tensor operations in torch: average pooling, padding by the highest score and one, chunks of summed heads."""
    torch = pytest.importorskip("torch", reason="the `oracle` extra is not installed")
    attention, held = observed_and_kept(length, ratio, window=16, chunk=24)
    scores = torch.tensor(attention).mean(dim=2).reshape(1, 4, -1)
    scores = torch.nn.functional.avg_pool1d(scores, kernel_size=5, padding=2, stride=1).reshape(1, 2, 2, -1).mean(2)
    scores = torch.nn.functional.pad(scores, (0, 16), value=scores.max().item() + 1)
    if length < 24:
        tokens = scores.topk(max(1, int(length * (1 - ratio))), dim=-1).values.amin(-1)
        assert [len(head) for head in held] == [max(1, int(length * (1 - ratio)))] * 2
        assert all((scores[0, i, head] >= tokens[0, i]).all() for i, head in enumerate(held))
        return
    chunks = scores.sum(dim=1)[0].split(24)
    best = torch.stack([chunk.mean() for chunk in chunks]).topk(max(1, int(len(chunks) * (1 - ratio)))).indices
    assert held == [sorted(pos for i in best.tolist() for pos in range(length)[24 * i : 24 * (i + 1)])] * 2


# Random cases against the oracle.

CONFIGURATIONS = {
    "gqa": ({"budget": 24, "chunk": 4, "window": 4}, 4, 2),
    "mha, budget not of whole chunks": ({"budget": 21, "chunk": 5, "window": 3}, 2, 2),
    "mqa, long chunks": ({"budget": 20, "chunk": 10, "window": 8}, 4, 1),
    "single tokens": ({"budget": 18, "chunk": 1, "window": 5}, 4, 2),
    "chunk above the budget": ({"budget": 12, "chunk": 16, "window": 4}, 2, 2),
    "raw": ({"budget": 22, "chunk": 4, "window": 4, "score": "raw"}, 4, 2),
    "raw, strict": ({"budget": 22, "chunk": 4, "window": 4, "score": "raw", "strict": True}, 2, 2),
    "strict": ({"budget": 22, "chunk": 4, "window": 6, "strict": True}, 4, 2),
    "means, pooled, one choice for all heads": (
        {"budget": 27, "chunk": 6, "window": 4, "agg": "mean", "pool": 5, "shared_heads": True},
        4,
        2,
    ),
    "kvpress": (KVPRESS | {"budget": 27, "chunk": 7, "window": 5}, 4, 2),
    "kvpress, a share": (KVPRESS | {"budget": 0.4, "chunk": 7, "window": 5}, 4, 2),
    "fraction": ({"budget": 0.5, "chunk": 4, "window": 4}, 4, 2),
}
STEPS = 6


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts shorter and longer than the budget: kept tokens, their keys' order, outputs of every step."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    policy, group = ChunkKV(**options), heads // kv_heads
    lengths = np.random.default_rng(len(name)).integers(4, 62, size=32)
    case = make_case(6, lengths, STEPS, heads, kv_heads)
    _, outputs, states = run(policy, case)
    states = jax.device_get(states)
    for row, length in enumerate(lengths):
        queries = case.q[row].reshape(-1, kv_heads, group, 8)
        observed = [
            oracle.observed(queries[:length, head], case.k[row, :length, head], policy.window, policy.score)
            for head in range(kv_heads)
        ]
        budget = policy.budget
        if isinstance(budget, float) and policy.rule == "paper":
            budget = int((length + STEPS) * budget)
        held = oracle.survivors(
            observed,
            budget,
            policy.chunk,
            policy.window,
            policy.agg,
            policy.pool,
            policy.shared_heads,
            policy.strict,
            policy.rule,
        )
        for i, state in enumerate(states):
            pos, live = state.pos[row], state.weight[row] > 0
            for head in range(kv_heads):
                assert pos[head][live[head]].tolist() == [*held[head], *range(length, length + i)]
        for i, n in np.ndindex(STEPS, heads):
            at, head = length + i, n // group
            positions = [*held[head], *range(length, at + 1)]
            out = oracle.attend(case.q[row, at, n], case.k[row, :, head], case.v[row, :, head], positions, at)
            np.testing.assert_allclose(outputs[i, row, n], out, atol=2e-5)


@pytest.mark.parametrize(("chunk", "window", "budget"), [(4, 4, 24), (10, 8, 40), (7, 3, 31)])
def test_invariants(chunk, window, budget):
    """Whole chunks within the budget, which they fill but for one chunk's size; the window is always there."""
    policy = ChunkKV(budget=budget, chunk=chunk, window=window)
    lengths = np.random.default_rng(chunk).integers(budget + 1, 120, size=32)
    case = make_case(chunk, lengths, steps=1)
    for row, heads in enumerate(kept(policy, case, after_prompt(policy, case))):
        last = set(range(lengths[row] - window, lengths[row]))
        for tokens in heads:
            assert last <= tokens
            assert (budget - window) // chunk * chunk + window - chunk < len(tokens) <= budget
            for token in tokens - last:
                start = token // chunk * chunk
                assert set(range(start, min(start + chunk, min(last)))) <= tokens


# Layers: index reuse, and other policies beside it.


def prefilled(policy, params, prompt) -> list[list[set[int]]]:
    """Kept positions of one prompt, by layer and head."""
    engine = Engine(params, policy, prompt_len=len(prompt), max_new_tokens=4)
    state, _ = engine.prefill([prompt])
    held = []
    for layer, states in zip(engine.layers, state.caches, strict=True):
        slots = jax.jit(layer.view)(states) if layer.has_own_store else states.cache
        pos, weight = np.asarray(slots.pos)[0], np.asarray(slots.weight)[0]
        held.append([set(p[there].tolist()) for p, there in zip(pos, weight > 0, strict=True)])
    return held


@pytest.fixture(scope="module")
def deep(tiny):
    """Four layers of random weights."""
    config = tiny.config.with_depth(4)
    return jax.jit(functools.partial(kvjax.models.init, config))(jax.random.key(1))


@pytest.fixture(scope="module")
def own(deep):
    """What layers that each choose for themselves keep."""
    return prefilled(SMALL, deep, PROMPT)


PROMPT = np.random.default_rng(0).integers(0, 64, size=90).tolist()
SMALL = ChunkKV(budget=24, chunk=4, window=4)


def test_layers_take_over_the_choice_of_their_groups_first(deep, own):
    assert len({str(layer) for layer in own}) == 4
    for reuse in (2, 4):
        held = prefilled(dataclasses.replace(SMALL, reuse=reuse), deep, PROMPT)
        assert held == [own[layer // reuse * reuse] for layer in range(4)]


@pytest.mark.parametrize(("reuse", "scored"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3]), (4, [0])])
def test_reuse_skips_the_scoring(deep, monkeypatch, reuse, scored):
    entered, layers, scores, prefill = [], [], chunk_eviction.last_queries, chunk_eviction.ChunkKVLayer.prefill

    def enter(self, *args):
        entered.append(self.spec.layer)
        return prefill(self, *args)

    def count(*args, **options):
        layers.append(entered[-1])
        return scores(*args, **options)

    monkeypatch.setattr(chunk_eviction.ChunkKVLayer, "prefill", enter)
    monkeypatch.setattr(chunk_eviction, "last_queries", count)
    policy, specs = dataclasses.replace(SMALL, reuse=reuse), layer_specs(deep.config, 1, 64, 4, deep.dtype)
    tokens, lengths = to_jax(np.zeros((1, 64)), jnp.int32), to_jax([64])
    jax.eval_shape(lambda: transformer.prefill(deep, tokens, lengths, lengths, decoding.layers_of(policy, specs))[0])
    assert layers == scored


def test_reuse_beside_other_policies(deep, own):
    """In by_layer each policy hears of its own choices alone, and never of another group's."""
    pairs, other = dataclasses.replace(SMALL, reuse=2), StreamingLLM(budget=24)
    held = prefilled(by_layer([pairs, pairs, other, pairs]), deep, PROMPT)
    assert held[0] == held[1] == own[0]
    assert held[2] != own[2]
    assert held[3] == own[3]  # layer 2 would have chosen, but has another policy


def test_a_layer_with_other_heads_chooses_for_itself(deep):
    """In by_head a choice is taken over by the same heads, and not by as many others."""
    other, profile = StreamingLLM(budget=24), [["a", "b"], ["a", "b"], ["b", "a"], ["a", "b"]]
    own = prefilled(by_head({"a": SMALL, "b": other}, profile), deep, PROMPT)
    held = prefilled(by_head({"a": dataclasses.replace(SMALL, reuse=2), "b": other}, profile), deep, PROMPT)
    assert held == [own[0], own[0], own[2], own[3]]
    assert own[0][0] != own[1][0]
    assert own[2][1] != own[3][0]


def test_hybrid_of_chunks_and_tokens(deep, own):
    tokens = dataclasses.replace(SMALL, chunk=1)
    held = prefilled(chunk_token_hybrid(4, SMALL), deep, PROMPT)
    assert held == own[:2] + prefilled(tokens, deep, PROMPT)[2:]
    assert chunk_token_hybrid(4, SMALL, lower=1) == ByLayer((SMALL,) + (tokens,) * 3)
    assert chunk_token_hybrid(4, SMALL, lower=0) == ByLayer((tokens,) * 4)
    assert chunk_token_hybrid(4, SMALL, lower=4) == ByLayer((SMALL,) * 4)
    assert chunk_token_hybrid(2) == by_layer([ChunkKV(), ChunkKV(chunk=1)])
    assert chunk_token_hybrid(2, SMALL, StreamingLLM()) == by_layer([SMALL, StreamingLLM()])
    with pytest.raises(PolicyError, match=r"lower=5 is out of range\. Give 0 to 4"):
        chunk_token_hybrid(4, SMALL, lower=5)


# Sizes and errors.


def test_memory_is_freed(tiny):
    """The slots of the budget and of the new tokens, whatever the prompt."""
    held = ChunkKV(budget=1000).nbytes(tiny.config, 1, 30_000, 20, jnp.float32)
    slots = 2 * 2 * 1024  # layers, KV heads, 1020 rounded up
    assert held == slots * (2 * 16 * 4 + 4 + 4) + 2 * (2 * 4 + 4)


def test_papers_defaults():
    assert (ChunkKV().chunk, ChunkKV().window, ChunkKV().reuse) == (10, 32, 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 31}, "gives 31 slots, fewer than the 32 tokens of the window"),
        ({"budget": 0}, "budget=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"window": 0}, "window=0"),
        ({"reuse": 0}, "reuse=0"),
        ({"score": "max"}, "'softmax', 'raw'"),
        ({"agg": "max"}, "'sum', 'mean'"),
        ({"pool": 4}, "odd width"),
        ({"rule": "all"}, "'paper', 'kvpress'"),
        ({"strict": True, "rule": "kvpress"}, "needs rule='paper'"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        ChunkKV(**options)


def test_fraction_too_small_for_the_window():
    """Of a text that is not short: one within a few windows gets a window."""
    with pytest.raises(PolicyError, match="gives 10 slots"):
        ChunkKV(budget=0.01).validate(1000)
    ChunkKV(budget=0.1).validate(100)
