"""Random policies, combinators, models and batches, and one program that reads a prompt and decodes through all layers."""

import dataclasses
import functools
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import LayerSpec, PromptKV, Token, layer_specs
from kvjax.config import RopeConfig
from kvjax.models import ModelConfig
from kvjax.policies import (
    Policy,
    PolicyError,
    by_head,
    by_layer,
    chunkkv,
    critical,
    get_policy,
    offloaded,
    policies,
    prefill_alone,
    pyramid,
    quantized,
    recompress,
    thresholded,
)

STEPS = 5
PROMPT = 64
"""Tokens that all prompts are padded to, in a batch and alone."""

NUMBERS: dict[str, list[Any]] = {
    "budget": [1, 2, 3, 6, 12, 24, 40, 100, 0.1, 0.25, 0.5, 0.8, 1.0],
    "sinks": [0, 1, 2, 4],
    "recent": [0, 1, 2, 8],
    "window": [1, 2, 4, 8],
    "kernel": [1, 3, 5],
    "pool": [None, 3],
    "chunk": [2, 4, 7],
    "block": [2, 4, 16],
    "every": [1, 2, 4],
    "reuse": [1, 2],
    "beta": [2, 5],
    "alpha": [0.0, 0.2, 1.0],
    "eta": [0.5, 1.0],
    "merge": [1, 2, 4],
    "dense_layers": [0, 1],
    "n_clusters": [None, 1, 4],
    "tokens_per_cluster": [4, 12],
    "iterations": [1, 4],
    "new_clusters": [1, 2],
    "page": [2, 4, 8],
    "share": [0.1, 0.3, 1.0],
    "rank": [2, 8, 100],
    "outlier_chunks": [0, 1, 2],
    "local_chunks": [0, 1],
    "bits": [2, 4, 8],
    "group": [2, 4],
    "residual": [4, 8, 16],
    "future": [4, 32],
    "sketch": [None, 3, 40],
    "ridge": [0.01, 1.0],
    "blend": [None, 0.0, 1.0],
    "weight": [0.0, 0.1, 1.0],
    "threshold": [-1.0, 0.5],
    "seed": [0, 1],
    "exact_layers": [0, 1],
    "sparsity": [None],
}
"""What hyperparameters are drawn from; others than these, choices and switches keep their defaults."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A random case.

    Attributes:
        policy: bound to the model.
        config: the model.
        lengths: prompt tokens of each row.
        tokens: [B, PROMPT + STEPS], the row's prompt, padding, and what is decoded after it.
        table: queries, keys and values of every layer for each token: [L, V, N or K, H].
        kind: of prompts.
    """

    policy: Policy
    config: ModelConfig
    lengths: np.ndarray
    tokens: np.ndarray
    table: tuple[np.ndarray, np.ndarray, np.ndarray]
    kind: str


