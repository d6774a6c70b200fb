"""What people pass: numbers of every library, prompts of every kind, and clear words for all that is neither, before anything runs."""

import array
import gc
import operator
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.conversion import Tokenizer
from kvjax.models import Params, abstract
from kvjax.policies import PolicyError, get_policy, policies
from kvjax.runtime import decoding
from kvjax.runtime.program import Program
from kvjax.runtime.prompts import token_ids

IDS = [5, 9, 2, 7, 7, 1]
NEW = 12
"""Tokens generated wherever it does not matter, so that the tests share programs."""
TEXT = "fjchhb"
OPTIONS = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "seed": 3, "ignore_eos": True}
LIBRARIES = {
    "numpy": lambda x: np.asarray(x)[()],
    "numpy array": np.asarray,
    "jax": jnp.asarray,
}


@pytest.fixture(scope="module")
def compiled(letters: Params) -> kvjax.CompiledGenerator:
    return kvjax.aot_compile(letters, prompt_len=64, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def session(letters: Params) -> kvjax.Session:
    return kvjax.Session(letters, TEXT, max_new_tokens=32)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a program nor the tokenizer."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("arguments are checked first")

    for program in (decoding.prefill, decoding.decode, decoding.answer, decoding.extend):
        monkeypatch.setattr(program, "compiled", refuse)
    monkeypatch.setattr(Tokenizer, "encode", refuse)


def entries(letters: Params, compiled: kvjax.CompiledGenerator, session: kvjax.Session) -> dict:
    """Every way of asking for new tokens; each takes the options of `generate` that it has."""
    return {
        "generate": lambda **options: kvjax.generate(letters, TEXT, **options),
        "stream": lambda **options: "".join(kvjax.stream(letters, TEXT, **options)),
        "compiled": lambda **options: compiled.generate(letters, TEXT, **options),
        "session": lambda **options: session.fork().generate(**options),
        "question": lambda **options: session.ask([IDS], **options),
    }


WAYS = ["generate", "stream", "compiled", "session", "question"]


def bad_options() -> list:
    numbers = {
        "max_new_tokens": [1.5, 2.0, 0, -1, True, "3", None, np.float32(3), np.bool_(True), [3]],
        "seed": [1.5, True, None, "1", np.nan],
        "temperature": [np.nan, np.inf, -0.1, True, "1", None, np.float32(np.nan), [1.0]],
        "top_k": [0, 2.5, True, "2", np.nan],
        "top_p": [0.0, 1.1, np.nan, True, "0.5"],
        "min_p": [-0.1, 1.1, np.nan, np.inf, False],
        "stop": ["", [""], [5], 5, None, b"x", ["a", None]],
        "ignore_eos": ["no", None, 1],
    }
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in numbers.items() for value in values]


@pytest.mark.parametrize(("name", "value"), bad_options())
def test_every_way_of_asking_checks_alike(letters, compiled, session, nothing_runs, name, value):
    """One check for all, before anything is tokenised, compiled or run."""
    if name == "max_new_tokens" and value is None:
        ways = [way for way in WAYS if way != "compiled"]  # there it stands for all that there is room for
    elif name in ("max_new_tokens", "seed"):
        ways = WAYS
    else:
        ways = {"stop": ["generate", "stream", "compiled"]}.get(name, ["generate", "stream", "session", "question"])
    told = set()
    for way in ways:
        with pytest.raises(ValueError, match=rf"^{name}=.*; give ") as error:
            entries(letters, compiled, session)[way](**{name: value})
        told.add(str(error.value))
    assert len(told) == 1


@pytest.mark.parametrize("value", [0, -1, 2.5, True, None, np.nan, "8"])
def test_other_whole_numbers(letters, nothing_runs, value):
    calls = [
        ("batch", lambda: kvjax.aot_compile(letters, prompt_len=64, batch=value)),
        ("prompt_len", lambda: kvjax.aot_compile(letters, prompt_len=value)),
    ]
    if value is not None:  # which stands for no limit
        calls.append(("max_new_tokens", lambda: kvjax.Session(letters, TEXT, max_new_tokens=value)))
        calls.append(("prefill_block", lambda: kvjax.generate(letters, TEXT, "treekv", prefill_block=value)))
    for name, call in calls:
        with pytest.raises(ValueError, match=f"^{name}=.*; give a whole number, 1 or more"):
            call()


