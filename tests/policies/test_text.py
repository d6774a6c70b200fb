"""Policies written as text."""

import pytest
from policies.random_cases import draw_policy

from kvjax.policies import (
    H2O,
    TOVA,
    CateKV,
    ChunkKV,
    ClusterKV,
    Full,
    KNorm,
    PolicyError,
    Quest,
    SnapKV,
    TreeKV,
    by_head,
    by_layer,
    critical,
    get_policy,
    offloaded,
    policies,
    prompt_only,
    quantized,
    recompress,
    thresholded,
)
from kvjax.policies.text import parse_policy, split_policies

PROFILE = (("a", "b"), ("b", "b"))

WRITTEN = {
    "treekv": TreeKV(),
    "Tree-KV": TreeKV(),
    "treekv:0.2": TreeKV(budget=0.2),
    "treekv:256,sinks=2": TreeKV(budget=256, sinks=2),
    "chunkkv:budget=0.2,chunk=20": ChunkKV(budget=0.2, chunk=20),
    "h2o:recent=none": get_policy("h2o"),
    "offloaded(clusterkv:1024; steps=2)": offloaded(ClusterKV(budget=1024), steps=2),
    "quantized( chunkkv:0.5 ; bits=4 )": quantized(ChunkKV(budget=0.5), bits=4),
    "prompt_only(tova:64)": prompt_only(TOVA(budget=64)),
    "critical(snapkv:64; share=0.25)": critical(SnapKV(budget=64), share=0.25),
    "recompress(snapkv:64; every=8)": recompress(SnapKV(budget=64), every=8),
    "recompress(h2o:observers=last; 64; prompt=keep)": recompress(H2O(budget=64, observers="last"), prompt="keep"),
    "thresholded(knorm:256; threshold=-12; window=8)": thresholded(KNorm(budget=256), -12, window=8),
    "by_layer(full; treekv:64,sinks=2)": by_layer([Full(), TreeKV(budget=64, sinks=2)]),
    "catekv:eta=1.0,adaptive=(quest:64)": CateKV(adaptive=Quest(budget=64)),
    "by_head(a=full; b=quantized(full; bits=8); profile=(('a', 'b'), ('b', 'b')))": by_head(
        {"a": Full(), "b": quantized(Full(), bits=8)}, PROFILE
    ),
    "offloaded(by_layer(full; by_head(a=full; b=treekv:8; profile=(('a', 'b'),))))": offloaded(
        by_layer([Full(), by_head({"a": Full(), "b": TreeKV(budget=8)}, (("a", "b"),))])
    ),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_text_is_a_policy(text):
    assert parse_policy(text) == get_policy(text) == WRITTEN[text]


@pytest.mark.parametrize("policy", [*WRITTEN.values(), *(cls() for cls in policies().values())], ids=str)
def test_a_policy_is_printed_as_it_is_read(policy):
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize("seed", range(100))
def test_random_policies_round_trip(seed):
    policy = draw_policy(seed)
    assert parse_policy(str(policy)) == policy


def test_more_hyperparameters_replace_those_of_the_text():
    assert get_policy("chunkkv:0.2,chunk=20", budget=64) == ChunkKV(budget=64, chunk=20)


def test_a_list_of_policies():
    text = "full, chunkkv:budget=0.2,chunk=20,offloaded(clusterkv:8,sinks=2; steps=2),treekv:0.2"
    assert split_policies(text) == [
        "full",
        "chunkkv:budget=0.2,chunk=20",
        "offloaded(clusterkv:8,sinks=2; steps=2)",
        "treekv:0.2",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("treekv:sinks", r"'treekv:sinks': budget='sinks'; give a number"),
        ("treekv:0.2,sinks", r"'sinks': write NAME=VALUE"),
        ("treekv:sinks=few", r"sinks='few'; give a whole number"),
        ("treekv:snks=2", r"policy 'treekv' has no hyperparameter 'snks'.*Did you mean 'sinks'"),
        ("offloaded(treekv", r"close the bracket"),
        ("offloaded()", r"has no policy; write one, as in offloaded\(full\)"),
        (
            "offload(treekv)",
            r"unknown transform 'offload'.*known: critical, offloaded, quantized, prompt_only, pyramid, recompress, thresholded, by_layer, by_head",
        ),
        ("by_head(a=full)", r"by_head needs profile="),
        ("offloaded(treekvv)", r"unknown policy 'treekvv'.*Did you mean 'treekv'"),
    ],
)
def test_what_is_no_policy(text, says):
    with pytest.raises(PolicyError, match=says):
        parse_policy(text)
