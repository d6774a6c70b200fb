"""InfiniGen's skewing matrices against the singular value decomposition of a model's queries."""

from importlib import resources

import numpy as np
from checkpoints import default_model

from kvjax.calibration.infinigen import skewing_matrices
from kvjax.calibration.make_profile import profile
from kvjax.calibration.recording import record
from kvjax.policies import InfiniGen, SkewProfile
from kvjax.policies.profile import shipped

SAMPLES = np.random.default_rng(0).integers(0, 64, size=(3, 40)).astype(np.int32)


def queries(spec, q, k, v):
    """The rotated queries themselves."""
    return q


def test_matrices_are_the_singular_vectors(tiny):
    """Columns are orthogonal, and the queries of all samples have in them the sizes that they have in their singular vectors."""
    calls = []
    got = skewing_matrices(tiny, SAMPLES, progress=lambda *call: calls.append(call))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    read = [record(tiny, sample[None], queries) for sample in SAMPLES]
    for layer, head in np.ndindex(2, 2):
        own = np.concatenate([layers[layer][0, :, 2 * head : 2 * head + 2].reshape(-1, 16) for layers in read])
        _, sizes, vt = np.linalg.svd(own.astype(np.float64), full_matrices=False)
        a = got[layer, head]
        np.testing.assert_allclose(a.T @ a, np.eye(16), atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(own @ a, axis=0), sizes, rtol=1e-4)
        apart = np.abs(np.diff(sizes, prepend=np.inf)) / sizes > 0.02
        apart &= np.append(apart[1:], True)
        assert apart.sum() > 4
        np.testing.assert_allclose(np.abs(vt @ a)[apart][:, apart], np.eye(apart.sum()), atol=1e-3)
        assert (a[np.abs(a).argmax(axis=0), np.arange(16)] > 0).all()


def test_profile_is_what_the_policy_takes(tiny, tmp_path):
    made = profile(tiny, "infinigen", SAMPLES, "random tokens")
    made.save(tmp_path / "skew.json")
    assert InfiniGen(profile=str(tmp_path / "skew.json")).bind(tiny.config).profile == made
    assert isinstance(made, SkewProfile)
    for layer, matrices in enumerate(skewing_matrices(tiny, SAMPLES)):
        np.testing.assert_allclose(made.layer(layer, 16), matrices, atol=8e-3)


def test_matrices_in_few_bytes_choose_the_same_tokens():
    """A byte for two entries, a bit more; orthogonal as before, and scores in a few of its directions have the same order."""
    rng = np.random.default_rng(0)
    matrices = np.linalg.qr(rng.normal(size=(1, 3, 64, 64)))[0] * rng.choice([-1, 1], size=64)
    made = SkewProfile.of(matrices, method="infinigen", model="", data="", settings=())
    assert len(made.matrices[0]) < 0.66 * 3 * 64 * 64
    stored = made.layer(0, 64)
    np.testing.assert_allclose(stored.swapaxes(1, 2) @ stored, np.broadcast_to(np.eye(64), (3, 64, 64)), atol=2e-6)
    assert np.abs(np.sum(stored * matrices[0], axis=1)).min() > 0.999, "every direction is nearly what it was"
    spectrum = np.exp(-np.arange(64) / 8)
    for exact, ours in zip(matrices[0], stored, strict=True):
        queries, keys = (rng.normal(size=(n, 64)) * spectrum @ exact.T for n in (50, 500))
        best = [np.argsort(-(queries @ v[:, :13]) @ (keys @ v[:, :13]).T)[:, :25] for v in (exact, ours)]
        same = np.mean([len(set(a) & set(b)) / 25 for a, b in zip(*best, strict=True)])
        assert same > 0.97


def test_identities_and_signs_survive():
    matrices = np.stack([np.eye(8), np.diag([1.0, -1] * 4), np.eye(8)[::-1]])[None]
    made = SkewProfile.of(matrices, method="infinigen", model="", data="", settings=())
    np.testing.assert_allclose(made.layer(0, 8), matrices[0], atol=1e-6)


def test_the_shipped_profile_is_small():
    config = default_model().config
    found = shipped("infinigen", config, SkewProfile)
    found.require(["infinigen"], config)
    folder = resources.files("kvjax.policies") / "profiles"
    assert max(len(file.read_bytes()) for file in folder.iterdir()) < 210_000