HUGE = [2**30 + 1, 2**31, 2**32, 2**63, 10**100]


@pytest.mark.parametrize("value", HUGE)
def test_huge_numbers_of_tokens_and_rows(letters, compiled, nothing_runs, value):
    for name, call in (
        ("max_new_tokens", lambda: kvjax.generate(letters, TEXT, max_new_tokens=value)),
        ("max_new_tokens", lambda: compiled.generate(letters, TEXT, max_new_tokens=value)),
        ("max_new_tokens", lambda: kvjax.Session(letters, TEXT, max_new_tokens=value)),
        ("max_new_tokens", lambda: kvjax.Engine(letters, prompt_len=64, max_new_tokens=value)),
        ("prompt_len", lambda: kvjax.aot_compile(letters, prompt_len=value)),
        ("batch", lambda: kvjax.aot_compile(letters, prompt_len=64, batch=value)),
        ("prefill_block", lambda: kvjax.generate(letters, TEXT, prefill_block=value)),
        ("block", lambda: kvjax.Engine(letters, prompt_len=64, block=value)),
    ):
        with pytest.raises(ValueError, match=rf"^{name}=.*; give a whole number from [01] to {2**30}$"):
            call()
    for policy, field in (("treekv", "budget"), ("full", "budget"), ("snapkv", "window"), ("chelsea", "every")):
        with pytest.raises(PolicyError, match=rf"^{policy}: {field}=.* Give .*{2**30}"):
            get_policy(policy, **{field: value})


@pytest.mark.parametrize(
    "make", [jax.random.key, lambda seed: [jax.random.key(seed)], lambda seed: jax.random.split(jax.random.key(seed))]
)
def test_seeds_are_whole_numbers_not_keys(tiny: Params, make: Callable) -> None:
    with pytest.raises(ValueError, match=r"seed.*random key.*give a "):
        kvjax.generate(tiny, [IDS], max_new_tokens=NEW, seed=make(3))
    with pytest.raises(PolicyError, match="Give a whole number"):
        get_policy("random", budget=16, seed=make(3))


def test_caches_larger_than_the_memory(letters, nothing_runs):
    """They are refused in a sentence, before anything is compiled or allocated."""
    for call in (
        lambda: kvjax.generate(letters, IDS, "full", max_new_tokens=2**29),
        lambda: kvjax.generate(letters, IDS, "snapkv:64", max_new_tokens=2**29),
        lambda: kvjax.Session(letters, IDS, max_new_tokens=2**29),
        lambda: kvjax.Engine(letters, prompt_len=0, max_new_tokens=2**29).begin(),
    ):
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(ValueError, match=r"a cache of .* by .* exceed the .* of memory here; give fewer tokens"),
        ):
            call()
    with pytest.raises(ValueError, match=f"are more tokens together than positions count; give {2**30} or fewer"):
        kvjax.Engine(letters, prompt_len=2**29, max_new_tokens=2**30)


def test_policies_are_checked_first(letters, nothing_runs):
    for call in (
        lambda: kvjax.generate(letters, TEXT, "no such policy"),
        lambda: kvjax.stream(letters, TEXT, "no such policy"),
        lambda: kvjax.aot_compile(letters, "no such policy", prompt_len=64),
        lambda: kvjax.Session(letters, TEXT, "no such policy"),
        lambda: kvjax.generate(letters, TEXT, "lagkv", 32, prefill_block=8),
    ):
        with pytest.raises(PolicyError, match=r"unknown policy|chunked prefill is not supported"):
            call()
    with pytest.raises(ValueError, match="dtype='text'; give a floating-point type"):
        kvjax.aot_compile(letters, prompt_len=64, dtype="text")


