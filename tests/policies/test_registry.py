"""Policies by name: as people write them, and with a budget whether they have one or not."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies import driver

import kvjax
from kvjax.cache import layer_specs
from kvjax.policies import (
    H2O,
    TOVA,
    CacheLayer,
    ChunkKV,
    Full,
    KNorm,
    Policy,
    PolicyError,
    PolicyInfo,
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
    prompt_only,
    pyramid,
    quantized,
    recompress,
    register,
    thresholded,
)

PROMPT, OPTIONS = [[5, 9, 2, 7, 7, 1] * 9], {"max_new_tokens": 3, "ignore_eos": True}


@pytest.mark.parametrize("name", policies())
def test_case_and_hyphens_do_not_matter(name):
    cls = policies()[name]
    for written in (name, name.upper(), name.replace("_", "-").title(), cls.__name__):
        assert type(get_policy(written)) is cls


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("treekvv", "treekv"),
        ("Tree", "treekv"),
        ("STREAMING", "streaming_llm"),
        ("h20", "h2o"),
        ("snap-kvs", "snapkv"),
        ("duo", "duoattention"),
        ("chelsae", "chelsea"),
        ("ExpectedAttn", "expected_attention"),
        ("infinitygen", "infinigen"),
    ],
)
def test_near_misses_are_told(written, meant):
    with pytest.raises(
        PolicyError, match=rf"unknown policy '{written}'. Known policies: adakv, .*Did you mean '{meant}'\?"
    ):
        get_policy(written)


@pytest.mark.parametrize("written", ["", "zzz"])
def test_what_is_like_nothing_is_told_without_a_guess(written):
    with pytest.raises(PolicyError, match=r"unknown policy .*turboquant, vase\.$"):
        get_policy(written)


@pytest.mark.parametrize("name", ["AAA", "zzz"])
def test_a_name_is_of_one_class(name):
    other = type(name, (Full,), {})
    with pytest.raises(PolicyError, match=rf"{name}.about.name = 'full' is empty or already registered"):
        register(other)
    assert register(Full) is policies()["full"] is Full


def test_what_is_said_of_a_policy_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Full.about.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
    assert len({cls.about for cls in policies().values()}) == len(policies())


@pytest.mark.parametrize("policy", ["full", "kivi", Full(), quantized(Full()), offloaded(Full())], ids=str)
def test_a_budget_is_taken_by_policies_that_have_none(policy):
    plain = get_policy(policy)
    assert get_policy(policy, budget=64) == get_policy(policy, budget=0.2) == plain
    with pytest.raises(PolicyError, match=r"budget=-3 is not valid\. Give a positive"):
        get_policy(policy, budget=-3)


def test_a_budget_goes_to_the_parts_that_take_one():
    heads = [["a", "b"]] * 2
    for policy, expected in (
        (by_layer([Full(), TreeKV()]), by_layer([Full(), TreeKV(budget=64)])),
        (by_head({"a": Full(), "b": H2O()}, heads), by_head({"a": Full(), "b": H2O(budget=64)}, heads)),
        (quantized(ChunkKV()), quantized(ChunkKV(budget=64))),
        (offloaded(StreamingLLM()), offloaded(StreamingLLM(budget=64))),
        (chunkkv(SnapKV()), chunkkv(SnapKV(budget=64))),
        (critical(SnapKV()), critical(SnapKV(budget=64))),
        (pyramid(recompress(SnapKV(), 8)), pyramid(recompress(SnapKV(budget=64), 8))),
        (prompt_only(by_layer([TOVA(), TOVA()])), prompt_only(by_layer([TOVA(budget=64)] * 2))),
        (quantized(Full()), quantized(Full())),
    ):
        assert get_policy(policy, budget=64) == get_policy(str(policy), budget=64) == expected
    assert get_policy("quantized(snapkv; bits=4; budget=64)") == quantized(SnapKV(budget=64), bits=4)
    with pytest.raises(PolicyError, match=r"budget=-3"):
        get_policy(by_layer([Full(), TreeKV()]), budget=-3)


def test_which_policies_have_a_budget():
    assert {name for name in policies() if not get_policy(name).info.takes_budget} == {
        "fp8",
        "full",
        "kivi",
        "turboquant",
    }


@pytest.mark.parametrize(("policy", "applies"), [("full", False), ("KIVI", False), ("Streaming-LLM", True)])
def test_stats_say_whether_the_budget_applies(tiny, policy, applies):
    """One sweep over all of them needs no exception."""
    got, plain = (kvjax.generate(tiny, PROMPT, policy=policy, budget=budget, **OPTIONS)[0] for budget in (24, None))
    assert got.stats.budget_applies == plain.stats.budget_applies == applies
    assert applies or got.tokens == plain.tokens


NUMBERS = [
    (np.int64(300), 300),
    (np.uint8(200), 200),
    (np.asarray(300), 300),
    (jnp.int32(300), 300),
    (np.float64(0.2), 0.2),
    (np.float32(0.2), 0.2),
    (np.float16(0.2), 0.2),
    (jnp.float32(0.2), 0.2),
]


@pytest.mark.parametrize("name", policies())
def test_a_budget_may_be_any_librarys_number(name):
    """Of fewer bits, too, in which 0.2 is another number."""
    for given, plain in NUMBERS:
        assert get_policy(name, budget=given) == get_policy(name, budget=plain)


@pytest.mark.parametrize(
    "transform",
    [
        recompress(SnapKV()),
        thresholded(KNorm(), -1),
        prompt_only(TOVA()),
    ],
    ids=str,
)
def test_so_may_that_of_a_transform(transform):
    for given, plain in NUMBERS:
        assert get_policy(transform, budget=given) == get_policy(transform, budget=plain)


@dataclasses.dataclass(frozen=True)
class Whole(Policy):
    """A policy of somebody's own, for numbers of tokens."""

    about: ClassVar[PolicyInfo] = PolicyInfo("whole")

    budget: int = 512


