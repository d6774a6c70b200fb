"""Hyperparameters: a policy given no more than a budget is its method as published, and the least that is allowed is allowed."""

import jax.numpy as jnp
import pytest

from kvjax.policies import H2O, PolicyError, get_policy, policies, pyramid
from kvjax.policies.budget import SHORT
from kvjax.policies.transforms.pyramid import Pyramid

# By the paper, or where that is silent, by its code.
PUBLISHED = {
    "adakv": {"window": 32, "pool": "max", "kernel": 7, "alpha": 0.2},
    "cam": {"sinks": 4, "merge": 16},
    "catekv": {"eta": 1.0, "chunk": 8, "window": 64, "budget": 2048},
    "chelsea": {"sinks": 16, "recent": 64, "chunk": 256, "schedule": "llama-3"},
    "attention_matching": {"chunk": 2000, "overlap": 8, "prefix": 0, "queries": 50_000, "steps": 2, "bound": 3.0},
    "chunkkv": {"chunk": 10, "window": 32, "reuse": 1, "score": "softmax", "agg": "sum", "pool": None},
    "clusterkv": {
        "sinks": 16,
        "dense_layers": 2,
        "tokens_per_cluster": 80,
        "window": 320,
        "new_clusters": 4,
        "iterations": 20,
    },
    "compactor": {
        "sinks": 8,
        "recent": 4,
        "chunk": 256,
        "sketch": 48,
        "ridge": 0.01,
        "blend": None,
        "scaled": False,
        "per_head": False,
    },
    "duoattention": {"sinks": 64, "budget": 64 + 256},
    "expected_attention": {"sinks": 4, "future": 512, "epsilon": 0.02},
    "h2o": {"recent": None, "observers": "all"},
    "fast_kvzip": {"sinks": 4, "window": 4096, "short_window": 0.02, "long": 16000},
    "infinigen": {"budget": 0.2, "alpha": 5.0, "share": 0.2, "dense_layers": 2},
    "kivi": {"bits": 2, "group": 32, "residual": 32},
    "knorm": {"dense_layers": 2},
    "kvzap": {"sinks": 0, "window": 128, "scope": "layer"},
    "kvzip": {
        "scope": "layer",
        "chunk": 2000,
        "overlap": 8,
        "sinks": 4,
        "prefix": 0,
        "queries": "all",
        "slack": 2.0,
        "plus": False,
    },
    "lagkv": {"sinks": 16, "lag": 128},
    "pyramidkv": {"window": 32, "pool": "max", "kernel": 7, "beta": 20},
    "quest": {"page": 16, "dense_layers": 2, "recent": 0, "gqa": "query_head"},
    "rkv": {"every": 128, "window": 8, "kernel": 7, "weight": 0.1, "threshold": 0.5, "spare_first": False},
    "shadowkv": {"rank": 160, "chunk": 8, "outlier_chunks": 48, "local_chunks": 4},
    "snapkv": {"window": 32, "pool": "max", "kernel": 7},
    "streaming_llm": {"sinks": 4},
    "tova": {"keep_newest": False},
    "triattention": {"budget": 2048, "every": 128, "window": 128, "offsets": 17, "agg": "mean", "gqa": "max"},
    "treekv": {"sinks": 4, "keep": "score"},
    "turboquant": {"bits": 4, "values": "levels", "signs": None, "exact_layers": 2},
}


