"""The engine: sizes that few programs serve, budgets that count each row's own tokens, and clear refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models import abstract, init
from kvjax.policies import PyramidKV
from kvjax.runtime import decoding
from kvjax.runtime.engine import Engine
from kvjax.runtime.program import Program

PROMPTS = [list(range(40)), [3, 1, 4, 1, 5]]
PROGRAMS = decoding.prefill, decoding.decode, decoding.answer, decoding.extend


def compiled() -> int:
    return sum(len(program.executables) for program in PROGRAMS)


def test_a_sweep_over_lengths_and_settings_compiles_two_programs(tiny):
    """Prompts of a bucket, new tokens of a bucket, temperatures, filters' numbers, and whether end tokens end a row."""

    def ask(prompt, new, **options):
        kvjax.generate(tiny, PROMPTS[0][:prompt], "treekv:0.5", max_new_tokens=new, **options)

    ask(33, 9, temperature=0.5, top_p=0.9)
    before = compiled()
    for prompt, new, temperature, top_p in ((40, 12, 0.5, 0.9), (35, 10, 2.0, 0.1), (38, 11, 0.1, 1.0)):
        for ignore_eos in (True, False):
            ask(prompt, new, temperature=temperature, top_p=top_p, ignore_eos=ignore_eos, seed=prompt)
    assert compiled() == before


@pytest.mark.parametrize("policy", ["treekv:0.4,sinks=1", "streaming_llm:0.4,sinks=1", "snapkv:0.4,window=2"])
def test_fractional_budgets_count_a_rows_own_tokens(tiny, policy):
    """Whatever the sizes are rounded up to, and whatever else is in the batch: a share of 5 + 9 tokens and of 40 + 10."""
    room = Engine(tiny, policy, batch=2, prompt_len=90, max_new_tokens=70)
    state, _ = room.prefill(PROMPTS, [10, 9])
    for row, (prompt, new) in enumerate(zip(PROMPTS, (10, 9), strict=True)):
        alone = Engine(tiny, policy, prompt_len=len(prompt), max_new_tokens=new)
        own, _ = alone.prefill([prompt])
        for layer, other, mine, theirs in zip(alone.layers, room.layers, own.caches, state.caches, strict=True):
            mine, theirs = getattr(mine, "cache", mine), getattr(theirs, "cache", theirs)
            assert other.capacity > layer.capacity
            held = [np.sort(np.asarray(c.pos)[r][np.asarray(c.live)[r]]) for c, r in ((mine, 0), (theirs, row))]
            np.testing.assert_array_equal(*held)
    begun = Engine(tiny, policy, prompt_len=0, max_new_tokens=300).begin([50])
    if hasattr(begun.caches[0], "budget"):
        assert begun.caches[0].budget.tolist() == [20]


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_pyramids_have_room_whatever_follows_a_prompt(tiny, layer):
    """Fewer new tokens lower the average, and may put a row into the pyramid that was not in it."""
    policy = PyramidKV(budget=0.4, window=4, beta=3)
    spec = dataclasses.replace(
        Engine(tiny, prompt_len=100, max_new_tokens=128).specs[0], layer=layer, num_layers=6, batch=2
    )
    lengths, new = np.meshgrid(np.arange(1, spec.prompt_len + 1), np.arange(1, spec.new_tokens + 1))
    lengths, new = jnp.asarray(lengths.ravel(), jnp.int32), jnp.asarray(new.ravel(), jnp.int32)
    budgets = jnp.minimum(policy.row_budgets(spec, lengths, lengths + new), lengths)
    assert int(jnp.max(budgets)) <= policy.max_budget(spec)


def test_an_engine_takes_other_weights_of_its_shape(tiny):
    shapes = Engine(tiny.config, "treekv", 24, prompt_len=40, max_new_tokens=8, dtype=tiny.dtype)
    assert shapes.compile().cache == shapes.cache_bytes == shapes.policy.nbytes(tiny.config, 1, 40, 8, tiny.dtype)
    before = compiled()
    state, _ = shapes.of(tiny).prefill(PROMPTS[:1])
    assert compiled() == before
    assert state.pos.tolist() == [40]
    with pytest.raises(ValueError, match="give the weights that they were compiled for"):
        shapes.of(abstract(tiny.config, jnp.bfloat16))


