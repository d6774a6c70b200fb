"""Policies written as text."""

import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from policies.random_cases import draw_policy

from kvjax.policies import (
    H2O,
    KIVI,
    TOVA,
    CateKV,
    ChunkKV,
    ClusterKV,
    Full,
    KNorm,
    Policy,
    PolicyError,
    PromptOnly,
    Quantized,
    Quest,
    SnapKV,
    TreeKV,
    by_head,
    by_layer,
    chunkkv,
    critical,
    get_policy,
    offloaded,
    policies,
    policy_class,
    prompt_only,
    quantized,
    recompress,
    then,
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
    "chunkkv(snapkv:64; chunk=10; spiky=4)": chunkkv(SnapKV(budget=64), chunk=10, spiky=4),
    "critical(snapkv:64; share=0.25)": critical(SnapKV(budget=64), share=0.25),
    "recompress(snapkv:64; every=8)": recompress(SnapKV(budget=64), every=8),
    "recompress(h2o:observers=last,budget=64; prompt=keep)": recompress(
        H2O(budget=64, observers="last"), prompt="keep"
    ),
    "then(snapkv:64; quest:32,page=8)": then(SnapKV(budget=64), Quest(budget=32, page=8)),
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
        ("offloaded(treekv", r"Close it with"),
        ("offloaded()", r"has no policy. Write one, as in offloaded\(full\)"),
        (
            "offload(treekv)",
            r"unknown transform 'offload'.*Known transforms: chunkkv, critical, offloaded, quantized, prompt_only, pyramid, recompress, thresholded, then, by_layer, by_head",
        ),
        ("then(snapkv)", r"then takes two policies. Write them as in then\(snapkv:0.25; quest:256\)"),
        ("by_head(a=full)", r"profile is missing. Give profile="),
        ("offloaded(treekvv)", r"unknown policy 'treekvv'.*Did you mean 'treekv'"),
        (
            "duoattention:profile=(1,(1,))",
            r"profile=\(1, \(1,\)\) is not valid. Give a HeadProfile, its path, or labels",
        ),
        ("catekv:profile=('adaptive',)", r"profile=\('adaptive',\) is not valid"),
        ("catekv:profile=()", r"profile=\(\) is not valid"),
        ("kivi:4", r"'kivi:4': kivi has no budget that '4' could set. Write NAME=VALUE, with bits, group, residual"),
        ("full:64", r"'full:64': full has no budget that '64' could set. It takes no hyperparameters"),
        ("turboquant:budget=64", r"policy 'turboquant' has no hyperparameter 'budget'"),
        ("quantized(snapkv:64; 4)", r"quantized has no budget that '4' could set. Write NAME=VALUE, with bits, group"),
        (
            "quantized(snapkv:64, 4)",
            r"'4': write NAME=VALUE. Settings of quantized follow a semicolon: quantized\(POLICY; N",
        ),
        ("critical(snapkv:64; 0.5)", r"critical has no budget that '0.5' could set"),
        ("offloaded(treekv; policy=full)", r"policy 'offloaded' has no hyperparameter 'policy'"),
        ("quantized(full; bit=4)", r"policy 'quantized' has no hyperparameter 'bit'.*Did you mean 'bits'"),
        ("treekv)", r"'\)' closes no bracket"),
        ("treekv]", r"'\]' closes no bracket"),
        ("full;", r"unknown policy 'full;'"),
        ("by_layer(full))", r"'\)' closes no bracket"),
        ("by_layer(full;)", r"nothing on one side of a semicolon"),
        ("by_layer()", r"has no policy. Write one, as in by_layer\(full\)"),
        ("by_layer(full) treekv", r"there is text after the closing bracket"),
        ("by_layer(full);treekv", r"there is text after the closing bracket"),
        ("treekv:", r"a setting is empty"),
        ("treekv:64,", r"a setting is empty"),
        ("treekv:64,budget=32", r"budget is given twice"),
        ("catekv:adaptive=(quest:64)(full)", r"closes no bracket"),
        ("catekv:profile='x", r"a quote is open. Close it with '"),
        ("by_head(a=full; a=treekv; profile=(('a',),))", r"LABEL=POLICY once for each label"),
        ("by_head(a=full; treekv; profile=(('a',),))", r"'treekv' is not valid. Write LABEL=POLICY"),
        ("by_head(a=full; profile=a)", r"by_head is malformed.*by_head\(a=full"),
        ("by_head(a=full; profile=(1, 2))", r"by_head is malformed.*by_head\(a=full"),
        ("by_head(profile=())", r"by_head is malformed.*by_head\(a=full"),
        ("offloaded(" * 2000 + "full" + ")" * 2000, r"brackets are nested more than 32 deep"),
        ("clusterkv:seed=" + "(" * 2000, r"brackets are nested more than 32 deep"),
    ],
)
def test_what_is_no_policy(text, says):
    with pytest.raises(PolicyError, match=says):
        parse_policy(text)