@pytest.mark.parametrize("library", LIBRARIES)
def test_numbers_of_every_library(letters, library):
    """They ask for the same, and so nothing is compiled again."""
    made = LIBRARIES[library]
    policy = kvjax.StreamingLLM(budget=16)
    plain = kvjax.generate(letters, TEXT, policy, max_new_tokens=NEW, **OPTIONS)
    piecewise = kvjax.generate(letters, TEXT, policy, max_new_tokens=NEW, prefill_block=2)
    programs = (decoding.prefill, decoding.decode, decoding.answer, decoding.extend)
    before = [len(program.executables) for program in programs]
    options = {name: value if name == "ignore_eos" else made(value) for name, value in OPTIONS.items()}
    new, two = made(NEW), made(2)
    again = kvjax.generate(letters, TEXT, "streaming_llm", made(16), max_new_tokens=new, **options)
    assert again.tokens == plain.tokens
    assert "".join(kvjax.stream(letters, TEXT, policy, max_new_tokens=new, **options)) == plain.text
    same = kvjax.generate(letters, TEXT, policy, max_new_tokens=new, prefill_block=two)
    assert same.tokens == piecewise.tokens
    assert [len(program.executables) for program in programs] == before
    talk = kvjax.Session(letters, TEXT, policy, max_new_tokens=made(16))
    assert len(talk.generate(max_new_tokens=new, **options).tokens) == NEW
    assert talk.remaining == 4
    assert kvjax.aot_compile(letters, policy, prompt_len=made(64), max_new_tokens=new).engine.max_new_tokens == NEW


@pytest.mark.parametrize("name", [name for name, cls in policies().items() if hasattr(cls, "budget")])
def test_budgets_of_every_library(name):
    plain = get_policy(name, budget=128), get_policy(name, budget=0.25)
    for made in LIBRARIES.values():
        whole, share = get_policy(name, budget=made(128)), get_policy(name, budget=made(0.25))
        assert (whole, share) == plain
        assert (hash(whole), hash(share)) == tuple(map(hash, plain))
        assert (type(whole.budget), type(share.budget)) == (int, float)
    for budget in (True, np.nan, np.inf, np.float32(np.nan), np.asarray([64]), "64", 0, -0.5):
        with pytest.raises(PolicyError, match="budget="):
            get_policy(name, budget=budget)


def test_other_hyperparameters_are_numbers_too():
    assert get_policy("snapkv", budget=64, window=np.int64(8)) == get_policy("snapkv", budget=64, window=8)
    assert hash(get_policy("chelsea", alpha=jnp.asarray(0.5))) == hash(get_policy("chelsea", alpha=0.5))
    for name, field, value in (
        ("snapkv", "window", True),
        ("snapkv", "window", 8.5),
        ("snapkv", "window", "8"),
        ("streaming_llm", "sinks", np.nan),
        ("chelsea", "alpha", np.nan),
        ("chelsea", "alpha", np.inf),
        ("chelsea", "alpha", True),
    ):
        with pytest.raises(PolicyError, match=f"{field}=.* is not valid. Give a (whole )?number"):
            get_policy(name, **{field: value})


def test_seeds_of_any_size(letters, compiled):
    """Negative and huge seeds count modulo 2**32, in every way of asking and in every row."""
    draw = {"temperature": 1.0, "ignore_eos": True}
    sampled = kvjax.aot_compile(letters, prompt_len=64, max_new_tokens=NEW, **draw)
    talk = kvjax.Session(letters, TEXT, max_new_tokens=32)
    ways = (
        lambda seed: kvjax.generate(letters, TEXT, max_new_tokens=NEW, seed=seed, **draw).tokens,
        lambda seed: "".join(kvjax.stream(letters, TEXT, max_new_tokens=NEW, seed=seed, **draw)),
        lambda seed: sampled.generate(letters, TEXT, seed=seed).tokens,
        lambda seed: talk.fork().generate(max_new_tokens=NEW, seed=seed, **draw).tokens,
    )
    for way in ways:
        assert way(-1) == way(2**32 - 1) == way(2**70 - 1) != way(1)
        assert way(0) == way(2**32)
    rows = kvjax.generate(letters, [TEXT, TEXT], max_new_tokens=NEW, seed=-1, **draw)
    assert [row.tokens for row in rows] == [ways[0](-1), ways[0](0)]


