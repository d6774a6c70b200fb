"""ClusterKV against the literal algorithm."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from policies.driver import Case, compiled, make_case, run
from policies.oracle_arrays import rotate
from policies.oracle_clusterkv import ClusterHead, select
from policies.slots import after_prompt

from kvjax.cache import Token
from kvjax.pallas_kernels import kmeans
from kvjax.policies import ClusterKV, Full, InfiniGen, PolicyError, Quest
from kvjax.policies.clusterkv import ClusteredCache, ClusterKVLayer, _index

SMALL = {"budget": 24, "sinks": 4, "dense_layers": 0, "n_clusters": 5, "window": 8, "new_clusters": 3}


def state_of(policy: ClusterKV, centroids, labels: list[int]) -> tuple[Case, ClusteredCache]:
    """A state of one row and head with these centroids, whose token i has label i, and no sinks."""
    case = make_case(0, [len(labels)], 4, heads=1, kv_heads=1)
    blank = jax.device_get(jax.jit(policy.layer(case.spec).init)())
    sizes, starts, order = index_of(np.asarray(labels, np.int32)[None, None], len(centroids))
    wide, whole = np.zeros((1, 1, len(centroids), 8), np.float32), blank.order.copy()
    wide[0, 0, :, : len(centroids[0])], whole[:, :, : len(labels)] = centroids, order
    return case, dataclasses.replace(
        blank,
        centroids=wide,
        sizes=np.asarray(sizes),
        starts=np.asarray(starts),
        order=whole,
        clusters=np.asarray([len(centroids)], np.int32),
        clustered=np.asarray([len(labels)], np.int32),
    )


index_of = jax.jit(_index, static_argnums=1)


@functools.cache
def selector(policy: ClusterKV, spec):
    return jax.jit(policy.layer(spec).select)


def chosen(policy: ClusterKV, case: Case, state: ClusteredCache, query) -> list[int]:
    q = np.zeros((1, 1, 8), np.float32)
    q[0, 0, : len(query)] = query
    index, live = jax.device_get(selector(policy, case.spec)(state, q))
    return index[0, 0][live[0, 0]].tolist()


# The hand-checkable cases.

FIGURE_8 = [2, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(("liking", "tokens"), [((2, 1, 3), [0, 5, 1]), ((1, 3, 2), [2, 3, 4]), ((3, 2, 1), [1, 2, 3])])
def test_figure_8(liking, tokens):
    """Clusters {1}, {2, 3, 4}, {0, 5} and a budget of 3: the last case leaves token 4 out."""
    policy = ClusterKV(budget=3, sinks=0, dense_layers=0, n_clusters=3)
    case, state = state_of(policy, np.eye(3, dtype=np.float32), FIGURE_8)
    assert state.sizes.tolist() == [[[1, 3, 2]]]
    assert state.starts.tolist() == [[[0, 1, 4]]]
    assert state.order[0, 0, :6].tolist() == [1, 2, 3, 4, 0, 5]
    assert chosen(policy, case, state, liking) == tokens
    assert select(np.asarray(liking), np.eye(3), [[1], [2, 3, 4], [0, 5]], 3) == tokens


def test_equally_liked_clusters_go_in_their_order():
    policy = ClusterKV(budget=3, sinks=0, dense_layers=0, n_clusters=3)
    case, state = state_of(policy, np.eye(3, dtype=np.float32), FIGURE_8)
    assert chosen(policy, case, state, (1, 1, 1)) == [1, 2, 3]


def test_centroids_are_means_of_raw_keys():
    """a = {(10, 0), (8, 0)}, b = {(1, 1), (1, 1)}, q = (1, 2): 9 > 3, though b's direction is nearer to q's."""
    policy = ClusterKV(budget=2, sinks=0, dense_layers=0, n_clusters=2)
    keys = np.zeros((1, 1, 4, 8), np.float32)
    keys[0, 0, :, :2] = [10, 0], [8, 0], [1, 1], [1, 1]
    given = map(to_jax, (keys, np.ones((1, 4), bool), keys[:, :, 1:3], np.full(1, 2, np.int32)))
    centroids, labels = jax.device_get(kmeans(*given, iterations=20))
    np.testing.assert_allclose(centroids[0, 0, :, :2], [[9, 0], [1, 1]])
    assert labels.tolist() == [[[0, 0, 1, 1]]]
    case, state = state_of(policy, centroids[0, 0, :, :2], labels[0, 0].tolist())
    assert chosen(policy, case, state, (1, 2)) == [0, 1]


# The policy against the oracle.

CONFIGURATIONS = {
    "gqa": (SMALL, 32, 4, 2),
    "mha": (SMALL | {"budget": 17, "sinks": 3, "iterations": 5}, 32, 2, 2),
    "mqa, mean query": (SMALL | {"gqa": "mean", "iterations": 5}, 16, 4, 1),
    "clusters by length": (SMALL | {"n_clusters": None, "tokens_per_cluster": 9, "iterations": 5}, 32, 2, 1),
    "generated tokens unclustered": (SMALL | {"cluster_decode": False, "iterations": 5}, 16, 2, 1),
    "inner product": (SMALL | {"distance": "ip", "iterations": 3}, 16, 2, 1),
    "more clusters than tokens": (
        SMALL | {"n_clusters": 200, "new_clusters": 20, "window": 5, "iterations": 2},
        16,
        2,
        1,
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts shorter and longer than the budget: clusters, what every query selects, outputs."""
    _, batch, heads, kv_heads = CONFIGURATIONS[name]
    policy, case, (outputs, selections, states) = observed(name)
    lengths, group = case.lengths, heads // kv_heads
    pos = np.broadcast_to(np.arange(84, dtype=np.int32), (batch, 84))
    draws = np.asarray(jax.jit(policy.layer(case.spec).shuffled)(pos, np.ones_like(pos, bool)))[0]  # [K, S]

    for row, length in enumerate(lengths):
        for head in range(kv_heads):
            rank = np.argsort(draws[head])
            oracle = ClusterHead(policy, lambda positions, rank=rank: np.argsort(rank[positions]))
            keys, values = case.k[row, :, head], case.v[row, :, head]
            queries = case.q[row, :, head * group : (head + 1) * group]
            oracle.prefill(keys[:length], values[:length])
            assert clusters_of(states[0], row, head) == oracle.clusters
            for i in range(case.steps):
                pos = length + i
                out, selected = oracle.step(queries[pos], keys[pos], values[pos], pos)
                np.testing.assert_allclose(outputs[i][row, head * group : (head + 1) * group], out, atol=2e-5)
                index, live = (x.reshape(batch, kv_heads, -1, x.shape[-1])[row, head] for x in selections[i])
                assert [x[m].tolist() for x, m in zip(index, live, strict=True)] == selected[: len(index)]
                assert clusters_of(states[i + 1], row, head) == oracle.clusters
            count = len(oracle.clusters)
            np.testing.assert_allclose(states[-1].centroids[row, head, :count], oracle.centroids, atol=1e-5)