@dataclasses.dataclass(frozen=True)
class Careless(Policy):
    """Another one, which takes fractions and does not compute with them."""

    about: ClassVar[PolicyInfo] = PolicyInfo("careless")

    budget: int | float = 512

    def layer(self, spec):
        return CarelessLayer(self, spec)


@dataclasses.dataclass(frozen=True)
class CarelessLayer(CacheLayer[Careless]):
    @property
    def max_kept(self) -> Any:
        return self.policy.budget


def test_ones_own_policy_is_checked_as_it_is_declared():
    assert Whole(budget=np.int64(64)) == Whole(budget=64)
    assert isinstance(Whole(budget=np.int64(64)).budget, int)
    with pytest.raises(PolicyError, match=r"whole: budget=0\.5 is not valid\. Give a whole number"):
        get_policy(Whole(), budget=0.5)
    with pytest.raises(PolicyError, match=r"whole: budget=-1 is not valid\. Give a positive whole number"):
        Whole(budget=-1)


def test_the_invariants_leave_out_fractions_that_a_policy_refuses(monkeypatch):
    monkeypatch.setattr(driver, "policies", lambda: {"whole": Whole})
    monkeypatch.setattr(driver, "get_policy", lambda _, **options: Whole(**options))
    assert driver._every_policy.__wrapped__(0.5, float) == ()
    assert driver._every_policy.__wrapped__(16, int) == (Whole(budget=16),)


def test_a_fraction_of_slots_is_refused_with_what_to_do(tiny):
    spec = layer_specs(tiny.config, 1, 64, 8, tiny.dtype)[0]
    with pytest.raises(PolicyError, match=r"careless: max_kept=0\.5 is not a whole number.*budget_tokens"):
        jax.eval_shape(Careless(budget=0.5).layer(spec).init)


def test_one_may_declare_a_policy_by_names_of_a_function():
    class Kind:
        pass

    @dataclasses.dataclass(frozen=True)
    class Local(Policy):
        about: ClassVar[PolicyInfo] = PolicyInfo("local")

        kind: "Kind | None" = None

    assert Local().kind is None
