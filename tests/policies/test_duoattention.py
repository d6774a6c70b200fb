"""DuoAttention against its definition, and in one composition with CateKV."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import TINY, make_case, run
from policies.oracle_catekv import CateHead
from policies.oracle_duoattention import DuoHead
from policies.slots import kept

import kvjax
from kvjax.cache import layer_specs
from kvjax.policies import ByHead, CateKV, DuoAttention, Full, HeadProfile, PolicyError, Quest, by_layer
from kvjax.policies.duoattention import Streaming, head_labels
from kvjax.policies.profile import fingerprint

LABELS = (("retrieval", "streaming"), ("streaming", "retrieval"))
STEPS = 6
CONFIGURATIONS = {
    "gqa": ({"budget": 16, "sinks": 4}, 4, LABELS[0]),
    "mha": ({"budget": 9, "sinks": 0}, 2, LABELS[1]),
    "all stream": ({"budget": 5, "sinks": 4}, 4, ("streaming",) * 2),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_the_definition(name):
    """A ragged batch, prompts shorter and longer than a streaming head's budget: tokens held and outputs after each step."""
    options, heads, labels = CONFIGURATIONS[name]
    config = TINY.with_attention(num_heads=heads)
    policy = DuoAttention(**options, profile=(labels,) * 2).bind(config)
    lengths = np.random.default_rng(7).integers(1, 60, size=36)
    case = make_case(3, lengths, STEPS, heads, 2)
    _, outputs, states = run(policy, case)
    held = [kept(policy, case, state) for state in states]
    group = heads // 2
    for row, head in np.ndindex(36, 2):
        literal = DuoHead(labels[head] == "streaming", **options)
        for pos in range(lengths[row] + STEPS):
            literal.append(case.k[row, pos, head], case.v[row, pos, head], pos)
            i = pos - lengths[row]
            if i >= 0:
                out = literal.attend(case.q[row, pos, head * group : (head + 1) * group], pos)
                np.testing.assert_allclose(outputs[i, row, head * group : (head + 1) * group], out, atol=2e-5)
            literal.trim()
            if i >= -1:
                assert held[i + 1][row][head] == {entry[0] for entry in literal.held}


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(4, 2), (3, 3), (5, 1)])
def test_heads_at_or_above_the_quantile_retrieve(sparsity, shape):
    scores = np.random.default_rng(1).permutation(np.prod(shape)).reshape(shape) / 10
    wanted = scores >= np.quantile(scores, sparsity) - 1e-9
    labels = head_labels(scores.tolist(), sparsity)
    assert labels == tuple(tuple("retrieval" if x else "streaming" for x in row) for row in wanted)


def test_of_equal_heads_the_first_retrieve():
    assert head_labels([[0.5, 0.5], [0.5, 0.5]], 0.5) == (("retrieval", "retrieval"), ("streaming", "streaming"))
    assert head_labels([[0.1, 0.5], [0.5, 0.1]], 0.3) == (("retrieval", "retrieval"), ("retrieval", "streaming"))


def profile(config=TINY) -> HeadProfile:
    return HeadProfile("duoattention", fingerprint(config), "nothing", (), ((0.9, 0.2), (0.1, 0.4)), LABELS)


def test_share_of_streaming_heads():
    """Half where heads share keys, three quarters where they do not, or as asked for."""

    def streaming(config, **options):
        return DuoAttention(**options, profile=profile(config)).bind(config).heads[-1]

    alone = TINY.with_attention(num_heads=2)
    assert streaming(TINY) == ((1,), (0,))
    assert streaming(alone) == ((1,), (0, 1))
    assert streaming(TINY, sparsity=0.0) == ((), ())
    assert streaming(TINY, sparsity=0.3) == ((), (0,))


def test_streaming_heads_hold_no_more():
    policy = DuoAttention(profile=LABELS).bind(TINY)
    full, streaming = jax.eval_shape(policy.layer(layer_specs(TINY, 1, 6000, 144, jnp.float32)[0]).init)
    assert full.k.shape == (1, 1, 6400, 16)
    assert streaming.cache.k.shape == (1, 1, 352, 16)
    assert policy.groups[1] == Streaming(budget=320, sinks=64)
    assert policy.nbytes(TINY, 1, 6000, 144) < 0.53 * Full().nbytes(TINY, 1, 6000, 144)