def test_extreme_temperatures_and_filters(letters):
    def drawn(**options: float) -> list[int]:
        return kvjax.generate(letters, TEXT, max_new_tokens=NEW, ignore_eos=True, **options).tokens

    for temperature in (1e-6, 1e-7, 1e-46, 1e-300):
        assert drawn(temperature=temperature) == drawn()
    assert drawn(temperature=10**300) == drawn(temperature=float(np.finfo(np.float32).max)) != drawn()
    assert drawn(temperature=1, top_k=2**70) == drawn(temperature=1, top_k=64) != drawn(temperature=1, top_k=1)


@pytest.mark.parametrize(
    "params", ["model", "/a/path", None, {}, 5, object(), kvjax.generate], ids=lambda params: type(params).__name__
)
def test_what_is_no_model(params):
    for call in (
        lambda: kvjax.generate(params, TEXT),
        lambda: kvjax.stream(params, TEXT),
        lambda: kvjax.Session(params, TEXT),
        lambda: kvjax.aot_compile(params, prompt_len=64),
    ):
        with pytest.raises(ValueError, match=r"give a model's weights, such as kvjax\.load\(\.\.\.\) returns"):
            call()


def test_shapes_are_no_weights(letters, compiled):
    shapes = abstract(letters.config)
    for call in (lambda: kvjax.generate(shapes, IDS), lambda: compiled.generate(shapes, IDS)):
        with pytest.raises(ValueError, match=r"params are shapes without weights; give weights"):
            call()
    with pytest.raises(ValueError, match=r"params is 'x' \(str\)"):
        compiled.generate("x", IDS)


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(IDS),
        range(5, 11),
        np.asarray(IDS),
        np.asarray(IDS, np.uint8),
        jnp.asarray(IDS),
        array.array("i", IDS),
        [np.int64(i) for i in IDS],
        [jnp.asarray(i) for i in IDS],
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_token_ids_of_every_kind(letters, prompt):
    want = list(prompt) if isinstance(prompt, range) else IDS
    assert token_ids(letters, prompt) == ([want], True)
    assert token_ids(letters, [prompt, TEXT]) == ([want, IDS], False)


def test_arrays_of_two_dimensions_are_batches(letters):
    batch = [[5, 9, 2], [7, 7, 1]]
    want = [row.tokens for row in kvjax.generate(letters, batch, max_new_tokens=NEW)]
    for made in (np.asarray, jnp.asarray, tuple):
        assert [row.tokens for row in kvjax.generate(letters, made(batch), max_new_tokens=NEW)] == want
    asked = kvjax.generate(letters, np.asarray(batch), question=np.asarray([[1], [2]]), max_new_tokens=NEW)
    assert len(asked) == 2