def test_end_tokens_are_on_no_device(tiny):
    """So that programs can be compiled for one that runs nothing; there is one at least, and they are as many whether they count or not."""
    engine = Engine(tiny, prompt_len=40)
    for ids in ((), (7,)):
        _, ends = engine.how(eos_ids=ids)
        assert isinstance(ends, np.ndarray)
        assert (ends.dtype, ends.shape) == (np.int32, (max(len(tiny.config.eos), 1),))
        assert ends.tolist()[: len(ids)] == list(ids)


def test_what_does_not_fit_is_refused(tiny):
    engine = Engine(tiny, batch=2, prompt_len=40, max_new_tokens=8)
    with pytest.raises(ValueError, match="1 prompts are given; give 2, of 1 to 64 tokens each"):
        engine.prefill(PROMPTS[:1])
    with pytest.raises(ValueError, match="max_new_tokens=0; give a whole number, 1 or more"):
        Engine(tiny, prompt_len=0, max_new_tokens=0)
    with pytest.raises(ValueError, match="model is 'text'"):
        Engine("text", prompt_len=8)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([[], [1]], "prompt 1 of 2: 0 tokens are not 1 to 64"),
        ([[1], [2] * 65], "prompt 2 of 2: 65 tokens are not 1 to 64"),
        ([[1], [10**6, 2]], "prompt 2 of 2: token id 1000000 is outside this model's vocabulary of 64"),
        ([[5, -1], [64]], "prompt 1 of 2: token id -1 .* of 64; prompt 2 of 2: token id 64 is outside"),
        ([[2**70], [2**70]], f"prompts 1 and 2 of 2: token id {2**70} is outside"),
        ([[1.5, 2.0], [1]], r"prompt 1 of 2: \[1.5, 2.0\] \(list\) is not a list of token ids"),
        ([[1], [True]], r"prompt 2 of 2: \[True\] \(list\) is not a list of token ids"),
        (
            [[1, None], ["ab"]],
            r"prompt 1 of 2: None \(NoneType\) is not a token id.*; prompt 2 of 2: \['ab'\] \(list\) is not",
        ),
        ([[1, [2, 3]], 5], "prompt 1 of 2: .*; prompt 2 of 2: 5"),
        (np.ones((2, 3)), "prompts 1 and 2 of 2: an array of shape"),
        (None, "prompts are None"),
        ("ab", "prompts are 'ab'"),
    ],
)
def test_token_ids_are_checked(tiny, monkeypatch, prompts, says):
    """All rows are named that are none of the model's, before anything is compiled; by every way of giving tokens."""
    engines = [Engine(tiny, batch=2, prompt_len=40, max_new_tokens=64, block=block) for block in (None, 64)]
    for program in PROGRAMS:
        monkeypatch.setattr(program, "compiled", None)
    for engine in engines:
        with pytest.raises(ValueError, match=says):
            engine.prefill(prompts)
    begun = engines[1].begin()
    if "0 tokens" not in says:  # a row that is to stay as it is, or goes on
        given, block = (says.replace("prompt", name).replace("not 1 to", "not 0 to") for name in ("given row", "block"))
        with pytest.raises(ValueError, match=given):
            engines[1].answering(begun, prompts, 4)
        with pytest.raises(ValueError, match=block):
            engines[1].extend(begun, prompts)


def test_numbers_for_rows_are_checked(tiny):
    engine = Engine(tiny, batch=2, prompt_len=40, max_new_tokens=8, block=64)
    for options, says in (
        ({"new_tokens": [8]}, r"new_tokens is \[8\] \(list\); give a list of 2, one for each row"),
        ({"new_tokens": [8, 1.5]}, r"new_tokens\[1\]=1.5; give a whole number, 0 or more"),
        (
            {"new_tokens": [8, 10**6]},
            "new_tokens: a row of 1000005 tokens in all is longer than this engine has room for, 72",
        ),
        ({"seeds": 3}, r"seeds is 3 \(int\); give a list of 2"),
        ({"seeds": [0.5, 1]}, r"seeds\[0\]=0.5"),
        ({"eos_ids": [1.5]}, r"eos_ids\[0\]=1.5; give a whole number"),
        ({"sampler": "greedy"}, r"sampler is 'greedy' \(str\)"),
    ):
        with pytest.raises(ValueError, match=says):
            engine.prefill(PROMPTS, **options)
    for total, says in (([1], "total is "), ([1, None], r"total\[1\]=None"), ([1, 73], "total: a row of 73 tokens")):
        with pytest.raises(ValueError, match=says):
            engine.begin(total)
    with pytest.raises(ValueError, match=r"max_total_tokens=1.5"):
        Engine(tiny, prompt_len=8, max_total_tokens=1.5)


