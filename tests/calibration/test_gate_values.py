"""Gate values: passkeys where they should be, the mixture against its definition, and what is learned on a model made for it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import make_case
from policies.oracle_arrays import ROPE
from policies.oracle_duoattention import mixed

from kvjax.calibration.duoattention import CUE, Settings, gate_values, gated_attention, with_passkeys
from kvjax.calibration.make_profile import profile
from kvjax.pallas_kernels import prefill_attention
from kvjax.policies import DuoAttention

SETTINGS = Settings(steps=12, rate=0.1, sinks=2, recent=4, passkeys=2, length=5)
SAMPLES = np.random.default_rng(0).integers(0, 64, size=(2, 64)).astype(np.int32)


def test_passkeys_are_recited_after_their_cue():
    texts, recited = with_passkeys(SAMPLES, SETTINGS)
    start = 64 - 2 * (CUE + 5)
    for text, sample, recital in zip(texts, SAMPLES, recited, strict=True):
        assert np.flatnonzero(recital).tolist() == [*range(start + 4, start + 9), *range(start + 13, start + 18)]
        story, changed = text[:start], np.flatnonzero(text[:start] != sample[:start])
        for i in range(2):
            said = text[start + 9 * i : start + 9 * (i + 1)]
            places = [p for p in range(start - 8) if (story[p : p + 9] == said).all()]
            assert places
            assert start * i // 2 <= places[0] < start * (i + 1) // 2
        assert 0 < len(changed) <= 10
    again, _ = with_passkeys(SAMPLES, SETTINGS)
    np.testing.assert_array_equal(texts, again)


def test_the_mixture_is_its_definition():
    case, gates = make_case(1, [20], 0, heads=4, kv_heads=2), [0.3, 1.0]
    args = (jnp.asarray(x) for x in (case.q, case.k, case.v))
    got = gated_attention(jnp.asarray(gates), ROPE, *args, sinks=2, recent=4)
    for head in range(4):
        heads = case.q[0, :, head], case.k[0, :, head // 2], case.v[0, :, head // 2]
        np.testing.assert_allclose(got[0, :, head], mixed(*heads, gates[head // 2], 2, 4), atol=2e-5)


def test_attention_sinks_are_in_both_softmaxes():
    """With gates of one the mixture is full attention."""
    case, sinks = make_case(1, [20], 0, heads=4, kv_heads=2), jnp.asarray([1.0, -1.0, 3.0, 0.0])
    q, k, v = (jnp.asarray(x) for x in (case.q, case.k, case.v))
    options = {"sinks": 2, "recent": 4, "attention_sinks": sinks}
    got = gated_attention(jnp.ones(2), ROPE, q, k, v, **options)
    pos = jnp.arange(q.shape[1], dtype=jnp.int32)[None, :, None]
    want = prefill_attention(ROPE.rotate(q, pos), ROPE.rotate(k, pos), v, scale=q.shape[-1] ** -0.5, sinks=sinks)
    np.testing.assert_allclose(got, want, atol=2e-5)
    whole = gated_attention(jnp.zeros(2), ROPE, q, k, v, **options | {"recent": q.shape[1]})
    np.testing.assert_allclose(whole, want, atol=2e-5)


def test_heads_that_do_nothing_need_nothing(tiny):
    """A head whose values do not reach the output has a gate that falls; one without which the states change keeps a higher one."""
    layers = []
    for i, layer in enumerate(tiny.layers):
        idle = 2 * i  # query heads 0 and 1 read KV head 0, 2 and 3 KV head 1
        o = layer.attn.o.at[:, 16 * idle : 16 * (idle + 2)].set(0.0) * 4.0
        layers.append(dataclasses.replace(layer, attn=dataclasses.replace(layer.attn, o=o, q=4 * layer.attn.q)))
    params, calls = dataclasses.replace(tiny, layers=tuple(layers)), []
    gates = gate_values(params, SAMPLES, SETTINGS, progress=lambda *call: calls.append(call))
    assert calls == [(i, 12) for i in range(1, 13)]
    assert max(gates[0, 0], gates[1, 1]) < min(gates[0, 1], gates[1, 0])
    assert gates.min() >= 0
    assert gates.max() <= 1


def test_profile_is_what_the_policy_takes(tiny, tmp_path):
    made = profile(tiny, "duoattention", SAMPLES, "random tokens", dataclasses.replace(SETTINGS, steps=1))
    made.save(tmp_path / "gates.json")
    bound = DuoAttention(profile=str(tmp_path / "gates.json")).bind(tiny.config)
    assert bound == DuoAttention(profile=made).bind(tiny.config) == DuoAttention(profile=made.labels).bind(tiny.config)
    assert sum(len(heads) for heads in bound.heads[-1]) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [({"steps": 0}, "steps=0"), ({"sparsity": 2.0}, "sparsity=2.0"), ({"recent": 0}, "recent=0")],
)
def test_bad_settings(options, says):
    with pytest.raises(ValueError, match=says):
        Settings(**options)


def test_short_samples():
    with pytest.raises(ValueError, match="too short for 6 passkeys of 12; give 288 tokens"):
        with_passkeys(SAMPLES, Settings())
