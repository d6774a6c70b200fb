"""ShadowKV against the literal algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import TINY, make_case, run
from policies.oracle_shadowkv import ShadowLayer
from policies.slots import kept, slots_of

import kvjax
from kvjax.cache import host_memory, layer_specs
from kvjax.policies import CateKV, Full, PolicyError, ShadowKV, offloaded
from kvjax.policies.shadowkv import low_rank

SMALL = {"budget": 12, "rank": 10, "chunk": 4, "outlier_chunks": 2, "local_chunks": 1}
CONFIGURATIONS = {
    "gqa": (SMALL, 4, 2),
    "mha, all components": (SMALL | {"rank": 160, "budget": 9}, 2, 2),
    "mqa, odd chunks": (SMALL | {"rank": 5, "chunk": 5, "outlier_chunks": 0, "local_chunks": 2}, 4, 1),
}
STEPS, ROWS = 4, 20


def inputs(heads: int = 4, kv_heads: int = 2):
    lengths = np.random.default_rng(7).integers(1, 64, size=ROWS)
    lengths[:4] = 1, 11, 12, 63
    return make_case(3, lengths, STEPS, heads, kv_heads)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts with nothing to select and such with much: what is exact, selections, outputs at every step."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    policy, case = ShadowKV(**options), inputs(heads, kv_heads)
    assert policy.layer(case.spec).attention == "sparse"
    _, outputs, states = run(policy, case)
    spec, group = case.spec, heads // kv_heads
    select = jax.jit(lambda state, q, pos: policy.layer(spec).select(state, spec.rope.rotate(q, pos[:, None])))
    picks = []
    for i in range(STEPS):
        pos = case.lengths + i
        picks.append(jax.device_get(select(states[i + 1], case.q[np.arange(ROWS), pos], pos)))
    slots, some = jax.device_get(states[-1].cache), 0
    for row, length in enumerate(case.lengths.tolist()):
        literal = ShadowLayer(**options)
        literal.prefill(case.k[row, :length], case.v[row, :length])
        for i in range(STEPS):
            pos = length + i
            literal.append(case.k[row, pos], case.v[row, pos], pos)
            for head in range(kv_heads):
                at = slice(head * group, (head + 1) * group)
                out, chosen = literal.attend(case.q[row, pos, at], pos, head)
                index, live = (x[row, head] for x in picks[i])
                assert index[live].tolist() == chosen
                np.testing.assert_allclose(outputs[i, row, at], out, atol=5e-5)
                some += len(chosen) > 0
        for head in range(kv_heads):
            held = slots.pos[row, head][slots.weight[row, head] > 0]
            assert set(held.tolist()) == set(literal.exact[head])
    assert some > 50


def test_everything_is_there():
    """Exact or rebuilt, every token is held once; at full rank what is rebuilt is what was read."""
    policy, case = ShadowKV(**SMALL | {"rank": 16}), inputs()
    state = run(policy, case)[0]
    assert kept(policy, case, state) == [[set(range(n + STEPS))] * 2 for n in case.lengths]
    slots = slots_of(policy, case, state)
    assert (slots.weight > 0).sum(axis=-1).tolist() == [[n + STEPS] * 2 for n in case.lengths]


def test_low_rank_is_the_truncated_decomposition():
    k = np.random.default_rng(2).normal(size=(3, 20, 2, 8)).astype(np.float32)
    k[1, 7:] = 0
    for rank in (1, 5, 16):
        coefficients, basis = jax.jit(low_rank, static_argnums=1)(k, rank)
        got = np.einsum("btr,bkrh->btkh", coefficients, basis)
        for row in range(3):
            u, s, vt = np.linalg.svd(k[row].reshape(20, 16).astype(np.float64), full_matrices=False)
            np.testing.assert_allclose(got[row].reshape(20, 16), (u * s)[:, :rank] @ vt[:rank], atol=1e-4)


def test_offloaded_only_values_travel():
    """The same outputs; on the host are the prompt's values alone, and of those selected some are at hand."""
    policy, case = ShadowKV(**SMALL | {"budget": 24}), inputs()
    far = offloaded(policy)
    state, outputs, _ = run(far, case)
    np.testing.assert_allclose(outputs, run(policy, case)[1], atol=1e-6)
    on_host = [leaf for leaf in jax.tree.leaves(state) if host_memory.on_host(leaf)]
    assert [leaf.shape for leaf in on_host] == [(ROWS, 2, 64, 8)]
    assert 0 < np.sum(jax.device_get(state.found)) < np.sum(jax.device_get(state.chosen))
    assert kept(far, case, state) == [[set(range(n + STEPS))] * 2 for n in case.lengths]


def test_bytes():
    """By hand, for a prompt of 6144 tokens in one of 2 layers; and offloaded, far less than the full cache on the device."""
    policy = ShadowKV(rank=8)
    spec = layer_specs(TINY, 1, 6144, 64, jnp.bfloat16)[0]
    slots, values = 53 * 8 + 64 + 24, 2 * 6144 * 16 * 2
    exact = 2 * slots * (2 * 16 * 2 + 8) + 2 * 4 + 4
    keys = 6144 * 8 * 2 + 8 * 2 * 16 * 2
    marks = 2 * 768 * (16 * 2 + 1)
    assert jax.eval_shape(policy.layer(spec).init).cache.k.shape == (1, 2, slots, 16)
    assert policy.nbytes(TINY, 1, 6144, 64) == 2 * (exact + values + keys + marks + 4)
    full = Full().nbytes(TINY, 1, 6144, 64)
    far = offloaded(policy)
    assert far.host_nbytes(TINY, 1, 6144, 64) == 2 * values
    assert far.nbytes(TINY, 1, 6144, 64) < 0.5 * full
    # In 3 rows, of either head and layer: exact slots, 1024 tokens' coefficients and values, landmarks, the basis.
    read = slots * 2 * 16 + 1024 * (8 + 16) + 768 * 16 + 8 * 16
    assert policy.bytes_read(TINY, 3, 6144, 64) == 2 * 3 * 2 * read * 2
    assert policy.bytes_read(TINY, 1, 6144, 64) < 0.4 * full


def test_adaptive_heads_of_catekv(tiny):
    """CateKV × ShadowKV: consistent heads keep a budget, adaptive heads rebuild what they select; offloaded, each by itself."""
    shadow, labels = ShadowKV(**SMALL), (("consistent", "adaptive"), ("adaptive", "consistent"))
    policy = CateKV(budget=16, sinks=2, recent=4, chunk=4, window=4, adaptive=shadow, profile=labels)
    bound = policy.bind(TINY)
    assert bound.groups[1] == shadow
    result = kvjax.generate(tiny, [[5, 9, 2, 7, 7, 1] * 9, [3, 1, 4]], policy=policy, max_new_tokens=6, ignore_eos=True)
    assert result[0].stats.cache_bytes == bound.nbytes(TINY, 2, 54, 6, jnp.float32)
    assert offloaded(policy).bind(TINY).groups[1] == offloaded(shadow)


def test_a_prompt_without_room_is_kept_whole():
    case = make_case(4, [60, 3], 4)
    policy = ShadowKV()
    assert policy.layer(case.spec).attention != "sparse"
    np.testing.assert_array_equal(run(policy, case)[1], run(Full(), case)[1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 7}, "fewer than a chunk of 8"),
        ({"rank": 0}, "rank=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"outlier_chunks": -1}, "outlier_chunks=-1"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        ShadowKV(**options)
