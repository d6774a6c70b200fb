"""Errors in a policy's own functions name the policy, the function and the shapes."""

import dataclasses
import traceback
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import LayerSpec, PromptKV, from_prompt, keep
from kvjax.policies import CacheLayer, Policy, PolicyError, PolicyInfo, PromptScorer, ScoreEviction, get_policy

PROMPTS = [[5, 9, 2, 7, 7, 1] * 4, [3, 1, 4]]
OPTIONS = {"max_new_tokens": 3, "ignore_eos": True}


def norms(prompt: PromptKV) -> Any:
    return -jnp.linalg.norm(prompt.k, axis=-1).swapaxes(1, 2)


class Transposed(PromptScorer):
    about = PolicyInfo("transposed")

    def scores(self, spec, prompt):
        return norms(prompt).swapaxes(1, 2)


class OneBudget(PromptScorer):
    about = PolicyInfo("one_budget")

    def scores(self, spec, prompt):
        return norms(prompt)

    def row_budgets(self, spec, lengths, total):
        return jnp.int32(8)


class PerQueryHead(ScoreEviction):
    about = PolicyInfo("per_query_head")

    def scores(self, spec, prompt):
        return norms(prompt)

    def update_score(self, spec, score, probs, held):
        return jnp.repeat(score, 2, axis=1)


class OwnLayer(Policy):
    """A policy of whose layer one function is another."""

    about = PolicyInfo("own_layer")
    functions: dict[str, Any]

    def layer(self, spec):
        return type("Mine", (CacheLayer,), self.functions)(self, spec)


def with_functions(**functions: Any) -> Policy:
    return type("Own", (OwnLayer,), {"functions": functions})()


def flat(self, state, token, carry):
    return token.q.reshape(token.q.shape[0], -1), state, carry


def longer(self, state):
    return dataclasses.replace(state, seen=jnp.append(state.seen, 0))


def half(self, state, token):
    state = CacheLayer.append(self, state, token)
    return dataclasses.replace(state, k=state.k.astype(jnp.float16))


def pair(self, state):
    return state, state


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (
            Transposed(budget=8),
            r"transposed: scores returned shape \(2, 64, 2\). Return an array \[B K T\] of shape \(2, 2, 64\)",
        ),
        (OneBudget(budget=8), r"one_budget: row_budgets returned shape \(\). Return an array \[B\] of shape \(2,\)"),
        (
            PerQueryHead(budget=8),
            r"per_query_head: update_score returned shape \(2, 4, 32\). Return an array \[B K C\] of shape \(2, 2",
        ),
        (
            with_functions(attend=flat),
            r"own_layer: attend returned shape \(2, 64\). Return an array \[B N H\] of shape \(2, 4, 16\)",
        ),
        (
            with_functions(compress=longer),
            r"own_layer: compress returned int32\[3\] for state\.seen\. Return int32\[2\]",
        ),
        (with_functions(append=half), r"own_layer: append returned float16\[.*\] for state\.k\. Return float32"),
        (with_functions(compress=pair), r"own_layer: compress returned a state of structure PyTreeDef\(\("),
    ],
    ids=lambda x: str(x)[:12],
)
def test_what_a_function_returns_is_checked(tiny, policy, says):
    with pytest.raises(PolicyError, match=says):
        kvjax.generate(tiny, PROMPTS, policy=policy, **OPTIONS)


@pytest.mark.parametrize("function", ["prefill", "append", "attend", "compress"])
def test_an_error_within_a_function_says_where_it_was(tiny, function):
    def fails(self, *_):
        return jnp.zeros(3) + jnp.zeros(4)

    with pytest.raises(TypeError) as error:
        kvjax.generate(tiny, PROMPTS, policy=with_functions(**{function: fails}), **OPTIONS)
    assert f"In {function}() of policy 'own_layer', layer 0." in "".join(traceback.format_exception(error.value))


def prompt_of(rows: int, size: int = 16) -> PromptKV:
    q, k = (jnp.ones((rows, size, heads, 8)) for heads in (4, 2))
    lengths = jnp.full((rows,), size, jnp.int32)
    return PromptKV.of(LayerSpec(4, 2, 8, size, 8).rope, q, k, k, lengths, lengths + 8)


def test_a_layer_without_a_model_needs_five_numbers():
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_dim=8, prompt_len=16, new_tokens=8)
    state, _ = Policy().layer(spec).prefill(prompt_of(1), {})
    np.testing.assert_array_equal(state.k[:, :, :16], 1.0)  # not rotated
    assert spec.scale == 8**-0.5


def test_a_prompt_must_fit_its_spec():
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_dim=8, prompt_len=16, new_tokens=8, batch=2)
    with pytest.raises(ValueError, match=r"1 rows and 2 KV heads, but the LayerSpec has batch=2"):
        Policy().layer(spec).prefill(prompt_of(1), {})
    with pytest.raises(ValueError, match=r"padded to 16 tokens does not fit 8 slots. Override prefill"):
        from_prompt(spec, 8, prompt_of(2))
    with pytest.raises(ValueError, match=r"keep has shape \(2, 2, 12\) for a prompt of 16 places"):
        keep(spec, 8, prompt_of(2), jnp.ones((2, 2, 12), bool))


def test_a_policy_without_a_description_has_the_name_of_its_class():
    class Mine(PromptScorer):
        def scores(self, spec, prompt):
            return prompt.k[..., 0]

    assert str(Mine(budget=0.25)) == "Mine:budget=0.25"
    with pytest.raises(PolicyError, match=r"^Mine: budget=2\.0 is not valid"):
        Mine(budget=2.0)
    with pytest.raises(PolicyError, match=r"policy is the class Mine\. Give a policy of this class, Mine\(\.\.\.\)\."):
        get_policy(Mine)
