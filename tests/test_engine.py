"""The engine: sizes that few programs serve, budgets that count each row's own tokens, and clear refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models import abstract
from kvjax.policies import PyramidKV
from kvjax.runtime import decoding
from kvjax.runtime.engine import Engine

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
    for prompts in (PROMPTS[:1], [[], [1]], [[1], [2] * 65]):
        with pytest.raises(ValueError, match=r"prompts of \[.*\] tokens; give 2, of 1 to 64 tokens each"):
            engine.prefill(prompts)
    with pytest.raises(ValueError, match="max_new_tokens=0; give a whole number, 1 or more"):
        Engine(tiny, prompt_len=0, max_new_tokens=0)
    with pytest.raises(ValueError, match="model is 'text'"):
        Engine("text", prompt_len=8)  # pyright: ignore[reportArgumentType]


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
        ValueError, match=r"layer 0 of this state has .* of .*, and by full at this engine's sizes k of float32\["
    ):
        Engine(tiny, **sizes).resume(saved)
    with pytest.raises(ValueError, match="of a model of 1 layers"):
        engine.resume(dataclasses.replace(saved, caches=saved.caches[:1]))
