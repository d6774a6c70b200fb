"""Generation as users call it, on the device: rows alone and together, sampling, sessions, and prompts read in pieces."""

import jax
import numpy as np
import pytest
from device.models import BUDGET, PROMPTS, small

import kvjax
from kvjax.runtime import decoding

OPTIONS = {"max_new_tokens": 24, "ignore_eos": True, "budget": BUDGET}
POLICIES = ["treekv", "snapkv", "chelsea", "clusterkv", "catekv"]


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jax.numpy.asarray, small())


def policy_of(name: str) -> kvjax.Policy:
    """The policy, of which CateKV needs to be told its heads."""
    profile = {"profile": (("consistent", "adaptive"), ("adaptive", "consistent"))} if name == "catekv" else {}
    return kvjax.get_policy(name, budget=BUDGET, **profile)


@pytest.mark.parametrize("name", POLICIES)
def test_rows_of_a_batch_are_what_they_are_alone(name, params):
    options = OPTIONS | {"policy": policy_of(name), "budget": None}
    together = kvjax.generate(params, PROMPTS, **options)
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = kvjax.generate(params, prompt, **options)
        assert row.tokens == alone.tokens
        np.testing.assert_allclose(row.logprobs, alone.logprobs, atol=2e-4)


def test_a_temperature_draws_what_it_draws_on_a_cpu(params, on_cpu):
    options = OPTIONS | {"policy": "treekv", "temperature": 0.8, "top_p": 0.9, "seed": 3}
    got = kvjax.generate(params, PROMPTS, **options)
    with on_cpu():
        want = kvjax.generate(jax.tree.map(np.asarray, params), PROMPTS, **options)
    assert [row.tokens for row in got] == [row.tokens for row in want]


@pytest.mark.parametrize("name", ["treekv", "h2o", "chelsea", "streaming_llm", "tova"])
def test_a_prompt_read_in_blocks_as_on_a_cpu(name, params, on_cpu):
    options = OPTIONS | {"policy": name, "prefill_block": 16, "question": [5, 9, 2]}
    got = kvjax.generate(params, PROMPTS[0], **options)
    with on_cpu():
        want = kvjax.generate(jax.tree.map(np.asarray, params), PROMPTS[0], **options)
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=2e-4)


@pytest.mark.parametrize("name", POLICIES)
def test_a_session_goes_on_as_on_a_cpu(name, params, on_cpu):
    """Reading, forks and sampling; a fork leaves the session as it was."""

    def talk(params) -> list[list[int]]:
        session = kvjax.Session(params, PROMPTS[0], policy=policy_of(name), max_new_tokens=300)
        forks = [reply.tokens for reply in session.ask([PROMPTS[1], PROMPTS[3]], 8, ignore_eos=True)]
        first = session.generate(PROMPTS[2], 12, ignore_eos=True).tokens
        return [*forks, first, session.generate(None, 12, ignore_eos=True).tokens, session.tokens]

    got = talk(params)
    with on_cpu():
        assert got == talk(jax.tree.map(np.asarray, params))


def test_another_temperature_compiles_nothing(params):
    options = OPTIONS | {"policy": "treekv", "top_k": 5}
    kvjax.generate(params, PROMPTS, temperature=0.5, **options)
    before = decoding.prefill.executables, decoding.decode.executables
    kvjax.generate(params, PROMPTS, temperature=1.5, seed=8, **options | {"top_k": 9})
    assert (decoding.prefill.executables, decoding.decode.executables) == before
