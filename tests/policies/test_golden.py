"""Tokens, log-probabilities and kept positions of every policy and transform, as recorded in `tests/golden_values.json`."""

import json

import golden_values
import numpy as np
import pytest

from kvjax.policies import policies, text

FAST = {
    "cam",
    "clusterkv",
    "expected_attention",
    "full",
    "h2o",
    "infinigen",
    "kivi",
    "kvzip",
    "quest",
    "rkv",
    "shadowkv",
    "snapkv",
    "streaming_llm",
    "treekv",
}
"""One of each family, and those with code that no other has. The others take half a minute, and are among the slow tests."""

LOOSE = {"attention_matching": 1e-5} | golden_values.CODES_MOVE
"""Least squares magnify rounding, and near the middle of two codes it decides which is taken."""


@pytest.fixture(scope="module")
def golden():
    return json.loads(golden_values.FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model():
    return golden_values.model()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in golden_values.cases()]
)
def test_values_are_the_recorded_ones(name, golden, model):
    got, recorded = golden_values.record(name, model, golden_values.texts()), golden[name]
    assert got["prompt"] == recorded["prompt"]
    assert got["tokens"] == recorded["tokens"]
    assert got["end"] == recorded["end"]
    np.testing.assert_allclose(got["logprobs"], recorded["logprobs"], rtol=0, atol=LOOSE.get(name, 1e-6))


def test_every_policy_and_transform_is_recorded(golden):
    ours = {name for name, policy in policies().items() if policy.__module__.startswith("kvjax.")}
    assert set(golden) == set(golden_values.cases()) >= ours | {*text._WRAPPERS, *text._OF_PARTS}


def test_every_case_compresses(golden):
    """Without changing anything a case would test nothing; only a cache on the host is the same as one on the device."""
    same = {"full": "full", "offloaded": "snapkv", "offloaded(clusterkv)": "clusterkv"}
    for name, values in golden.items():
        if name in same:
            assert values == golden[same[name]]
        else:
            assert values["logprobs"] != golden["full"]["logprobs"]