@functools.cache
def observed(name: str):
    """A configuration's policy, its case, and what `observe` sees of them."""
    options, batch, heads, kv_heads = CONFIGURATIONS[name]
    policy = ClusterKV(**options, seed=3)
    lengths = np.random.default_rng(7).integers(1, 60, size=batch)
    lengths[:3] = 1, 4, 59
    case = make_case(3, lengths, steps=20, heads=heads, kv_heads=kv_heads)
    return policy, case, observe(policy, case)


def observe(policy: ClusterKV, case: Case):
    """Like `run`, with what each query selects as well: outputs, selections, and states, as NumPy arrays."""
    spec, layer = case.spec, policy.layer(case.spec)

    @jax.jit
    def step(state, q, k, v, pos):
        token = Token(q, k, v, pos, spec.rope)
        state = layer.append(state, token)
        selected = layer.select(state, token.q_rotated)
        out, state, _ = layer.attend(state, token, {})
        return out, selected, layer.compress(state)

    size = spec.prompt_len
    rest = [(0, 0), (0, max(0, size - case.q.shape[1])), (0, 0), (0, 0)]
    state = compiled(policy, spec)[0](*(np.pad(x, rest)[:, :size] for x in (case.q, case.k, case.v)), case.lengths)
    rows, outputs, selections, states = np.arange(len(case.lengths)), [], [], [state]
    for i in range(case.steps):
        pos = case.lengths + i
        out, selected, state = step(state, case.q[rows, pos], case.k[rows, pos], case.v[rows, pos], pos)
        outputs.append(out)
        selections.append(selected)
        states.append(state)
    return jax.device_get((outputs, selections, states))


def clusters_of(state: ClusteredCache, row: int, head: int) -> list[list[int]]:
    count = int(state.clusters[row])
    sizes, starts, order = (np.asarray(x)[row, head] for x in (state.sizes, state.starts, state.order))
    return [order[a : a + n].tolist() for a, n in zip(starts[:count], sizes[:count], strict=True)]


# Invariants.