def test_decoding_ends_where_the_room_does(tiny):
    """More than a call of the program can return come in one answer; and none beyond what the engine was made for."""
    engine = Engine(tiny, prompt_len=8, max_new_tokens=300)
    (state, _), (whole, _) = engine.prefill([PROMPTS[1]]), engine.prefill([PROMPTS[1]])
    assert engine.decode(engine.begin(), 0)[1].shape == (1, decoding.CHUNK)
    whole, tokens, logprobs = engine.decode(whole, 299)
    assert tokens.shape == logprobs.shape == (1, 2 * decoding.CHUNK)
    assert int(whole.steps) == 299
    pieces = []
    for count in (100, 199):
        state, *part = engine.decode(state, count)
        pieces.append([x[:, :count] for x in part])
    for got, want in zip((tokens, logprobs), zip(*pieces, strict=True), strict=True):
        np.testing.assert_array_equal(np.asarray(got)[:, :299], np.concatenate(want, axis=1))
    with pytest.raises(
        ValueError,
        match=r"2 more tokens after the 299 that follow the prompt are more than max_new_tokens=300 .*; give 1 or fewer",
    ):
        engine.decode(whole, 2)
    with pytest.raises(ValueError, match="3 more tokens after the 299"):
        engine.answering(whole, [[1, 2]], 2)
    for count in (-1, 1.5, True, None, "8"):
        with pytest.raises(ValueError, match=r"count=.*; give a whole number, 0 or more"):
            engine.decode(whole, count)
    with pytest.raises(ValueError, match=r"count=257; give 256 or fewer, and have `decode` sample the others"):
        engine.answering(engine.begin(), [[1]], 257)
    engine.decode(whole, 1)


def test_a_prompt_grows_no_longer_than_there_is_room(tiny):
    engine = Engine(tiny, batch=2, prompt_len=40, max_new_tokens=8, block=64)
    state, _ = engine.extend(engine.begin(), PROMPTS)
    with pytest.raises(ValueError, match="with these blocks a prompt has 65 tokens, and this engine has room for 64"):
        engine.extend(state, [[1] * 25, [1]])
    with pytest.raises(ValueError, match="prefills prompts whole; make the engine with block="):
        Engine(tiny, batch=2, prompt_len=40, max_new_tokens=8).extend(state, [[1], [1]])


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"policy": "h2o:24"}, "of the policy 'h2o:budget=24,recent=8', not 'h2o:budget=24'"),
        ({"batch": 1}, "of 1 rows, not 2"),
        ({"prompt_len": 100}, "for prompts of 128 and 8 new tokens, not 64 and 8"),
        ({"max_new_tokens": 30}, "for prompts of 64 and 32 new tokens, not 64 and 8"),
        ({"model": "layers"}, "of a llama model of another shape"),
        ({"model": "weights"}, "of a model with other weights"),
    ],
    ids=str,
)
def test_states_of_other_engines_are_refused(tiny, other, says):
    """Also those whose arrays have the same shapes, by all that takes a state, and what was saved by `resume`."""
    models = {
        "layers": init(tiny.config.with_depth(1), jax.random.key(0)),
        "weights": init(tiny.config, jax.random.key(1)),
    }
    sizes = {"model": tiny, "policy": "h2o:24", "batch": 2, "prompt_len": 40, "max_new_tokens": 8, "block": 64}
    engine = Engine(**sizes)
    changed = sizes | {name: models.get(value, value) for name, value in other.items()}
    if "policy" in other:
        changed["policy"] = "h2o:24,recent=8"
    elsewhere = Engine(**changed)
    state = elsewhere.begin()
    for call in (
        lambda: engine.decode(state, 1),
        lambda: engine.extend(state, PROMPTS),
        lambda: engine.answering(state, PROMPTS, 1),
        lambda: engine.save(state),
        lambda: engine.slots(state),
    ):
        with pytest.raises(ValueError, match=says):
            call()
    with pytest.raises(ValueError, match=rf"{says}|layer 0 of this state has |of a model of 1 layers"):
        engine.resume(elsewhere.save(state))
    bare = dataclasses.replace(state, origin=None)
    if "batch" in other or other.get("model") == "layers":
        with pytest.raises(ValueError, match="this state has "):
            engine.decode(bare, 1)