def draw(seed: int) -> Drawn:
    """The case of a number."""
    random = np.random.default_rng([27, seed])

    def pick(options: Any) -> Any:
        return options[int(random.integers(len(options)))]

    layers, kv_heads, dim = pick([1, 1, 1, 2]), pick([1, 2, 2, 3]), pick([4, 8, 16])
    heads = kv_heads * int(random.integers(1, 4))
    rope = RopeConfig(pick([100.0, 10000.0]), pick([dim, dim // 2]), interleaved=bool(random.random() < 0.2))
    windows = tuple(pick([None, None, None, 12]) for _ in range(layers))
    config = ModelConfig.uniform("llama", 64, 48, 96, layers, heads, kv_heads, dim, 256, rope, windows=windows)

    lengths = random.integers(1, PROMPT + 1, size=int(random.integers(2, 4))).astype(np.int32)
    lengths[0] = max(lengths[0], 40)
    kind = pick(["random", "random", "constant", "constant", "repeated", "text"])
    size = {"random": lengths.size * (PROMPT + STEPS), "constant": 1, "repeated": 3, "text": 12}[kind]
    place = np.arange(PROMPT + STEPS)
    own = np.arange(lengths.size)[:, None] * place.size + place
    tokens = {
        "random": own,
        "constant": 0 * own,
        "repeated": own % 3,
        "text": random.integers(0, 12, own.shape),
    }[kind]
    table = tuple(random.normal(size=(layers, size, n, dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    while True:
        try:
            policy = _policy(random, config, depth=2).bind(config)
            for length in lengths.tolist():
                policy.validate(length + STEPS)
            if (
                "offloaded(" in policy.info.name or "by_head(" in policy.info.name
            ):  # which refuse some when they see their layers
                for spec in layer_specs(config, 1, PROMPT, STEPS, jnp.float32):
                    jax.eval_shape(policy.layer(spec).init)
            return Drawn(policy, config, lengths, tokens, (2 * table[0], table[1], table[2]), kind)
        except PolicyError:
            continue


def draw_policy(seed: int) -> Policy:
    """A random policy, not bound, for models of 2 layers and 3 KV heads."""
    random = np.random.default_rng([28, seed])
    config = ModelConfig.uniform("llama", 64, 48, 96, 2, 6, 3, 8, 256, RopeConfig(100.0, 8))
    while True:
        try:
            return _policy(random, config, depth=3)
        except PolicyError:
            continue


def _policy(random: np.random.Generator, config: ModelConfig, depth: int) -> Policy:
    """A random policy, which may be made of others."""

    def labels(kinds: Any) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple(kinds[int(random.integers(len(kinds)))] for _ in range(config.num_kv_heads))
            for _ in range(config.num_layers)
        )

    inner = functools.partial(_policy, random, config, depth - 1)
    made = random.random() if depth else 1.0
    if made < 0.1:
        return by_layer([inner() for _ in range(config.num_layers)])
    if made < 0.2:
        return by_head({"a": inner(), "b": inner()}, labels("ab"))
    if made < 0.25:
        return offloaded(inner(), steps=int(random.integers(1, 3)))
    if made < 0.33:
        return quantized(inner(), bits=8, group=4, residual=int(random.choice([4, 8])))
    if made < 0.4:
        return pyramid(inner(), beta=int(random.integers(2, 6)))
    if made < 0.45:
        return recompress(inner(), every=int(random.integers(1, 6)))
    if made < 0.465:
        return chunkkv(inner(), chunk=int(random.choice([2, 4, 7])), spiky=[None, 1][int(random.integers(2))])
    if made < 0.48:
        return critical(inner())
    if made < 0.5:
        scorer = get_policy(
            "random" if random.random() < 0.5 else "knorm",
            budget=NUMBERS["budget"][int(random.integers(len(NUMBERS["budget"])))],
        )
        return thresholded(scorer, float(random.choice([-3.0, 0.0, 0.5])), window=int(random.choice([0, 1, 4, 8])))

    names = sorted(policies(trained=False))
    cls = policies()[names[int(random.integers(len(names)))]]
    hints = get_type_hints(cls)
    options: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        choices = [x for hint in (hints[field.name], *get_args(hints[field.name])) for x in _choices(hint)]
        choices = NUMBERS.get(field.name, choices)
        if choices and (field.name == "budget" or random.random() < 0.7):
            options[field.name] = choices[int(random.integers(len(choices)))]
    if kinds := getattr(cls, "labels", ()):
        options["profile"] = labels(kinds)
    if cls.about.name == "infinigen":
        options["profile"] = "prompt"
    return get_policy(cls.about.name, **options)


def _choices(hint: Any) -> list[Any]:
    if hint is bool:
        return [False, True]
    return list(get_args(hint)) if get_origin(hint) is Literal else []


def read(case: Drawn, rows: slice, noise: float = 0.0) -> tuple[np.ndarray, list[Any]]:
    """Outputs [STEPS, L, B, N, H] of some rows as a batch, and every layer's slots after the prompt and at the end.

    Args:
        noise: relative rounding that queries, keys and values come with, as those of a model do.
    """
    tokens, lengths = case.tokens[rows], case.lengths[rows]
    random = np.random.default_rng(1)
    q, k, v = (x[:, tokens] * (1 + noise * random.standard_normal((1, *tokens.shape, 1, 1))) for x in case.table)
    specs = layer_specs(case.config, len(lengths), PROMPT, STEPS, jnp.float32)
    args = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    outputs, slots = _program(case.policy, specs, *args, jnp.asarray(lengths))
    return np.asarray(outputs), jax.tree.map(np.asarray, slots)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _program(policy: Policy, specs: tuple[LayerSpec, ...], q: Any, k: Any, v: Any, lengths: Any) -> Any:
    layers = [policy.layer(spec) for spec in specs]
    states, carry = [], {}
    for i, layer in enumerate(layers):
        prompt = PromptKV.of(layer.spec.rope, *(x[i, :, :PROMPT] for x in (q, k, v)), lengths, lengths + STEPS)
        state, carry = prefill_alone(layer, prompt, carry)
        states.append(state)

    def held(states: Any) -> Any:
        caches = [layer.view(state) for layer, state in zip(layers, states, strict=True)]
        return [(x.pos, x.weight, x.next, x.seen) for x in caches]

    def step(states: Any, given: Any) -> Any:
        (q, k, v), pos = given
        after, outs, carry = [], [], {}
        for i, (layer, state) in enumerate(zip(layers, states, strict=True)):
            if i:
                carry = layer.look_ahead(lambda i=i: q[i], pos, carry)
            token = Token(q[i], k[i], v[i], pos, layer.spec.rope)
            out, state, carry = layer.attend(layer.append(state, token), token, carry)
            after.append(layer.compress(state))
            outs.append(out)
        return tuple(after), jnp.stack(outs)

    decoded = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, PROMPT:], 2, 0), (q, k, v))
    places = lengths + jnp.arange(STEPS, dtype=jnp.int32)[:, None]
    end, outputs = jax.lax.scan(step, tuple(states), (decoded, places))
    return outputs, [held(states), held(end)]
