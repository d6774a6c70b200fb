"""The support matrix of the site: what it asks of the layers, against what is known of the policies otherwise."""

import importlib
import sys
from pathlib import Path

import pytest
from policies.facts import facts_of

from kvjax.policies import get_policy, policies

DOCS = Path(__file__).parents[1] / "docs"
NAMES = [name for name, cls in policies().items() if not cls.about.trained]


@pytest.fixture(scope="module")
def support():
    pytest.importorskip("sphinx", reason="needs the docs extra")
    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("extensions.support")
    finally:
        sys.path.remove(str(DOCS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adakv", "quest", "snapkv", "treekv"])
def test_rows_by_hand(support, name):
    """AdaKV's heads share a store; Quest keeps everything in pages; SnapKV compresses the prompt; TreeKV evicts while it decodes."""
    expected = {
        "adakv": ["yes", "no", "no", "no", "slots", "sharded", "no", "no", "v5e"],
        "quest": ["yes", "keeps all", "no", "yes", "heads", "sharded", "yes", "yes", "v5e, v6e"],
        "snapkv": ["yes", "with `recompress`", "yes", "yes", "heads", "sharded", "yes", "yes", "v5e"],
        "treekv": ["yes", "yes", "no", "yes", "heads", "replicated", "yes", "yes", "v5e, v6e"],
    }
    assert support.row(name) == [f"[`{name}`](/methods/{name}.md)", *expected[name]]


@pytest.mark.parametrize("name", NAMES)
def test_chunked_prefill_is_that_of_the_tests_of_policies(support, name):
    policy = get_policy(name, budget=1024) if policies()[name].about.takes_budget else get_policy(name)
    bound = policy.bind(support.CONFIG)
    layers = [bound.layer(spec) for spec in support.specs(support.CONFIG)]
    assert (support.chunked(layers) == "no") == facts_of(name).whole_prompts