NUMBER = r"[+-]?[0-9]+"
SHARE = r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)"
POLICIES = {
    "full": (Full, {}),
    "treekv": (TreeKV, {"budget": f"{NUMBER}|{SHARE}", "sinks": NUMBER}),
    "kivi": (KIVI, {"bits": "[248]"}),
}
TRANSFORMS = {
    "quantized": (Quantized, {"bits": "[248]", "budget": f"{NUMBER}|{SHARE}"}),
    "prompt_only": (PromptOnly, {"budget": f"{NUMBER}|{SHARE}"}),
}


def read(text: str) -> Policy | None:
    """The grammar once more, for a few names: the policy that a text says, or None if it says none."""
    text = text.strip(" ")
    transform = re.fullmatch(r"(quantized|prompt_only|by_layer) *\((.*)\)", text)
    if transform:
        name, parts = transform[1], outside(transform[2], ";")
        if name == "by_layer":
            layers = [read(part) for part in parts]
            return None if None in layers else by_layer(layers)
        cls, fields = TRANSFORMS[name]
        inner, options = read(parts[0]), settings(fields, parts[1:], bare=False)
        if inner is None or options is None:
            return None
        if (budget := options.pop("budget", None)) is not None:
            inner = made(inner.with_budget, budget=budget)
        return None if inner is None else made(cls, policy=inner, **options)
    name, colon, rest = text.partition(":")
    plain = re.sub("[ -]", "", name)
    if not re.fullmatch("[a-z]+", plain) or plain not in POLICIES:
        return None
    cls, fields = POLICIES[plain]
    options = settings(fields, rest.split(",")) if colon else {}
    return None if options is None else made(cls, **options)


def settings(fields: dict[str, str], parts: list[str], bare: bool = True) -> dict[str, int | float] | None:
    """The settings that are written in parts, or None if one is wrong, or there twice. The first may be a budget without its name if `bare`."""
    found = {}
    for i, part in enumerate(parts):
        name, value = re.fullmatch(
            r"(?: *([a-z]+) *= *)?(.*?) *", "budget=" + part.lstrip() if bare and not i and "=" not in part else part
        ).groups()
        if name not in fields or name in found or not re.fullmatch(fields[name], value):
            return None
        found[name] = float(value) if "." in value else int(value)
    return found


def outside(text: str, at: str) -> list[str]:
    """The parts of a text between separators outside of round brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        parts = [*parts, ""] if letter == at and not depth else [*parts[:-1], parts[-1] + letter]
    return parts


def made(make: Callable[..., Policy], **options: object) -> Policy | None:
    try:
        return make(**options)
    except PolicyError:
        return None


setting = st.sampled_from(["64", "0.5", "4", "budget=32", "sinks=2", "bits=4", "bits = 8", "budget=.25"])
single = st.builds(
    lambda name, rest: name + (":" + ",".join(rest) if rest else ""),
    st.sampled_from([*POLICIES, "tree-kv", "full "]),
    st.lists(setting, max_size=2),
)
written = st.recursive(
    single,
    lambda inner: st.builds(
        lambda name, parts, more: f"{name}({'; '.join([*parts, *more])})",
        st.sampled_from([*TRANSFORMS, "by_layer"]),
        st.lists(inner, min_size=1, max_size=2),
        st.lists(setting, max_size=1),
    ),
    max_leaves=3,
)


@st.composite
def damaged(draw):
    """A text in which up to three letters are taken out, put in or doubled."""
    text = draw(written)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        end = draw(st.sampled_from([at, at + 1]))
        text = text[:at] + draw(st.sampled_from([*";:,()[]{}='\". 04-", "", text[at : at + 1] * 2])) + text[end:]
    return text


@given(damaged())
@example("by_layer(full);by_layer(full)")
@example("by_layer(full);(full)")
@example("prompt_only(treekv:8; budget=16)")
@example("quantized(full; )")
@example("treekv: 64 , sinks = 2 ")
def test_a_text_is_read_as_the_grammar_says_or_refused(text):
    meant = read(text)
    if meant is None:
        with pytest.raises(PolicyError) as refusal:
            parse_policy(text)
        assert repr(text.strip()) in str(refusal.value)
        assert "\n" not in str(refusal.value)
    else:
        assert parse_policy(text) == meant


@pytest.mark.parametrize("text", ["treekv)", "full;", "tree:kv", "", " "])
def test_names_are_letters_and_digits(text):
    with pytest.raises(PolicyError, match="unknown policy"):
        policy_class(text)
