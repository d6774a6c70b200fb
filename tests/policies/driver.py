"""Drives one layer's policy over random queries, keys and values, without a model around it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.facts import facts_of
from policies.oracle_arrays import ROPE
from policies.surrogates import model_inputs

import kvjax
from kvjax.cache import LayerSpec, PromptKV, Token, bucket, where_rows
from kvjax.config import Rope, RopeConfig
from kvjax.models import ModelConfig
from kvjax.policies import (
    ByHead,
    ByLayer,
    Chunks,
    ClusterKV,
    Critical,
    KNorm,
    Offloaded,
    Policy,
    Quest,
    SnapKV,
    StreamingLLM,
    TreeKV,
    by_head,
    by_layer,
    chunkkv,
    critical,
    get_policy,
    offloaded,
    policies,
    prefill_alone,
    recompress,
    then,
    thresholded,
)
from kvjax.policies.attention_context import AttentionContext
from kvjax.policies.families.scoring import PromptScorer

TINY = ModelConfig.uniform("llama", 64, 48, 96, 2, 4, 2, 16, 256, RopeConfig(theta=10000.0, dim=16))
"""What policies are bound to: as the `tiny` model, 2 layers of 2 KV heads."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Random inputs of one layer: prompts of ragged lengths, then `steps` decoded tokens per row.

    q [B, S, N, H], k and v [B, S, K, H] hold prompt and decoded tokens of a row one after the other, S = prompt length of that
    row + steps (what lies beyond is padding).
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    lengths: np.ndarray
    steps: int

    @property
    def spec(self) -> LayerSpec:
        """The layer these inputs are for."""
        batch, _, heads, dim = self.q.shape
        return LayerSpec(
            layer=0,
            num_layers=2,
            batch=batch,
            num_heads=heads,
            num_kv_heads=self.k.shape[2],
            head_dim=dim,
            prompt_len=bucket(int(self.lengths.max())),
            new_tokens=self.steps,
            dtype=jnp.dtype(jnp.float32),
            rope=ROPE,
            scale=dim**-0.5,
        )

    def rows(self, at: slice | list[int]) -> "Case":
        """Some of the rows, as a batch of their own."""
        return Case(self.q[at], self.k[at], self.v[at], self.lengths[at], self.steps)