@pytest.mark.slow
def test_with_catekv_in_one(tiny):
    """DuoAttention × CateKV: heads that stream, heads with a fixed choice, and heads that keep everything, each as it would alone."""
    cate = CateKV(budget=24, sinks=2, recent=4, chunk=4, window=6, profile=(("consistent", "adaptive"),) * 2)
    policy = DuoAttention(
        budget=12, sinks=2, profile=(("retrieval", "retrieval"), ("streaming", "retrieval")), retrieval=cate
    )
    bound = policy.bind(TINY)
    assert isinstance(bound, ByHead)
    retrieval, streaming = bound.groups
    assert isinstance(retrieval, ByHead)
    assert [group.info.name for group in (*retrieval.groups, streaming)] == [
        "catekv_consistent",
        "catekv_adaptive",
        "duoattention_streaming",
    ]
    assert bound.heads == (((0, 1), (1,)), ((), (0,)))
    assert retrieval.heads == (((0,), (0,)), ((1,), (1,)))
    inner, stream = bound.layer(layer_specs(TINY, 1, 64, 8, jnp.float32)[1]).parts
    assert (inner.heads, stream.heads, stream.layer.policy) == ((1,), (0,), streaming)
    assert [(part.heads, part.layer.policy) for part in inner.layer.parts] == [((0,), retrieval.groups[1])]
    assert bound.bind(TINY) == bound

    config = TINY.with_attention(num_heads=6, num_kv_heads=3)
    kinds = ("streaming", "retrieval", "retrieval")
    cate = dataclasses.replace(cate, profile=(("consistent", "consistent", "adaptive"),) * 2)
    three = dataclasses.replace(policy, profile=(kinds,) * 2, retrieval=cate).bind(config)
    case = make_case(9, [50, 3, 24, 60], 3, 6, 3)
    states = run(three, case)[2]
    for row, length in enumerate(case.lengths.tolist()):
        consistent = CateHead("consistent", 24, 2, 4, 4, 6)
        consistent.prefill(case.q[row, :length, 2:4], case.k[row, :length, 1], case.v[row, :length, 1])
        last = length + 3
        streaming = set(range(last)) if last <= 12 else {0, 1, *range(last - 10, last)}
        assert kept(three, case, states[-1])[row] == [
            streaming,
            {*consistent.held, *range(length, last)},
            set(range(last)),
        ]

    result = kvjax.generate(tiny, [[5, 9, 2, 7, 7, 1] * 9, [3, 1, 4]], policy=policy, max_new_tokens=8, ignore_eos=True)
    assert result[0].stats.cache_bytes == policy.bind(TINY).nbytes(TINY, 2, 54, 8, jnp.float32)


def test_retrieval_heads_may_be_sparse():
    policy = DuoAttention(profile=LABELS, retrieval=Quest(budget=64)).bind(TINY)
    assert policy.groups[0] == Quest(budget=64)
    layers = DuoAttention(profile=LABELS, retrieval=by_layer([Full(), Quest()])).bind(TINY)
    assert layers.heads == (((0,), (1,)), ((1,), (0,)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 64}, "need 65"),
        ({"sinks": -1}, "sinks=-1"),
        ({"sparsity": 1.5}, "sparsity=1.5"),
        ({"sparsity": 0.5, "profile": LABELS}, "Give one of them"),
        ({"profile": [["streaming"]]}, "tuple of tuples"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        DuoAttention(**options)


def test_what_does_not_fit_the_model():
    with pytest.raises(PolicyError, match=r"labels heads \['lazy'\]. Give retrieval or streaming"):
        DuoAttention(profile=(("lazy", "streaming"),) * 2).bind(TINY)
    with pytest.raises(PolicyError, match="kvjax calibrate duoattention"):
        DuoAttention().bind(TINY)
    with pytest.raises(PolicyError, match=r"bind\(config\)"):
        DuoAttention().layer(layer_specs(TINY, 1, 64, 8, jnp.float32)[0])