def test_every_method_with_hyperparameters_is_there() -> None:
    ours = {name for name, policy in policies().items() if policy.__module__.startswith("kvjax.")}
    assert ours - set(PUBLISHED) == {"full", "keydiff", "random"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_ones(name: str) -> None:
    policy = get_policy(name)
    assert {field: getattr(policy, field) for field in PUBLISHED[name]} == PUBLISHED[name]


def test_pyramid_is_as_steep_as_pyramidkv() -> None:
    assert pyramid(get_policy("snapkv")) == pyramid(get_policy("snapkv"), beta=20) == Pyramid(get_policy("snapkv"))


LEAST = {
    "adakv": {"alpha": 0, "window": 1, "kernel": 1},
    "cam": {"merge": 1, "sinks": 0},
    "catekv": {"sinks": 0, "recent": 0, "chunk": 1, "window": 1, "eta": 0},
    "chelsea": {"sinks": 0, "recent": 0, "chunk": 2, "every": 1, "alpha": 0, "steps": 0},
    "chunkkv": {"chunk": 1, "window": 1, "reuse": 1, "pool": 1},
    "attention_matching": {"chunk": 1, "overlap": 0, "prefix": 0, "queries": 1, "steps": 0, "bound": 0},
    "clusterkv": {
        "sinks": 0,
        "dense_layers": 0,
        "tokens_per_cluster": 1,
        "n_clusters": 1,
        "iterations": 1,
        "window": 1,
        "new_clusters": 1,
    },
    "compactor": {"sinks": 0, "recent": 0, "chunk": 1, "sketch": 1, "ridge": 0, "blend": 0},
    "duoattention": {"sinks": 0, "sparsity": 0},
    "expected_attention": {"sinks": 0, "future": 1, "epsilon": 0},
    "h2o": {"recent": 0, "window": 1},
    "fast_kvzip": {"sinks": 0, "window": 0, "short_window": 0, "long": 0},
    "infinigen": {"alpha": 0, "dense_layers": 0},
    "knorm": {"dense_layers": 0},
    "kvzap": {"sinks": 0, "window": 0},
    "kvzip": {"chunk": 1, "overlap": 0, "sinks": 0, "prefix": 0, "slack": 1},
    "lagkv": {"sinks": 0, "lag": 2},
    "pyramidkv": {"beta": 1, "window": 1, "kernel": 1},
    "quest": {"page": 1, "dense_layers": 0, "recent": 0},
    "rkv": {"every": 1, "window": 1, "kernel": 1, "weight": 0, "threshold": -1},
    "shadowkv": {"rank": 1, "chunk": 1, "outlier_chunks": 0, "local_chunks": 0},
    "snapkv": {"window": 1, "kernel": 1},
    "streaming_llm": {"sinks": 0},
    "triattention": {"every": 1, "window": 0, "offsets": 1},
    "treekv": {"sinks": 0, "recent": 0, "block": 1},
    "turboquant": {"group": 1, "exact_layers": 0},
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in LEAST for field in LEAST[name]])
def test_the_least_is_allowed_and_less_is_not(name: str, field: str) -> None:
    least = LEAST[name][field]
    assert getattr(get_policy(name, **{field: least}), field) == least
    with pytest.raises(PolicyError, match=f"{field}={least - 1}"):
        get_policy(name, **{field: least - 1})


BUDGETS = [
    ("attention_matching", {"prefix": 3}, 3),
    ("cam", {"sinks": 4}, 5),
    ("chunkkv", {"window": 32}, 32),
    ("clusterkv", {"sinks": 16}, 17),
    ("compactor", {"sinks": 8, "recent": 4}, 12),
    ("duoattention", {"sinks": 64}, 65),
    ("h2o", {"recent": 3}, 4),
    ("h2o", {}, 1),
    ("fast_kvzip", {"sinks": 4}, 4),
    ("infinigen", {}, 2),
    ("kvzap", {}, 1),
    ("kvzip", {"sinks": 4}, 4),
    ("kvzip", {"sinks": 4, "prefix": 9}, 9),
    ("lagkv", {"sinks": 16}, 17),
    ("quest", {"page": 16}, 16),
    ("quest", {"page": 16, "recent": 1}, 32),
    ("rkv", {"window": 8}, 8),
    ("shadowkv", {"chunk": 8}, 8),
    ("snapkv", {"window": 32}, 32),
    ("streaming_llm", {"sinks": 4}, 5),
    ("triattention", {"window": 128}, 128),
    ("treekv", {"sinks": 4, "recent": 3}, 8),
    ("treekv", {"sinks": 4}, 5),
]


@pytest.mark.parametrize(("name", "options", "least"), BUDGETS)
def test_the_least_budget(name: str, options: dict[str, int], least: int) -> None:
    """As a number of tokens, and as a share of a text that is not short: a shorter one gets what is needed."""
    assert get_policy(name, budget=least, **options).budget == least
    with pytest.raises(PolicyError, match=f"budget.*{least - 1}"):
        get_policy(name, budget=least - 1, **options)
    tokens = SHORT * least
    get_policy(name, budget=least / tokens, **options).validate(tokens)
    too_small = get_policy(name, budget=(least - 0.5) / tokens, **options)
    too_small.validate(tokens - 1)
    with pytest.raises(PolicyError, match="budget of 0"):
        too_small.validate(tokens)


def test_recent_tokens_of_h2o() -> None:
    """Half of each row's budget, or as many as are asked for."""
    budgets = jnp.asarray([8, 21], jnp.int32)
    assert [x.tolist() for x in H2O().always_kept(budgets)] == [[0, 0], [4, 10]]
    assert [x.tolist() for x in H2O(recent=3).always_kept(budgets)] == [[0, 0], [3, 3]]