def test_labels_partition_the_tokens():
    """At every step sinks, clusters and tail are all tokens, each once; sizes sum to what is clustered."""
    policy, case, (_, _, states) = observed("gqa")
    for state in states:
        seen, clustered = np.asarray(state.cache.seen), np.asarray(state.clustered)
        for row, head in np.ndindex(len(case.lengths), 2):
            members = [pos for cluster in clusters_of(state, row, head) for pos in cluster]
            assert sorted(members) == list(range(4, clustered[row]))
            assert sorted(state.order[row, head].tolist()) == list(range(state.order.shape[-1]))
            assert int(state.sizes[row, head].sum()) == clustered[row] - 4
        assert ((seen - clustered < policy.window) | (seen < 4)).all()


def test_prompt_within_the_budget_is_the_full_cache():
    """Recall 1 as long as all that is clustered fits, though the budget does not cover all tokens to come."""
    case = make_case(9, [24, 3, 16, 23], steps=12)
    policy = ClusterKV(**SMALL | {"window": 100, "new_clusters": 2})
    assert policy.layer(case.spec).attention == "sparse"
    np.testing.assert_allclose(run(policy, case)[1], run(Full(), case)[1], atol=2e-5)


def test_one_cluster_per_token_selects_the_best_tokens():
    """With as many clusters as tokens, what is selected is the true top: recall 1 at any budget."""
    policy = ClusterKV(budget=22, sinks=2, dense_layers=0, n_clusters=100, window=100)
    case = make_case(10, [40, 20], steps=1)
    state = after_prompt(policy, case)
    assert (np.asarray(state.sizes)[0, :, :38] == 1).all()
    q = np.stack([case.q[row, length] for row, length in enumerate(case.lengths)])
    selected = jax.jit(lambda state: policy.layer(case.spec).select(state, to_jax(q)))
    for budget in (3, 4, 7, 13, 22):
        index, live = map(np.asarray, selected(state.replace(budget=np.full(2, budget, np.int32))))
        for row, head in np.ndindex(2, 4):
            at = np.arange(2, case.lengths[row])
            keys = rotate(case.spec.rope, case.k[row, at, head // 2], at)
            true = 2 + np.argsort(-(keys @ q[row, head]), kind="stable")[: budget - 2]
            assert index[row, head][live[row, head]].tolist() == true.tolist()


def test_first_layers_are_dense():
    case = make_case(4, [50, 3], steps=5)
    policy = ClusterKV(**SMALL | {"dense_layers": 1})
    np.testing.assert_array_equal(run(policy, case)[1], run(Full(), case)[1])
    spec = dataclasses.replace(case.spec, layer=1)
    assert policy.layer(spec).attention == "sparse"
    assert policy.layer(case.spec).attention != "sparse"


def test_error_falls_with_the_budget():
    """A row's budget is part of the state, so that one program serves all budgets."""
    policy = ClusterKV(**SMALL | {"budget": 60, "n_clusters": 12})
    case = make_case(12, [60] * 32, steps=1)
    prefill, step = compiled(policy, case.spec)
    state = prefill(
        *(np.pad(x[:, :60], ((0, 0), (0, 4), (0, 0), (0, 0))) for x in (case.q, case.k, case.v)), case.lengths
    )
    last = case.q[:, 60], case.k[:, 60], case.v[:, 60], case.lengths
    full = run(Full(), case)[1][0]
    errors = []
    for budget in (8, 16, 32, 48, 60):
        out, _ = step(state.replace(budget=np.full(32, budget, np.int32)), *last)
        errors.append(float(np.mean((np.asarray(out) - full) ** 2)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-9


def test_only_the_selection_is_read():
    """NaN in every token that is not selected changes nothing, and what is gathered is far smaller than the store."""
    policy = ClusterKV(**SMALL)
    case = make_case(13, [250, 200], steps=1)
    spec, layer = case.spec, policy.layer(case.spec)
    prefill, step = compiled(policy, spec)
    state = prefill(*(np.pad(x, ((0, 0), (0, 5), (0, 0), (0, 0))) for x in (case.q, case.k, case.v)), case.lengths)
    assert layer.slots_read == 32
    assert state.cache.k.shape[2] == 288
    rows, pos = np.arange(2), case.lengths
    args = case.q[rows, pos], case.k[rows, pos], case.v[rows, pos], pos

    @jax.jit
    def reads(state, *args):
        token = Token(*args, spec.rope)
        return layer.slots_to_read(layer.append(state, token), token.q_rotated)

    index, live = jax.device_get(reads(state, *args))
    read = np.zeros(state.cache.pos.shape, bool)
    for row, head in np.ndindex(2, 4):
        read[row, head // 2, index[row, head][live[row, head]]] = True
    bad = [np.where(read[..., None], x, np.float32(np.nan)) for x in (state.cache.k, state.cache.v)]
    poisoned = dataclasses.replace(state, cache=state.cache.replace(k=bad[0], v=bad[1]))
    np.testing.assert_array_equal(step(state, *args)[0], step(poisoned, *args)[0])


def test_bytes_read_are_fewer_than_held(tiny):
    """By hand: 2 layers of which 1 is sparse; 4 heads gather 64 slots of 2 × 16 floats, the other layer reads all that it holds."""
    policy = ClusterKV(budget=32, sinks=4, dense_layers=1, n_clusters=10, window=32)
    read = policy.bytes_read(tiny.config, 1, 1000, 32, jnp.float32)
    metadata = 2 * 14 * 16 * 4 + 4 * (2 * 14 + 64) * 4
    held = 2 * 1056 * (2 * 16 + 2) * 4 + (2 + 1) * 4  # keys, values, positions and weights; next slots and tokens seen
    assert read == 4 * 64 * 2 * 16 * 4 + metadata + held
    assert policy.bytes_read(tiny.config, 1, 1000, 32, jnp.bfloat16) < read
    mean = dataclasses.replace(policy, gqa="mean").bytes_read(tiny.config, 1, 1000, 32, jnp.float32)
    assert mean < read < policy.nbytes(tiny.config, 1, 1000, 32, jnp.float32)


def test_start_is_random_without_replacement():
    spec = make_case(0, [50], steps=1).spec
    pos = np.arange(64, dtype=np.int32)[None]
    inside = (pos >= 16) & (pos < 50)

    def first(seed, pos=pos, inside=inside, spec=spec):
        return np.asarray(jax.jit(ClusterKVLayer(ClusterKV(seed=seed), spec).shuffled)(pos, inside))[0]

    once = first(0)
    for head in range(2):
        assert sorted(once[head, :34].tolist()) == list(range(16, 50))
    assert once[0].tolist() != once[1].tolist()
    assert once.tolist() != first(1).tolist()
    longer = first(0, pos[:, 3:51], inside[:, 3:51], dataclasses.replace(spec, prompt_len=4096, new_tokens=700))
    np.testing.assert_array_equal(once[:, :34], longer[:, :34] + 3)  # whatever the padding, and wherever it begins


def test_papers_defaults():
    policy = ClusterKV()
    assert (policy.sinks, policy.dense_layers, policy.iterations, policy.window, policy.new_clusters) == (
        16,
        2,
        20,
        320,
        4,
    )
    lengths = to_jax([32_000, 100, 79, 16, 17, 5], jnp.int32)
    assert jax.jit(ClusterKVLayer(policy, make_case(0, [50], steps=1).spec)._prompt_clusters)(lengths).tolist() == [
        400,
        1,
        1,
        0,
        1,
        0,
    ]


def test_room_for_clusters():
    """A cluster for every 80 tokens of a prompt, though at least one of them all, and three for each window that new tokens fill."""
    case = make_case(0, [20], steps=33)
    policy = ClusterKV(**SMALL | {"n_clusters": None})
    for prompt_len, clusters in ((64, 1 + 4 * 3), (160, 2 + 4 * 3), (0, 4 * 3)):
        spec = dataclasses.replace(case.spec, prompt_len=prompt_len)
        assert jax.eval_shape(policy.layer(spec).init).sizes.shape == (1, 2, clusters)
    alone = dataclasses.replace(policy, cluster_decode=False).layer(case.spec)
    assert jax.eval_shape(alone.init).sizes.shape == (1, 2, 1)


@pytest.mark.parametrize(
    "policy", [ClusterKV(dense_layers=1), Quest(dense_layers=1), InfiniGen(dense_layers=1)], ids=lambda p: p.info.name
)
def test_what_is_sparse(policy):
    """Where a budget has room for all tokens, or a layer is dense, everything is read; with one token less it is not."""
    spec = make_case(0, [2000], steps=48).spec
    for layer, budget, sparse in ((1, 2096, False), (1, 2095, True), (0, 2095, False)):
        where = dataclasses.replace(spec, layer=layer)
        assert (dataclasses.replace(policy, budget=budget).layer(where).attention == "sparse") == sparse


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 16}, "need 17"),
        ({"budget": 0}, "budget=0"),
        ({"gqa": "max"}, "'query_head', 'mean'"),
        ({"distance": "l1"}, "'cosine', 'l2', 'ip'"),
        ({"window": 0}, "window=0"),
        ({"n_clusters": 0}, "n_clusters=0"),
        ({"dense_layers": -1}, "dense_layers=-1"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        ClusterKV(**options)


def test_fraction_too_small_for_its_sinks():
    with pytest.raises(PolicyError, match="gives 15 tokens"):
        ClusterKV(budget=0.1).validate(150)