LONE = "ok \ud83d then"
ODD = {
    "bytes": (b"fjc", r"prompt is b'fjc' \(bytes\); .*bytes are decoded to text first"),
    "bytearray": (bytearray(b"fjc"), "bytes are decoded"),
    "memoryview": (memoryview(b"fjc"), "bytes are decoded"),
    "bytes in a list": ([b"fjc", "fjc"], r"prompt 1 of 2 is b'fjc' \(bytes\)"),
    "nothing": (None, r"prompt is None \(NoneType\)"),
    "no items": ([], "non-empty list"),
    "no text": ("", "a prompt is empty"),
    "an empty row": ([[5], []], r"prompt 2 of 2 is \[\] \(list\)"),
    "one number": (5, r"prompt is 5 \(int\)"),
    "a fraction": (0.5, r"prompt is 0\.5 \(float\)"),
    "fractions": ([0.5, 1.5], r"prompt 1 of 2 is 0\.5 \(float\)"),
    "numbers and text": ([5, "fjc"], r"prompt 1 of 2 is 5 \(int\)"),
    "text and nothing": (["fjc", None], r"prompt 2 of 2 is None \(NoneType\)"),
    "true and false": ([True, False], r"prompt 1 of 2 is True \(bool\)"),
    "a set": ({5, 9}, r"\(set\)"),
    "a dictionary": ({"role": "user", "content": "fj"}, "a chat is a list of messages"),
    "a generator": ((i for i in IDS), "put them in a list"),
    "lists in lists in lists": ([[[5, 9]]], r"prompt 1 of 1 is \[\[5, 9\]\] \(list\)"),
    "a huge id": ([2**70], f"token id {2**70} is outside this model's vocabulary of 64"),
    "a huge id after others": ([5, 2**70, -1], f"token id {2**70} is outside this model's vocabulary of 64"),
    "an id outside in the middle": (
        [5] * 30 + [64, -1] + [5] * 30,
        "token id 64 is outside this model's vocabulary of 64",
    ),
    "an id outside at the end": ([5] * 60 + [-7], "token id -7 is outside this model's vocabulary of 64"),
    "an id outside in an array": (
        np.asarray([5, 9, 200, 64], np.uint8),
        "token id 200 is outside this model's vocabulary",
    ),
    "a huge id in an array": (
        np.asarray([5, 2**63], np.uint64),
        f"token id {2**63} is outside this model's vocabulary",
    ),
    "true among ids": ([5, 9, True], r"prompt 1 of 3 is 5 \(int\)"),
    "a negative id": ([-1, 5], "token id -1 is outside this model's vocabulary of 64"),
    "no dimensions": (np.asarray(5), r"prompt is array\(5\) \(ndarray\)"),
    "three dimensions": (np.zeros((1, 2, 3), int), r"prompt is an array of shape \(1, 2, 3\) and type int64"),
    "an array of fractions": (np.asarray([5.0]), r"an array of shape \(1,\) and type float64"),
    "an array of text": (np.asarray(["fjc"]), r"an array of shape \(1,\)"),
    "a batch of fractions": (jnp.ones((2, 3)), r"prompts 1 and 2 of 2 are an array of shape \(3,\) and type float32"),
    "truths": (np.asarray([True]), r"an array of shape \(1,\) and type bool"),
    "an empty array": (np.zeros(0, int), r"an array of shape \(0,\)"),
    "half a character": (LONE, r"half of a surrogate pair, '\\ud83d', as character 3"),
    "no role": ([{"content": "fj"}], "a chat message is .*the role as text"),
    "a role of another kind": ([{"role": 5, "content": "fj"}], "the role as text"),
    "no content": ([{"role": "user"}], r"the content of a chat message is None \(NoneType\)"),
    "content of another kind": ([{"role": "user", "content": 5}], r"chat message is 5 \(int\)"),
    "content in parts": ([{"role": "user", "content": [{"type": "text"}]}], r"part 1 of a chat message is .*; give \{"),
    "half a character in a chat": ([{"role": "user", "content": LONE}], "half of a surrogate pair"),
    "a message among texts": (["fj", {"role": "user", "content": "fj"}], r"prompt 2 of 2 is .*\(dict\)"),
}


@pytest.mark.parametrize(("prompt", "says"), ODD.values(), ids=ODD)
def test_what_is_no_prompt(letters, compiled, monkeypatch, prompt, says):
    """Told by value and kind, with what is allowed, before anything runs."""

    def refuse(*args: object) -> None:
        raise AssertionError("prompts are checked first")

    for program in (decoding.prefill, decoding.decode):
        monkeypatch.setattr(program, "compiled", refuse)
    for call in (kvjax.generate, kvjax.stream, compiled.generate, kvjax.Session):
        with pytest.raises(ValueError, match=says) as error:
            call(letters, prompt)
        assert len(str(error.value)) < 300


