"""InfiniGen's skewing matrices against the singular value decomposition of a model's queries."""

import numpy as np

from kvjax.calibration.infinigen import skewing_matrices
from kvjax.calibration.making import profile
from kvjax.calibration.recording import record
from kvjax.policies import InfiniGen, SkewProfile

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
        np.testing.assert_allclose(made.layer(layer, 16), matrices, atol=1e-3)
