"""TriAttention's statistics against a model's unrotated queries."""

import numpy as np
from checkpoints import default_model

from kvjax.calibration.make_profile import profile
from kvjax.calibration.recording import record
from kvjax.calibration.triattention import mean_queries
from kvjax.policies import MeanQueries, TriAttention
from kvjax.policies.profile import shipped

SAMPLES = np.random.default_rng(0).integers(0, 64, size=(3, 40)).astype(np.int32)


def queries(spec, q, k, v):
    """The rotated queries themselves."""
    return q


def test_means_are_those_of_the_queries_before_rotation(tiny):
    calls = []
    got = mean_queries(tiny, SAMPLES, progress=lambda *call: calls.append(call))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    read = [record(tiny, sample[None], queries) for sample in SAMPLES]
    turns = np.exp(-1j * np.arange(40)[:, None] * np.asarray(tiny.config.rope.resolve(40).inv_freq))
    for layer, head in np.ndindex(2, 4):
        own = np.concatenate(
            [(x[:, :8] + 1j * x[:, 8:]) * turns for x in (np.asarray(r[layer])[0, :, head] for r in read)]
        )
        expected = own.mean(axis=0).real, own.mean(axis=0).imag, np.abs(own).mean(axis=0)
        np.testing.assert_allclose(got[layer, head], expected, atol=2e-5)


def test_profile_is_what_the_policy_takes(tiny, tmp_path):
    made = profile(tiny, "triattention", SAMPLES, "random tokens")
    made.save(tmp_path / "tri.json")
    assert TriAttention(profile=str(tmp_path / "tri.json")).bind(tiny.config).profile == made
    assert isinstance(made, MeanQueries)
    for layer, found in enumerate(mean_queries(tiny, SAMPLES)):
        np.testing.assert_allclose(made.layer(layer, 16), found, rtol=2**-11, atol=2**-24)  # float16's


def test_the_default_model_has_its_profile():
    """Its queries lie around centres: mean sizes are no smaller than sizes of the mean, and on average not much larger."""
    found = shipped("triattention", default_model().config, MeanQueries)
    assert found is not None
    found.require(["triattention"], default_model().config)
    shares = []
    for layer in range(30):
        real, imaginary, size = np.moveaxis(found.layer(layer, 64), 1, 0)
        shares.append(np.hypot(real, imaginary) / size)
    assert 0 <= np.min(shares) <= np.max(shares) <= 1 + 2**-10  # both are rounded
    assert np.mean(shares) > 0.5
