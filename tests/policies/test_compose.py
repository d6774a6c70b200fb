"""Combinators refuse what does not fit the model."""

import pytest

import kvjax
from kvjax.policies import ClusterKV, Full, PolicyError, StreamingLLM, TreeKV, by_head, by_layer, offloaded

TREE, STREAM = TreeKV(budget=16, sinks=2), StreamingLLM(budget=16, sinks=2)
PROMPT = [1, 2, 3, 4] * 10


def test_by_layer_from_a_mapping(tiny):
    policy = by_layer({1: TREE}, default=STREAM, num_layers=2)
    assert policy.layers == (STREAM, TREE)
    assert len(kvjax.generate(tiny, PROMPT, policy=policy, max_new_tokens=4).tokens) == 4


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: by_layer({0: TREE}), "default policy and num_layers"),
        (lambda: by_layer({2: TREE}, default=STREAM, num_layers=2), "there is no layer 2. Give 0 to less than 2"),
        (lambda: by_layer([TREE]), "1 layers are given, but the model has 2"),
        (lambda: by_head({"a": TREE}, [["a", "b"], ["a", "a"]]), "labels heads \\['b'\\]"),
        (lambda: by_head({"a": TREE}, [["a", "a"]]), "the profile has 1 layers, but the model has 2"),
        (lambda: by_head({"a": TREE}, [["a"], ["a"]]), "this model's 2 KV heads"),
    ],
)
def test_what_does_not_fit(tiny, make, says):
    with pytest.raises(PolicyError, match=says):
        kvjax.generate(tiny, PROMPT, policy=make(), max_new_tokens=4)


def test_by_head_holds_fewer_bytes(tiny):
    """Half of the heads at a tight budget hold about half of the bytes."""
    tight, ample = StreamingLLM(budget=31), StreamingLLM(budget=991)
    half = by_head({"tight": tight, "ample": ample}, [["tight", "ample"], ["ample", "tight"]])
    sizes = [policy.nbytes(tiny.config, 1, 2000, 100) for policy in (tight, half, ample)]
    assert sizes[1] == pytest.approx((sizes[0] + sizes[2]) / 2, rel=0.01)


def test_bytes_read_are_those_of_the_parts(tiny):
    """Of two layers with two heads each, one head of each kind in every layer."""
    full, clusters = Full(), ClusterKV(budget=32, dense_layers=0)
    shapes = tiny.config, 1, 2000, 100
    reads = {policy.info.name: policy.bytes_read(*shapes) for policy in (full, clusters)}
    assert reads["clusterkv"] < reads["full"] == full.nbytes(*shapes)
    layers = by_layer([full, clusters]).bytes_read(*shapes)
    heads = by_head({"full": full, "clusters": clusters}, [["full", "clusters"], ["clusters", "full"]])
    assert layers == sum(reads.values()) / 2
    assert heads.bytes_read(*shapes) == pytest.approx(sum(reads.values()) / 2, rel=0.01)
    assert offloaded(heads).bytes_read(*shapes) == heads.bytes_read(*shapes)