def make_case(seed: int, lengths: Any, steps: int, heads: int = 4, kv_heads: int = 2, dim: int = 8) -> Case:
    """Random inputs with attention that has clear favourites."""
    lengths = np.asarray(lengths, np.int32)
    random = np.random.default_rng(seed)
    size = (len(lengths), int(lengths.max()) + steps)
    q, k, v = (random.normal(size=(*size, n, dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    return Case(2 * q, k, v, lengths, steps)


def run(policy: Policy, case: Case, padding: float = 0.0) -> tuple[Any, np.ndarray, list[Any]]:
    """Prefill, then decode: the final state, outputs [steps, B, N, H], and the state after the prompt and after each step.

    Args:
        padding: what stands after a prompt's end.
    """
    prefill, step = compiled(policy, case.spec)
    size = case.spec.prompt_len
    inside = np.arange(size)[None, :] < case.lengths[:, None]

    def prompt(x: np.ndarray) -> np.ndarray:
        padded = np.zeros((x.shape[0], size, *x.shape[2:]), x.dtype)
        padded[:, : min(size, x.shape[1])] = x[:, :size]
        return np.where(inside[..., None, None], padded, np.float32(padding))

    state = prefill(prompt(case.q), prompt(case.k), prompt(case.v), case.lengths)
    rows, states, outputs = np.arange(len(case.lengths)), [state], []
    for i in range(case.steps):
        pos = case.lengths + i
        out, state = step(state, case.q[rows, pos], case.k[rows, pos], case.v[rows, pos], pos)
        outputs.append(np.asarray(out))
        states.append(state)
    return state, np.asarray(outputs), states


@functools.cache
def compiled(policy: Policy, spec: LayerSpec) -> tuple[Any, Any]:
    """The policy's prefill, and one decoding step (append, attend, compress) of the rows that have a token, each jitted."""
    layer = policy.layer(spec)

    @jax.jit
    def prefill(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        carry = surrounded(spec, q, k).with_context({}) if layer.needs_context else {}
        return prefill_alone(layer, PromptKV.of(spec.rope, q, k, v, lengths, lengths + spec.new_tokens), carry)[0]

    @jax.jit
    def step(state: Any, q: Any, k: Any, v: Any, pos: Any, live: Any = None) -> Any:
        token = Token(q, k, v, pos, spec.rope, live)
        held = layer.append(state, token)
        out, after, _ = layer.attend(held, token, {})
        return out, layer.compress(after if live is None else where_rows(live, after, held))

    return prefill, step


def surrounded(spec: LayerSpec, q: Any, k: Any) -> AttentionContext:
    """What is around attention that reads queries and keys side by side, as wide as `TINY`; nothing comes after it."""
    read = jnp.concatenate([q.reshape(*q.shape[:2], -1), k.reshape(*k.shape[:2], -1)], axis=-1)
    read = jnp.pad(read, ((0, 0), (0, 0), (0, max(TINY.hidden_size - read.shape[-1], 0))))[..., : TINY.hidden_size]
    return dataclasses.replace(AttentionContext.alone(spec), inputs=lambda: read)


TRANSFORMS = {"recompress": "slow", "chunkkv": "slow", "critical": "long", "then": "slow", "thresholded": "long"}
"""Tiers of transforms whose parts others have. Those of policies are in `facts.Facts`."""


LATER = {"default": "slow", "slow": "long", "long": "long"}
"""The tier of a policy where a test takes much longer than others of every policy."""


def in_tier(name: str, later: bool = False, often: bool = False) -> list[pytest.MarkDecorator]:
    """The marks of a test of this policy (or of this text of a transform), with `later` and `often` as in `each`."""
    outer, bracket, _ = name.partition("(")
    tier = TRANSFORMS.get(outer, facts_of(outer).tier) if bracket else facts_of(outer).tier
    tier = LATER[tier] if later else tier
    tier = "slow" if often and tier == "long" else tier
    return [] if tier == "default" else [getattr(pytest.mark, tier)]


def each(policies: list[Policy], later: bool = False, often: bool = False) -> pytest.MarkDecorator:
    """One test for every policy, in the policy's tier, or with `later` in the one after it; with `often` no test is long."""
    named = [(policy.info.name or type(policy).__name__, policy) for policy in policies]
    params = [pytest.param(policy, id=name, marks=in_tier(name, later, often)) for name, policy in named]
    return pytest.mark.parametrize("policy", params)


def every_policy(budget: int | float) -> list[Policy]:
    """One of each registered policy with this budget (and small regions, so that small cases exercise them), bound to `TINY`."""
    return list(_every_policy(budget, type(budget)))


USUAL = {"sinks": 2, "block": 4, "window": 4, "chunk": 4, "recent": None, "every": 4, "dense_layers": 0}
"""Small values of hyperparameters with usual names; `Facts.small` has others."""


@functools.cache
def _every_policy(budget: int | float, kind: type) -> tuple[Policy, ...]:
    made = []
    for name, cls in policies().items():
        fields = {f.name: f.type for f in dataclasses.fields(cls)}
        if kind is float and fields.get("budget") in (int, "int"):
            continue  # a user's own policy that refuses fractions
        options = {k: v for k, v in USUAL.items() if k in fields} | facts_of(name).small
        if "budget" in fields:
            options["budget"] = budget
        if "residual" in fields:  # of what is quantised, as much stays exact
            options |= {"residual": budget if isinstance(budget, int) else 16, "group": 4, "bits": 8}
        if "exact_layers" in fields:  # of TINY's two layers, both where as much as the budget stays exact
            options["exact_layers"] = 1 if isinstance(budget, int) and budget > 1000 else 0
            options |= {"group": 4} if "group" in fields else {}
        made.append(get_policy(name, **options, **model_inputs(cls, TINY)).bind(TINY))
    return tuple(made)


def compositions(budget: int | float) -> list[Policy]:
    """Combinators of policies with this budget, nested ones too, for models of 2 layers and 2 KV heads."""
    tree, stream = TreeKV(budget=budget, sinks=2, block=4), StreamingLLM(budget=budget, sinks=2)
    heads = by_head({"tree": tree, "stream": stream}, [["stream", "tree"], ["tree", "tree"]])
    rounds = [
        recompress(SnapKV(budget=budget, window=4), every=4),
        recompress(KNorm(budget=budget, dense_layers=0), every=4),
        chunkkv(SnapKV(budget=budget, window=4), chunk=4, spiky=2),
        critical(SnapKV(budget=budget, window=4)),
        then(
            SnapKV(budget=budget, window=4),
            Quest(budget=8 if isinstance(budget, int) and budget <= 1000 else budget, page=4, dense_layers=0),
        ),
        thresholded(KNorm(budget=budget, dense_layers=0), -2.7, window=1000 if budget > 1000 else 4),
    ]
    return [heads, by_layer([stream, heads]), *rounds]


def offloads(budget: int) -> list[Policy]:
    """As `compositions`, with a sparse part whose store is in the host's memory."""
    sparse = ClusterKV(budget=budget, sinks=2, dense_layers=0, n_clusters=5, iterations=1, cluster_decode=False)
    return [by_layer([offloaded(sparse, steps=2), compositions(budget)[0]])]


def most(policy: Policy, spec: LayerSpec, head: int, length: int, steps: int) -> int:
    """How many slots one KV head may hold after a prompt of `length` tokens and `steps` new ones."""
    if isinstance(policy, ByLayer):
        return most(policy.layers[spec.layer], spec, head, length, steps)
    if isinstance(policy, Offloaded | Critical | Chunks):
        return most(policy.policy, spec, head, length, steps)
    if isinstance(policy, ByHead):
        group = next(i for i, layers in enumerate(policy.heads) if head in layers[spec.layer])
        return most(policy.groups[group], spec, head, length, steps)
    budget = getattr(policy, "budget", None)
    if budget is None or policy.info.memory == "sparse" or spec.layer < getattr(policy, "dense_layers", 0):
        return length + steps
    if isinstance(policy, PromptScorer):  # budgets may differ by layer
        total = jnp.asarray([length + spec.new_tokens], jnp.int32)
        budget = policy.row_budgets(spec, jnp.asarray([length], jnp.int32), total).item()
    if policy.info.heads_coupled:  # the heads of a layer share theirs
        budget *= spec.num_kv_heads
    wait = getattr(policy, "every", 1) - 1  # tokens beyond its budget that it compresses at once
    return min(length + steps, budget + wait + (steps if policy.info.budget_excludes_new_tokens else 0))


def kept(policy: Policy, case: Case, state: Any) -> list[list[set[int]]]:
    """Original positions held, as sets, by row and head."""
    slots = policy.layer(case.spec).view(state)
    pos, live = np.asarray(slots.pos), np.asarray(slots.live)
    return [[set(p[m].tolist()) for p, m in zip(*row, strict=True)] for row in zip(pos, live, strict=True)]


def rotated(rope: Rope, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Rotated queries and keys of a prompt, and values."""
    lengths = jnp.full(len(q), q.shape[1], jnp.int32)
    prompt = PromptKV.of(rope, q, k, v, lengths, lengths)
    return prompt.q_rotated, prompt.k_rotated, prompt.v


def rotate(rope: Rope, x: np.ndarray, pos: int) -> np.ndarray:
    """Rotary embedding of one head vector, written out (float64)."""
    half = len(rope.inv_freq)
    out = x.astype(np.float64).copy()
    for i, frequency in enumerate(rope.inv_freq):
        c, s = np.cos(pos * frequency), np.sin(pos * frequency)
        out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
    return out


def as_if_alone(params: Any, prompts: list[list[int]], *, atol: float = 2e-5, **options: Any) -> list[Any]:
    """What a batch generates, each of whose rows generates what its prompt does alone.

    Args:
        atol: by how much log-probabilities may differ.
    """
    together = kvjax.generate(params, prompts, **options)
    for prompt, got in zip(prompts, together, strict=True):
        alone = kvjax.generate(params, prompt, **options)
        assert alone.tokens == got.tokens
        np.testing.assert_allclose(alone.logprobs, got.logprobs, atol=atol)
    return together
