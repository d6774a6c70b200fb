"""`kvjax.aot_compile`: programs made ahead of time are the ones that run, and tell what they take."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.conversion import Tokenizer
from kvjax.models import Params
from kvjax.runtime import decoding
from kvjax.runtime.program import Program

PROMPTS = [[5, 9, 2, 7, 7, 1] * 9, [3, 1, 4], [2, 7, 1, 8] * 5]
NEW = 10
TREE = kvjax.TreeKV(budget=16, sinks=2)


@pytest.fixture(scope="module")
def served(tiny: Params) -> kvjax.CompiledGenerator:
    """Two rows of up to 64 tokens, from the shape of the model alone."""
    return kvjax.aot_compile(tiny.config, TREE, batch=2, prompt_len=60, max_new_tokens=NEW, dtype="float32")


@contextlib.contextmanager
def traces() -> Iterator[list[str]]:
    """What JAX traces within the `with` block."""
    found: list[str] = []

    def listen(event: str, seconds: float, **about: object) -> None:
        if "trace" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def executables() -> int:
    return len(decoding.prefill.executables) + len(decoding.decode.executables)


def test_generates_what_generate_does_and_compiles_nothing(tiny: Params, served: kvjax.CompiledGenerator) -> None:
    """Three prompts on two rows, prompts shorter than the programs' length, fewer new tokens than there is room for."""
    before = executables()
    results = served.generate(tiny, PROMPTS)
    fewer = served.generate(tiny, PROMPTS[1], max_new_tokens=4)
    assert executables() == before
    for prompt, got in zip(PROMPTS, results, strict=True):
        want = kvjax.generate(tiny, prompt, TREE, max_new_tokens=NEW)
        assert (got.tokens, got.stop_reason) == (want.tokens, want.stop_reason)
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)
    assert (fewer.tokens, fewer.stats.compile_seconds) == (results[1].tokens[:4], 0)
    assert (results[0].stats.rows, results[0].stats.new_tokens) == (3, 3 * NEW)


def test_what_was_compiled_serves_generate_too(tiny: Params, served: kvjax.CompiledGenerator) -> None:
    before = executables()
    kvjax.generate(tiny, PROMPTS[:2], TREE, max_new_tokens=NEW, ignore_eos=not tiny.config.eos)
    assert executables() == before


def test_weights_with_a_tokenizer_run_the_same_programs(tiny: Params, served: kvjax.CompiledGenerator) -> None:
    import tokenizers

    vocabulary = {chr(40 + i): i for i in range(64)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="("))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    spoken = tiny.replace(tokenizer=Tokenizer(backend, eos=(), chat_template=None))
    before = executables()
    text = "".join(chr(40 + token) for token in PROMPTS[1])
    result = served.generate(spoken, text)
    assert executables() == before
    assert result.tokens == served.generate(tiny, PROMPTS[1]).tokens
    assert result.text == "".join(chr(40 + token) for token in result.tokens)
    stop = result.text[3:5]
    assert served.generate(spoken, text, stop=stop).text == result.text[: result.text.index(stop)]


def test_a_second_call_traces_nothing(tiny: Params, served: kvjax.CompiledGenerator) -> None:
    """Sizes of caches are computed once, too."""
    with traces() as found:
        jax.eval_shape(lambda x: x + 1, jnp.zeros(3))
    assert found  # JAX reports traces
    for call in (lambda: served.generate(tiny, PROMPTS[0]), lambda: kvjax.generate(tiny, PROMPTS[0], TREE, None, NEW)):
        first = call()
        with traces() as found:
            assert call().tokens == first.tokens
        assert found == []


def test_memory_is_what_runs(tiny: Params, served: kvjax.CompiledGenerator) -> None:
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(tiny))
    assert served.memory.weights == weights
    assert served.memory.cache == served.generate(tiny, PROMPTS[:2])[0].stats.cache_bytes
    assert served.memory.host_cache == 0
    assert served.memory.decode > weights + served.memory.cache
    assert served.memory.peak == max(served.memory.prefill, served.memory.decode)
    assert served.compile_seconds > 0


def test_shapes_without_a_place_are_on_the_default_device() -> None:
    program = Program(lambda x: x + 1, static=0)
    compiled = program.compiled(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert program.compiled(jnp.zeros(3)) is compiled


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 0}, "batch=0; give a whole number"),
        ({"prompt_len": -1}, "prompt_len=-1"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"policy": "treekv", "budget": 0.02}, "gives 4 slots"),
    ],
)
def test_refusals(tiny: Params, options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kvjax.aot_compile(tiny, **{"prompt_len": 100} | options)


def test_requests_that_the_programs_cannot_serve(tiny: Params, served: kvjax.CompiledGenerator) -> None:
    with pytest.raises(ValueError, match="a prompt has 65 tokens, but the programs take 64"):
        served.generate(tiny, [1] * 65)
    with pytest.raises(ValueError, match="max_new_tokens=11, but the programs were compiled for 10"):
        served.generate(tiny, PROMPTS, max_new_tokens=11)
    other = tiny.replace(config=dataclasses.replace(tiny.config, norm_eps=1e-3))
    with pytest.raises(ValueError, match="another shape or type"):
        served.generate(other, PROMPTS)


def test_threads_that_ask_for_one_program_compile_it_once() -> None:
    """All get the same executable; traces are counted, as the function runs once for each."""
    traced, together = [], threading.Barrier(4)

    def doubled(x: jax.Array) -> jax.Array:
        traced.append(x.shape)
        time.sleep(0.2)  # so that the others come while it is traced
        return 2 * x

    program = Program(doubled, static=0)

    def ask(size: int) -> object:
        together.wait()
        return program.compiled(jax.ShapeDtypeStruct((size,), jnp.float32))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, [3, 3, 5, 3]))
    assert found[0] is found[1] is found[3] is not found[2]
    assert sorted(traced) == [(3,), (5,)]
    assert len(program.executables) == 2