def test_kinds_are_known_before_anything_is_tokenised(letters, nothing_runs):
    with pytest.raises(ValueError, match="prompt 3 of 3 is None"):
        kvjax.generate(letters, ["long text", "another", None])
    with pytest.raises(ValueError, match="prompt is a list of 2; give one prompt"):
        kvjax.stream(letters, ["long text", "another"])
    with pytest.raises(ValueError, match="prompt is a list of 2; give one prompt"):
        kvjax.Session(letters, ["long text", "another"])


@pytest.mark.parametrize("questions", ["why?", b"why?", 5, None])
def test_what_is_no_list_of_questions(session, questions):
    with pytest.raises(ValueError, match="give a list of questions"):
        session.ask(questions)


def test_all_questions_are_checked_first(letters, session, nothing_runs):
    says = r"^question 2 of 4 is 5 \(int\); give text or token ids; question 3 of 4: token id 99 is outside"
    with pytest.raises(ValueError, match=says):
        session.ask([[1, 2], 5, [99], "why?"])
    with pytest.raises(ValueError, match=says):
        kvjax.generate(letters, [IDS] * 4, question=[[1, 2], 5, [99], "why?"])


def test_all_invalid_prompts_of_a_list_are_named(letters, compiled, nothing_runs):
    """By numbers, those with the same fault together, before anything is tokenised, compiled or run."""
    prompts = [IDS, [], [99], "text", None, [-1, 5], [], [2**70], [99]]
    says = (
        r"^prompts 2 and 7 of 9 are \[\] \(list\); give text, token ids or chat messages; "
        r"prompts 3 and 9 of 9: token id 99 is outside this model's vocabulary of 64; "
        r"prompt 5 of 9 is None \(NoneType\); give .*; "
        r"prompt 6 of 9: token id -1 .*; prompt 8 of 9: token id 1180591620717411303424 .*$"
    )
    for call in (kvjax.generate, compiled.generate, kvjax.stream, kvjax.Session):
        with pytest.raises(ValueError, match=says):
            call(letters, prompts)
    with pytest.raises(ValueError, match=r"prompts 2, 4 and 6 of 6 are \[\]"):
        kvjax.generate(letters, [IDS, []] * 3)
    with pytest.raises(ValueError, match=r"prompt 8 of 10: token id 77 .*; prompt 9 of 10 as well$"):
        kvjax.generate(letters, [[70 + i] for i in range(9)] + [[5]])


def test_prompts_that_are_too_long_are_named(letters, compiled, monkeypatch):
    monkeypatch.setattr(decoding.prefill, "compiled", None)
    prompts = ["a" * 65, "b", [5] * 70, [64], ""]
    with pytest.raises(
        ValueError,
        match=r"^prompt 1 of 5: a prompt has 65 tokens, but the programs take 64; compile for longer ones; "
        r"prompt 3 of 5: a prompt has 70 .*; prompt 4 of 5: token id 64 .*; prompt 5 of 5: a prompt is empty; give at least one token$",
    ):
        compiled.generate(letters, prompts)
    says = r"^prompt 1 of 4: a prompt is empty.*; prompt 2 of 4: text has half of .*; prompt 3 of 4: a chat message .*; prompt 4 of 4 is None"
    with pytest.raises(ValueError, match=says):
        kvjax.generate(letters, ["", "\ud800", [{"role": 1}], None])
    with pytest.raises(
        ValueError, match=r"^a prompt has 65 tokens, but the programs take 64; compile for longer ones$"
    ):
        compiled.generate(letters, "a" * 65)


def test_prompts_that_a_policy_cannot_serve_are_named(tiny, monkeypatch):
    monkeypatch.setattr(decoding.prefill, "compiled", None)
    with pytest.raises(PolicyError, match=r"^prompts 1 and 3 of 3: treekv: a budget of 0.01 gives 2 slots, but"):
        kvjax.generate(tiny, [[5] * 200, [5] * 1200, [7] * 200], "treekv", 0.01, max_new_tokens=8)