def test_what_is_no_state_is_refused(tiny):
    engine = Engine(tiny, batch=2, prompt_len=40, max_new_tokens=8)
    for value, says in (
        (None, r"state is None \(NoneType\)"),
        ({}, r"state is \{\} \(dict\)"),
        (engine.prefill(PROMPTS), "state is a tuple whose first element is the state"),
    ):
        for call in (lambda value=value: engine.decode(value, 1), lambda value=value: engine.resume(value)):
            with pytest.raises(ValueError, match=says):
                call()
    saved = engine.save(engine.begin())
    with pytest.raises(ValueError, match="on the host, as `save` returns it; pass it to `resume` first"):
        engine.decode(saved, 1)
    for changed, says in (
        ({"caches": None}, "the caches of this state are None"),
        (
            {"token": saved.token[:1]},
            r"this state has token of int32\[1\], but those of this engine have token of int32\[2\]",
        ),
        ({"steps": np.int32(9)}, "0 more tokens after the 9 that follow the prompt"),
        ({"token": np.asarray([1, 64], np.int32)}, "row 2 of 2: token id 64 is outside this model's vocabulary of 64"),
    ):
        with pytest.raises(ValueError, match=says):
            engine.resume(dataclasses.replace(saved, **changed))


def test_rows_without_given_tokens_go_on(tiny):
    """From the token that they have sampled, beside a row that processes others first."""
    engine = Engine(tiny, "h2o:24", batch=2, prompt_len=40, max_new_tokens=40)
    state, _ = engine.prefill(PROMPTS)
    other = jax.tree.map(jnp.copy, state)
    state, tokens, logprobs = engine.decode(state, 9)
    again, same, scores = engine.answering(other, [[], [5, 6, 7]], 7)()
    assert int(again.steps) == int(state.steps) == 9
    np.testing.assert_array_equal(same[0, :9], tokens[0, :9])
    np.testing.assert_allclose(scores[0, :9], logprobs[0, :9], atol=1e-6)
    assert not np.array_equal(same[1, :7], tokens[1, :7])


def test_a_state_is_used_up_once(tiny):
    """That is told in words, whatever takes it, and whatever had used it up; what was saved or copied before goes on."""
    engine, given = Engine(tiny, "h2o:24", batch=2, prompt_len=40, max_new_tokens=8, block=64), [[1, 2], [3]]
    uses = (
        lambda state: engine.extend(state, PROMPTS),
        lambda state: engine.decode(state, 1),
        lambda state: engine.answering(state, given, 1)(),
    )
    for use in uses:
        state = engine.begin()
        copy, saved = jax.tree.map(jnp.copy, state), engine.save(state)
        use(state)
        for again in (*uses, engine.save, engine.slots, engine.resume):
            with pytest.raises(
                RuntimeError, match=r"this state has been used up by .*; use the state that they returned"
            ):
                again(state)
        use(copy)
        use(engine.resume(saved))


def test_what_a_program_uses_up_is_deleted_where_its_memory_cannot_be_reused():
    """As on devices that ignore donation: here the result has another shape than the argument."""
    total = Program(lambda x, y: (jnp.sum(x) + y, y), static=0, donate=(0,))
    x, y = jnp.arange(3.0), jnp.ones(())
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        found, _ = total(x, y)
    assert (float(found), x.is_deleted(), y.is_deleted()) == (4.0, True, False)


def test_a_saved_state_goes_on_where_it_was(tiny):
    """What was in the host's memory is there again; and a state of other policies or models is refused."""
    sizes = {"prompt_len": 40, "max_new_tokens": 8}
    engine = Engine(tiny, "offloaded(quest:16,page=4,dense_layers=0)", **sizes)
    state, _ = engine.prefill(PROMPTS[:1])
    memories = [x.sharding.memory_kind for x in jax.tree.leaves(state.caches)]
    assert len(set(memories)) == 2
    saved = engine.save(state)
    back = engine.resume(saved)
    assert [x.sharding.memory_kind for x in jax.tree.leaves(back.caches)] == memories
    np.testing.assert_array_equal(engine.decode(back, 4)[1], engine.decode(state, 4)[1])
    with pytest.raises(
        ValueError, match=r"layer 0 of this state has .* of .*, but full at this engine's sizes has k of float32\["
    ):
        Engine(tiny, **sizes).resume(saved)
    with pytest.raises(ValueError, match="of a model of 1 layers"):
        engine.resume(dataclasses.replace(saved, caches=saved.caches[:1]))
