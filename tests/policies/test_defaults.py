"""A policy that is given no more than a budget is its method as published: by the paper, or where that is silent, by its code."""

import pytest

from kvjax.policies import get_policy, policies, pyramid

PUBLISHED = {
    "adakv": {"window": 32, "pool": "max", "kernel": 7, "alpha": 0.2},
    "cam": {"sinks": 4, "merge": 16},
    "catekv": {"eta": 1.0, "chunk": 8, "window": 64, "budget": 2048},
    "chelsea": {"sinks": 16, "recent": 64, "chunk": 256, "schedule": "llama-3"},
    "chunkkv": {"chunk": 10, "window": 32, "reuse": 1, "score": "softmax", "agg": "sum", "pool": None},
    "clusterkv": {
        "sinks": 16,
        "exempt": 2,
        "tokens_per_cluster": 80,
        "window": 320,
        "new_clusters": 4,
        "iterations": 20,
    },
    "duoattention": {"sinks": 64, "budget": 64 + 256},
    "expected_attention": {"sinks": 4, "future": 512, "epsilon": 0.02},
    "h2o": {"recent": None, "observers": "all"},
    "infinigen": {"budget": 0.2, "alpha": 4.0, "share": 0.2, "exempt": 2},
    "kivi": {"bits": 2, "group": 32, "residual": 32},
    "knorm": {"exempt": 2},
    "pyramidkv": {"window": 32, "pool": "max", "kernel": 7, "beta": 20},
    "quest": {"page": 16, "exempt": 2, "recent": 0, "gqa": "query_head"},
    "shadowkv": {"rank": 160, "chunk": 8, "outlier_chunks": 48, "local_chunks": 4},
    "snapkv": {"window": 32, "pool": "max", "kernel": 7},
    "streaming_llm": {"sinks": 4},
    "tova": {"keep_newest": False},
    "treekv": {"sinks": 4, "keep": "score"},
}


def test_every_method_with_hyperparameters_is_there() -> None:
    ours = {name for name, policy in policies().items() if policy.__module__.startswith("kvjax.")}
    assert ours - set(PUBLISHED) == {"full", "keydiff", "random"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_ones(name: str) -> None:
    policy = get_policy(name)
    assert {field: getattr(policy, field) for field in PUBLISHED[name]} == PUBLISHED[name]


def test_pyramid_is_as_steep_as_pyramidkv() -> None:
    assert pyramid(get_policy("snapkv")) == pyramid(get_policy("snapkv"), beta=20)