@pytest.mark.parametrize("given", [IDS, tuple(IDS), np.asarray(IDS, np.uint8), jnp.asarray(IDS)], ids=repr)
def test_token_ids_are_a_list_and_an_array(tiny, given):
    """They stay as they are if what was passed changes."""
    (ids,), one = token_ids(tiny, given)
    if isinstance(given, np.ndarray):
        given[0] = 6
    assert one
    assert (ids, list(ids), len(ids), repr(ids)) == (IDS, IDS, len(IDS), repr(IDS))
    assert (ids[1], ids[-2:], ids[::2], ids[:0]) == (9, [7, 1], [5, 2, 7], [])
    assert (operator.add(ids, [3]), operator.add([3], ids), list(reversed(ids))) == ([*IDS, 3], [3, *IDS], IDS[::-1])
    assert {type(i) for i in [*ids, ids[0], *ids[:2]]} == {int}
    assert ids == token_ids(tiny, [IDS])[0][0] != token_ids(tiny, IDS[:2])[0][0]
    assert np.asarray(ids).tolist() == IDS
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(ids)[0] = 3


class BrokenOff(Program):
    """A program that is broken off before it runs or after."""

    def __init__(self, program: Program, after: bool, kind: type[BaseException]) -> None:
        self.program, self.after, self.kind = program, after, kind
        self.compile_seconds = 0.0

    def ready(self, *args: object) -> Callable[[], None]:
        return lambda: self(*args)

    def __call__(self, *args: object) -> None:
        if self.after:
            self.program(*args)
        raise self.kind


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_what_is_broken_off_leaves_nothing_behind(letters, monkeypatch, kind):
    """Whatever program breaks off, the next call does as if nothing had been."""
    call = lambda: "".join(kvjax.stream(letters, TEXT, max_new_tokens=NEW, ignore_eos=True))  # noqa: E731
    want = call()
    gc.collect()
    held = len(jax.live_arrays())
    for program, name in ((decoding.prefill, "prefill"), (decoding.decode, "decode")):
        for after in (False, True):
            monkeypatch.setattr(decoding, name, BrokenOff(program, after, kind))
            with pytest.raises(kind):
                call()
            monkeypatch.setattr(decoding, name, program)
            gc.collect()
            assert len(jax.live_arrays()) == held
            assert call() == want


def test_a_stream_that_is_left_frees_its_cache(letters):
    gc.collect()
    held = len(jax.live_arrays())
    stream = kvjax.stream(letters, TEXT, max_new_tokens=NEW, ignore_eos=True)
    next(stream)
    assert len(jax.live_arrays()) > held
    stream.close()
    gc.collect()
    assert len(jax.live_arrays()) == held


def test_what_is_printed_is_short(letters, compiled):
    stats = kvjax.generate(letters, TEXT, max_new_tokens=NEW).stats
    result = kvjax.Generation("so it goes", list(range(500)), [-1.25] * 500, "length", stats)
    assert repr(result) == (
        "Generation(text='so it goes', tokens=[0, 1, 2, 3, 4, 5, … 500 in all], "
        "logprobs=[-1.25, -1.25, -1.25, -1.25, -1.25, -1.25, … 500 in all], stop_reason='length', "
        f"stats={stats!r})"
    )
    short = kvjax.Reply("ab", [0, 1], [-0.5, -1.0], "eos")
    assert repr(short) == "Reply(text='ab', tokens=[0, 1], logprobs=[-0.5, -1.0], stop_reason='eos')"
    talk = kvjax.Session(letters, TEXT, "streaming_llm", 16, max_new_tokens=16)
    for thing, parts in (
        (
            compiled,
            ["CompiledGenerator(llama", "policy=Full()", "batch=1, prompt_len=64, max_new_tokens=12", "memory=Memory("],
        ),
        (talk, ["Session(llama", "policy=StreamingLLM(budget=16", "6 tokens", "room for 16", "bytes"]),
    ):
        assert all(part in repr(thing) for part in parts), repr(thing)
        assert repr(thing).count("\n") < 5
        assert len(repr(thing)) < 800
