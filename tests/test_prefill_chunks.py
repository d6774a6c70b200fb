"""Prompts that are read in pieces: `generate(..., prefill_chunk=)`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import ROPE, compositions, make_case, rotate, softmax

import kvjax
from kvjax.cache import TokenBlock, layer_specs
from kvjax.models import Params
from kvjax.policies import Full, Policy, get_policy
from kvjax.runtime import decoding

PROMPTS = [[5, 9, 2, 7, 7, 1] * 9, [3, 1, 4] * 5 + [1, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8] * 4]
OPTIONS = {"max_new_tokens": 6, "ignore_eos": True}
BY_ONE = 10_000
"""Pieces longer than the prompts: every token goes through a decoding step of its own."""

SLOW = [
    kvjax.TreeKV(budget=16, sinks=2),
    get_policy("tova", budget=16),
    get_policy("chelsea", budget=16, sinks=2, recent=4, chunk=4, every=4),
    get_policy("quest", budget=8, page=4, dense_layers=1),
    get_policy("infinigen", budget=8, dense_layers=1),
]
POLICIES = [compositions(16)[0], *(pytest.param(policy, marks=pytest.mark.slow) for policy in SLOW)]


def same(got: list, want: list) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_full_in_pieces_is_full(tiny: Params) -> None:
    """Pieces of 5 tokens, and then of 1."""
    whole = kvjax.generate(tiny, PROMPTS, **OPTIONS)
    same(kvjax.generate(tiny, PROMPTS, prefill_chunk=5, **OPTIONS), whole)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.info.name)
def test_pieces_are_what_tokens_one_by_one_are(tiny: Params, policy: Policy) -> None:
    one_by_one, pieces = (
        kvjax.generate(tiny, PROMPTS, policy, prefill_chunk=chunk, **OPTIONS) for chunk in (BY_ONE, 16)
    )
    same(pieces, one_by_one)
    assert pieces[0].stats.cache_bytes == policy.nbytes(tiny.config, 3, 0, max(map(len, PROMPTS)) + 6, jnp.float32)


@pytest.mark.slow
def test_a_question_follows(tiny: Params) -> None:
    want = kvjax.generate(tiny, PROMPTS[0] + PROMPTS[1], **OPTIONS)
    got = kvjax.generate(tiny, PROMPTS[0], question=PROMPTS[1], prefill_chunk=16, **OPTIONS)
    same([got], [want])


@pytest.mark.parametrize("window", [None, 9])
def test_full_attention_over_cache_and_piece(window: int | None) -> None:
    """10 seeds × 5 rows × 4 heads, in pieces of 8, against float64."""
    lengths, size = [24] * 5, 24
    first = make_case(0, lengths, 0)
    spec = dataclasses.replace(first.spec, prompt_len=0, new_tokens=size, window=window)
    layer = Full().layer(spec)
    extend = jax.jit(layer.read_block)
    for seed in range(10):
        case = make_case(seed, lengths, 0)
        state, outs = layer.init(), []
        for at in range(0, size, 8):
            piece = slice(at, at + 8)
            pos = jnp.full(5, at, jnp.int32)
            block = TokenBlock(case.q[:, piece], case.k[:, piece], case.v[:, piece], pos, spec.rope)
            out, state, _ = extend(state, block, {})
            outs.append(np.asarray(out))
        got = np.concatenate(outs, axis=1)
        for row, head in np.ndindex(5, 4):
            k = np.stack([rotate(ROPE, case.k[row, t, head // 2], t) for t in range(size)])
            v = case.v[row, :, head // 2].astype(np.float64)
            for t in range(size):
                from_ = 0 if window is None else max(0, t - window + 1)
                logits = k[from_ : t + 1] @ rotate(ROPE, case.q[row, t, head], t) * spec.scale
                np.testing.assert_allclose(got[row, t, head], softmax(logits) @ v[from_ : t + 1], atol=1e-5)
        assert state.next.tolist() == [[size] * 2] * 5


def test_memory_does_not_depend_on_the_length_of_the_prompt(tiny: Params) -> None:
    """The program that reads a piece is the same size to the byte, whether 1000 tokens come or 32000."""
    policy, sizes = kvjax.TreeKV(budget=16, sinks=2), []
    for tokens in (1000, 32_000):
        specs = layer_specs(tiny.config, 1, 0, tokens, tiny.dtype)
        state = decoding.empty(policy, specs, jnp.zeros(1, jnp.uint32))
        program = decoding.extend.compiled(policy, specs, tiny, state, jnp.zeros((1, 16), jnp.int32))
        memory = program.memory_analysis()
        sizes.append((memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes))
    assert sizes[0] == sizes[1]


def test_refusals(tiny: Params) -> None:
    with pytest.raises(kvjax.PolicyError, match="snapkv chooses what it keeps from the prompt as a whole"):
        kvjax.generate(tiny, PROMPTS, get_policy("snapkv", budget=40), prefill_chunk=16)
    with pytest.raises(ValueError, match="prefill_chunk=0"):
        kvjax.generate(tiny, PROMPTS, prefill_chunk=0)
