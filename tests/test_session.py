"""Sessions against the same tokens read one by one, forks that do not disturb each other, and chats turn by turn."""

import contextlib
import copy
import dataclasses
import itertools
import pickle
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import HF_CONFIG, write_hf

import kvjax
from kvjax._util import interrupts
from kvjax.conversion import Tokenizer
from kvjax.runtime import decoding, session
from kvjax.runtime.engine import Engine
from kvjax.runtime.program import Program

STEP = jax.jit(decoding.step, static_argnums=(0, 1))
RNG = np.random.default_rng(11)
PROMPT, FIRST, SECOND = (RNG.integers(0, 64, size).tolist() for size in (57, 9, 5))
ROOM = 60
POLICY = kvjax.ChunkKV(budget=0.3, chunk=4, window=4)


def by_hand(params, policy, pieces):
    """Each piece is read token by token after the prompt, then six tokens are drawn; draws by piece."""
    policy = policy.bind(params.config)
    engine = Engine(params, policy, prompt_len=len(PROMPT) - 1, max_new_tokens=ROOM + 1)
    specs, (state, _) = engine.specs, engine.prefill([PROMPT[:-1]])
    caches, positions, unread, draws = state.caches, itertools.count(len(PROMPT) - 1), PROMPT[-1:], []
    for piece in pieces:
        unread, drawn = unread + piece, []
        while len(drawn) < 6:
            for token in unread:
                pos = jnp.asarray([next(positions)], jnp.int32)
                logits, caches = STEP(policy, specs, params, caches, jnp.asarray([token], jnp.int32), pos)
            drawn.append(int(jnp.argmax(logits[0])))
            unread = drawn[-1:]
        draws.append(drawn)
    return draws


def begin(params, policy):
    return kvjax.Session(params, PROMPT, policy, max_new_tokens=ROOM)


def test_turns_are_read_into_the_compressed_cache(tiny, monkeypatch):
    """Two turns; then the same with pieces so short that the first turn takes three."""
    expected = by_hand(tiny, POLICY, [FIRST, SECOND])
    for piece in (session.PIECE, 4):
        monkeypatch.setattr(session, "PIECE", piece)
        talk = begin(tiny, POLICY)
        held = talk.cache_bytes
        assert [talk.generate(text, 6, ignore_eos=True).tokens for text in (FIRST, SECOND)] == expected
        assert talk.tokens == PROMPT + FIRST + expected[0] + SECOND + expected[1]
        assert talk.remaining == ROOM - 9 - 6 - 5 - 6
        assert talk.cache_bytes == held


def test_reading_and_writing_are_one_program(letters):
    talk = kvjax.Session(letters, "hello", kvjax.StreamingLLM(budget=12), max_new_tokens=400)
    before = len(decoding.answer.executables)
    talk.read("again " * 30)
    talk.generate("and again " * 15, 6)
    assert len(decoding.answer.executables) == before + 1


def test_questions_are_asked_of_forks(tiny):
    talk = begin(tiny, POLICY)
    apart = [begin(tiny, POLICY).generate(question, 6, ignore_eos=True) for question in (FIRST, SECOND)]
    for _ in range(2):
        replies = talk.ask([FIRST, SECOND], 6, ignore_eos=True)
        assert [reply.tokens for reply in replies] == [reply.tokens for reply in apart]
    with pytest.raises(ValueError, match="no tokenizer"):
        talk.generate("", 6)
    with pytest.raises(ValueError, match="63 tokens are more than"):
        talk.generate(FIRST * 7)
    assert (talk.tokens, talk.remaining) == (PROMPT, ROOM)
    copies = [copy.copy(talk), copy.deepcopy(talk), talk]  # none rewrites the cache of another
    assert [each.generate(FIRST, 6, ignore_eos=True).tokens for each in copies] == [apart[0].tokens] * 3
    with pytest.raises(TypeError, match=r"a Session cannot be pickled: .* Keep `tokens`"):
        pickle.dumps(talk)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    path = tmp_path_factory.mktemp("talker") / "small"
    write_hf(path, HF_CONFIG | {"max_position_embeddings": 512}, tokenizer=True)
    from kvjax.conversion import load

    return load(path)


def test_a_chat_reads_what_the_template_says(talker):
    """After any turns the session has read what the template makes of the conversation, but for cut answers' missing ends."""
    talk = kvjax.Session(
        talker, [{"role": "system", "content": "Be brief."}], kvjax.StreamingLLM(budget=48), max_new_tokens=300
    )
    tokenizer = talker.tokenizer
    for message in ("hello", "and now?"):
        reply = talk.chat(message, 5, ignore_eos=True)
        assert talk.messages[-2:] == [
            {"role": "user", "content": message},
            {"role": "assistant", "content": reply.text},
        ]
    text = tokenizer.decode(talk.tokens, skip_special=False)
    first, second = (m["content"] for m in talk.messages if m["role"] == "assistant")
    assert text == (
        f"<|system|>Be brief.</s>\n<|user|>hello</s>\n<|assistant|>{first}</s>\n<|user|>and now?</s>\n<|assistant|>{second}"
    )
    asked = talk.fork().ask(["why?", "who?"], 3)
    assert len(asked) == 2
    assert len(talk.messages) == 5


@pytest.mark.parametrize("said", ["\N{OBJECT REPLACEMENT CHARACTER}", "a\N{OBJECT REPLACEMENT CHARACTER}b", "marker0x"])
def test_messages_may_hold_any_text(talker, said):
    talk = kvjax.Session(
        talker, [{"role": "system", "content": said}], kvjax.StreamingLLM(budget=48), max_new_tokens=300
    )
    first = talk.chat(said, 5, ignore_eos=True).text
    talk.chat(said, 5, ignore_eos=True)
    text = talker.tokenizer.decode(talk.tokens[:-5], skip_special=False)
    assert (
        text == f"<|system|>{said}</s>\n<|user|>{said}</s>\n<|assistant|>{first}</s>\n<|user|>{said}</s>\n<|assistant|>"
    )


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_a_history_that_ends_with_an_answer(talker, name):
    """The end of the answer is read once, and the session has read what the template makes of the whole conversation."""
    template = (Path(__file__).parent / "conversion" / "templates" / f"{name}.jinja").read_text()
    params = talker.replace(tokenizer=Tokenizer(talker.tokenizer.backend, eos=(1,), chat_template=template))
    history = [("system", "Be brief."), ("user", "Who?"), ("assistant", "Me.")]
    messages = [{"role": role, "content": content} for role, content in history]
    talk = kvjax.Session(params, messages, kvjax.StreamingLLM(budget=48), max_new_tokens=300)
    assert talk.messages == messages
    reply = talk.chat("And now?", 5, ignore_eos=True)
    messages.append({"role": "user", "content": "And now?"})
    assert talk.tokens[:-5] == params.tokenizer.chat(messages)
    assert talk.messages == [*messages, {"role": "assistant", "content": reply.text}]
    text = params.tokenizer.decode(talk.tokens, skip_special=False)
    assert text.count("<|im_end|>") == 4
    assert "<|im_end|>\n<|im_end|>" not in text


def test_an_end_token_is_not_read_twice(talker, monkeypatch):
    """An answer that ends by itself has drawn the end that the template puts behind it."""
    talk = kvjax.Session(talker, [{"role": "user", "content": "hi"}], max_new_tokens=200)
    talk.answer(3, ignore_eos=True)
    talk._at.ids[-1] = 1  # as if the last token drawn had been the end
    talk.chat("again", 2)
    text = talker.tokenizer.decode(talk.tokens, skip_special=False)
    assert text.count("</s>\n<|user|>again</s>\n<|assistant|>") == 1
    assert "</s></s>" not in text
    params = talker.replace(config=dataclasses.replace(talker.config, eos=(1, 0)))
    talk = kvjax.Session(params, [{"role": "user", "content": "hi"}], max_new_tokens=200)
    talk.answer(3, ignore_eos=True)
    talk._at.ids[-1] = 0  # as if it had been another end token than the template's
    left = talk.remaining
    talk.chat("again", 2, ignore_eos=True)
    text = talker.tokenizer.decode(talk.tokens, skip_special=False)
    assert text.count("</s>\n<|user|>again</s>\n<|assistant|>") == 1
    assert "<s>" not in text
    assert talk.remaining == left - len(talker.tokenizer.encode("\n<|user|>again</s>\n<|assistant|>")) - 2


PROGRAM = decoding.answer


class BrokenOff(Program):
    """`decoding.answer`, whose nth call is broken off: before it runs, after, or by a Ctrl-C while it runs."""

    def __init__(self, call: int, when: str, kind: type[BaseException]) -> None:
        self.left, self.when, self.kind = call, when, kind

    def __call__(self, *args):
        self.left -= 1
        if self.left:
            return PROGRAM(*args)
        if self.when == "before":
            raise self.kind
        result = PROGRAM(*args)
        if self.when == "after":
            raise self.kind
        signal.raise_signal(signal.SIGINT)
        return result

    def ready(self, *args):
        return lambda: self(*args)

    compile_seconds = 0.0


CALLS = [
    *[(call, when, kind) for call in (1, 2, 3, 4) for when, kind in (("before", RuntimeError), ("after", MemoryError))],
    *[(call, when, KeyboardInterrupt) for call in (1, 2, 3, 4) for when in ("before", "after", "during")],
]


@pytest.mark.parametrize(("call", "when", "kind"), CALLS)
def test_a_turn_that_is_broken_off(tiny, monkeypatch, set_chunk, call, when, kind):
    """A turn takes two calls to read its text and two to write. Wherever one breaks off, the session goes on from there, or is over."""
    monkeypatch.setattr(session, "PIECE", 4)
    set_chunk(3)
    talk = begin(tiny, POLICY)
    whole = talk.fork()
    want = whole.generate(FIRST, 6, ignore_eos=True).tokens
    monkeypatch.setattr(decoding, "answer", BrokenOff(call, when, kind))
    with pytest.raises(kind):
        talk.generate(FIRST, 6, ignore_eos=True)
    monkeypatch.setattr(decoding, "answer", PROGRAM)
    written = max(call - (2 if when == "during" else 3), 0) * 3
    assert talk.tokens == PROMPT + FIRST + want[:written]
    if when == "after":
        assert (talk.remaining, talk.cache_bytes) == (0, 0)
        assert ", over" in repr(talk)
        for refused in (talk.generate, talk.fork, lambda: talk.read([1]), lambda: talk.ask([[1]])):
            with pytest.raises(RuntimeError, match=r"this session is over.*kvjax\.Session\(params, session\.tokens"):
                refused()
        return
    assert talk.remaining == ROOM - len(FIRST) - written
    rest = talk.generate(max_new_tokens=6 - written, ignore_eos=True) if written < 6 else None
    assert want[written:] == (rest.tokens if rest else [])
    assert (talk.tokens, talk.remaining) == (whole.tokens, whole.remaining)
    assert talk.generate(SECOND, 6, ignore_eos=True) == whole.generate(SECOND, 6, ignore_eos=True)


@contextlib.contextmanager
def broken_off_at_line(number):
    """Ctrl-C as the session's code comes to its nth line."""
    lines, usual = itertools.count(1), sys.gettrace()

    def trace(frame, event, _):
        if frame.f_code.co_filename != session.__file__:
            return None
        if event == "line" and next(lines) == number:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(usual)


def test_a_turn_that_is_broken_off_at_any_line(tiny, monkeypatch, set_chunk):
    monkeypatch.setattr(session, "PIECE", 6)
    set_chunk(4)
    opening = begin(tiny, POLICY)
    whole = opening.fork()
    want = whole.generate(FIRST, 6, ignore_eos=True).tokens
    over = lines = 0
    for lines in itertools.count(1, 2):
        talk = opening.fork()
        try:
            with broken_off_at_line(lines):
                talk.generate(FIRST, 6, ignore_eos=True)
            break
        except KeyboardInterrupt:
            pass
        done = len(talk.tokens) - len(PROMPT)
        if talk._over:
            over += 1
            assert talk.remaining == 0
            continue
        assert talk.tokens == (PROMPT + FIRST + want)[: len(talk.tokens)]
        assert done == 0 or done >= len(FIRST)
        assert talk.remaining == ROOM - done
        if done == 0:
            talk.read(FIRST)
        left = ROOM - len(FIRST) - 6
        if talk.remaining > left:
            talk.generate(max_new_tokens=talk.remaining - left, ignore_eos=True)
        assert talk.tokens == whole.tokens
    assert lines > 60
    assert over < lines / 4  # where the new cache is not yet in place, which a real Ctrl-C waits for


def test_a_second_interrupt_does_not_wait():
    """And what was there before is back in place."""
    usual = signal.getsignal(signal.SIGINT)
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts.held_back():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        reached.append("after the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")
    assert reached == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is usual


def test_other_threads_are_never_interrupted(tiny):
    """They may not change what Ctrl-C does, and need not."""
    talk = begin(tiny, POLICY)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(talk.generate, FIRST, 6, ignore_eos=True).result()
    assert reply == begin(tiny, POLICY).generate(FIRST, 6, ignore_eos=True)


def test_a_session_that_another_thread_uses(tiny, monkeypatch):
    """It refuses what would use its cache, and says why; it is not over. Forks of it are asked at the same time."""
    talk, free = begin(tiny, POLICY), begin(tiny, POLICY)
    want = free.generate(FIRST, 6, ignore_eos=True)
    running, go_on = threading.Event(), threading.Event()

    class Waiting(BrokenOff):
        def __call__(self, *args):
            result = PROGRAM(*args)
            running.set()
            assert go_on.wait(60)
            return result

    monkeypatch.setattr(decoding, "answer", Waiting(0, "never", RuntimeError))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(talk.generate, FIRST, 6, ignore_eos=True)
        assert running.wait(60)
        monkeypatch.setattr(decoding, "answer", PROGRAM)
        for refused in (talk.generate, talk.fork, lambda: talk.read([1]), lambda: talk.ask([[1]])):
            with pytest.raises(RuntimeError, match=r"in use by another thread.*session\.fork\(\) of its own"):
                refused()
        assert talk.remaining == ROOM - len(FIRST)
        assert talk.cache_bytes == free.cache_bytes
        assert "over" not in repr(talk)
        go_on.set()
        assert other.result() == want
    assert talk.generate(SECOND, 6, ignore_eos=True) == free.generate(SECOND, 6, ignore_eos=True)
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: talk.ask([FIRST], 4, ignore_eos=True)[0], range(8)))
    assert all(reply == replies[0] for reply in replies)


def test_the_room_for_new_tokens(tiny):
    """A policy that keeps every new token has a slot for each of them beside its budget, and the default is a round number of slots."""
    for most, slots in ((1000, 64 + 1024), (200, 64 + 256)):
        options = {} if most == 1000 else {"max_new_tokens": most}
        talk = kvjax.Session(tiny, PROMPT, "snapkv:64,window=8", **options)
        held = jax.tree.leaves([talk._at.state.caches])
        assert talk.remaining == most
        assert max(leaf.shape[2] for leaf in held if leaf.ndim == 4) == slots


@pytest.mark.parametrize("method", ["encode", "decode", "render"])
def test_a_chat_that_is_broken_off_in_the_tokenizer(talker, monkeypatch, method):
    """At whichever call: messages, tokens and the cache tell of the same conversation."""
    monkeypatch.setattr(session, "PIECE", 8)
    opening = kvjax.Session(
        talker, [{"role": "system", "content": "Be brief."}], kvjax.StreamingLLM(budget=48), max_new_tokens=300
    )
    usual = getattr(Tokenizer, method)
    for call in itertools.count(1):
        talk, calls = opening.fork(), itertools.count(1)

        def broken(*args, calls=calls, call=call, **options):
            if next(calls) == call:
                raise KeyboardInterrupt
            return usual(*args, **options)

        monkeypatch.setattr(Tokenizer, method, broken)
        try:
            talk.chat("hello", 5, ignore_eos=True)
            break
        except KeyboardInterrupt:
            pass
        finally:
            monkeypatch.setattr(Tokenizer, method, usual)
        agrees(talker, talk)
        if talk.messages[-1]["role"] == "user":
            talk.answer(5, ignore_eos=True)
        reply = talk.chat("and now?", 5, ignore_eos=True)
        assert talk.messages[-1] == {"role": "assistant", "content": reply.text}
        agrees(talker, talk)
    assert call > 1


def agrees(params, talk):
    """What the session has read is what the template makes of its messages, but for cut answers' missing ends."""
    text = params.tokenizer.decode(talk.tokens, skip_special=False)
    parts = {
        "system": "<|system|>{}</s>\n",
        "user": "<|user|>{}</s>\n<|assistant|>",
        "assistant": "{}</s>\n",
    }
    want = "".join(parts[message["role"]].format(message["content"]) for message in talk.messages)
    assert text in (want, want.removesuffix("</s>\n"))
    assert talk.remaining == 300 - len(talk.tokens) + len(params.tokenizer.encode("<|system|>Be brief.</s>\n"))
    assert not talk._over


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_chat_that_is_broken_off_in_a_program(talker, monkeypatch, set_chunk, call):
    """Also in the middle of an answer, which the next message then follows."""
    monkeypatch.setattr(session, "PIECE", 16)
    set_chunk(3)
    talk = kvjax.Session(
        talker, [{"role": "system", "content": "Be brief."}], kvjax.StreamingLLM(budget=48), max_new_tokens=300
    )
    monkeypatch.setattr(decoding, "answer", BrokenOff(call, "during", KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        talk.chat("hello", 6, ignore_eos=True)
    monkeypatch.setattr(decoding, "answer", PROGRAM)
    agrees(talker, talk)
    if talk.messages[-1]["role"] == "user":
        with pytest.raises(ValueError, match=r"use answer\(\)"):
            talk.chat("again", 3)
        talk.answer(3, ignore_eos=True)
    talk.chat("and now?", 3, ignore_eos=True)
    agrees(talker, talk)
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_what_say_refuses(talker):
    """Without a trace in the session."""
    talk = kvjax.Session(talker, [{"role": "system", "content": "Be brief."}], max_new_tokens=40)
    before = talk.tokens, talk.messages, talk.remaining
    for message, options, says in (
        (5, {}, r"content of a chat message is 5 \(int\)"),
        ("\ud83d", {}, "half of a surrogate pair"),
        ([{"type": "image_url"}], {}, "part 1 of a chat message is of type 'image_url'; text alone is read"),
        ([{"type": "text"}], {}, "part 1 of a chat message is {'type': 'text'}"),
        ("hello" * 9, {"max_new_tokens": 20}, "tokens are more than the session has room for, 40"),
        ("hello", {"stop": ""}, "stop=''; give a string"),
        ("hello", {"seed": 0.5}, "seed=0.5"),
    ):
        with pytest.raises(ValueError, match=says):
            talk.chat(message, **options)
    for refused in (
        talk.chat,
        talk.stream,
        lambda _, **options: talk.generate(**options),
        lambda text, **options: talk.ask([text], **options),
    ):
        with pytest.raises(TypeError, match="stops is not an option of a session's answers"):
            refused("hello", stops="x")
    assert (talk.tokens, talk.messages, talk.remaining) == before


def test_what_a_session_refuses(tiny, talker):
    talk = begin(tiny, POLICY)
    with pytest.raises(ValueError, match="did not begin with chat messages"):
        talk.chat("hello")
    with pytest.raises(ValueError, match="no message of the user's"):
        talk.answer()
    with pytest.raises(ValueError, match="two tokens or more"):
        kvjax.Session(tiny, PROMPT[:1])
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        kvjax.Session(tiny, PROMPT, max_new_tokens=0)
    with pytest.raises(ValueError, match="assistant's turn"):
        kvjax.Session(talker, [{"role": "user", "content": "hi"}], max_new_tokens=200).chat("again")


@pytest.mark.parametrize("policy", ["full", "snapkv:40,window=4", "streaming_llm:24"])
def test_a_prompt_that_goes_on_arriving(letters, policy):
    """In blocks as one text would be read whose first block is short; between them it writes, and then goes on."""
    text = "the quick brown fox jumps over the lazy dog " * 8
    options = {"prefill_block": 16, "max_prompt_tokens": 400, "max_new_tokens": 40}
    session = kvjax.Session(letters, text[:40], policy, **options)
    for at in range(40, 184, 48):
        session.extend(text[at : at + 48])
    assert len(session.tokens) == 184
    assert session.remaining == 40
    want = kvjax.generate(letters, text[:184], policy, max_new_tokens=8, ignore_eos=True, prefill_block=16)
    fork = session.fork().generate(max_new_tokens=8, ignore_eos=True)
    if policy == "full":  # else the last token is read by a step of its own, and may choose otherwise
        assert fork.tokens == want.tokens
    first = session.generate(max_new_tokens=8, ignore_eos=True)
    assert first.tokens == fork.tokens
    bytes_before = session.cache_bytes
    session.extend(text[184:300])
    session.generate("and so", max_new_tokens=8, ignore_eos=True)
    assert (len(session.tokens), session.remaining) == (184 + 8 + 116 + 6 + 8, 40 - 8 - 6 - 8)
    assert session.cache_bytes == bytes_before


def test_extending_in_full_is_the_whole_text(letters):
    text = "some text that comes in three parts and is read in blocks of seven"
    session = kvjax.Session(letters, text[:9], prefill_block=7, max_prompt_tokens=len(text), max_new_tokens=16)
    for part in (text[9:10], text[10:50], text[50:]):
        session.extend(part)
    want = kvjax.generate(letters, text, max_new_tokens=8, ignore_eos=True)
    got = session.generate(max_new_tokens=8, ignore_eos=True)
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    with pytest.raises(ValueError, match="1 tokens are more than the prompt has room for, 0"):
        session.extend("a")


def test_what_cannot_be_extended(letters):
    with pytest.raises(ValueError, match="begin the session with prefill_block"):
        kvjax.Session(letters, "a text").extend("more")
    with pytest.raises(ValueError, match="max_prompt_tokens=90, but a prompt that grows needs chunked prefill"):
        kvjax.Session(letters, "a text", max_prompt_tokens=90)
    with pytest.raises(ValueError, match="the prompt has 6 tokens, more than max_prompt_tokens=5"):
        kvjax.Session(letters, "a text", prefill_block=4, max_prompt_tokens=5)
    with pytest.raises(kvjax.PolicyError, match="lagkv: chunked prefill is not supported"):
        kvjax.Session(letters, "a text", "lagkv:32,sinks=2,lag=4", prefill_block=4)


def test_an_answer_ends_where_the_room_does(tiny):
    """And a session without room answers nothing, without an error."""
    talk, whole = begin(tiny, POLICY), begin(tiny, POLICY)
    want = whole.generate(FIRST, ROOM - 9, ignore_eos=True)
    got = talk.generate(FIRST, 1000, ignore_eos=True)
    assert (got, got.stop_reason, len(got.tokens)) == (want, "length", ROOM - 9)
    assert talk.remaining == 0
    assert talk.generate() == kvjax.runtime.generation.Reply(None, [], [], "length")


@pytest.mark.parametrize("policy", ["streaming_llm:12", "full"])
def test_an_answer_that_ends_at_a_stop_string(letters, policy):
    """The session is as one that has read the tokens up to the stop string, and writes on as that one does."""
    opening = kvjax.Session(letters, "the quick brown fox", policy, max_new_tokens=80)
    free = opening.fork().generate(" and", 40, ignore_eos=True)
    stop = free.text[13:15]
    at = free.text.index(stop)
    talk = opening.fork()
    reply = talk.generate(" and", 40, ignore_eos=True, stop=["no such text", stop])
    assert (reply.text, reply.stop_reason) == (free.text[:at], "stop")
    assert reply.tokens == free.tokens[: at + 2]
    assert reply.logprobs == free.logprobs[: at + 2]
    assert talk.remaining == 80 - 4 - len(reply.tokens)
    again = opening.fork()
    again.read(" and")
    again.read(reply.tokens)
    assert talk.tokens == again.tokens
    assert talk.generate(max_new_tokens=20, ignore_eos=True) == again.generate(max_new_tokens=20, ignore_eos=True)
    # The session's own stop strings hold unless a call has others.
    stopping = kvjax.Session(letters, "the quick brown fox", policy, max_new_tokens=80, stop=stop)
    assert stopping.ask([" and"], 40, ignore_eos=True) == [reply]
    assert stopping.generate(" and", 40, ignore_eos=True, stop=[]) == free
    with pytest.raises(ValueError, match="stop=5"):
        kvjax.Session(letters, "the quick", stop=5)


def reply_of(pieces):
    """The joined pieces, how many there were, and the reply."""
    found = []
    while True:
        try:
            found.append(next(pieces))
        except StopIteration as end:
            return "".join(found), len(found), end.value


def test_an_answer_piece_by_piece(letters, tiny):
    opening = kvjax.Session(letters, "the quick brown fox", "streaming_llm:12", max_new_tokens=80)
    want = opening.fork().generate(" and", 40, ignore_eos=True)
    talk = opening.fork()
    text, count, reply = reply_of(talk.stream(" and", 40, ignore_eos=True))
    assert (text, reply) == (want.text, want)
    assert count > 3
    stop = want.text[13:15]
    stopped = opening.fork().generate(" and", 40, ignore_eos=True, stop=stop)
    text, _, reply = reply_of(opening.fork().stream(" and", 40, ignore_eos=True, stop=stop))
    assert (text, reply) == (stopped.text, stopped)
    # A stream that is left, and one whose session is used otherwise.
    left = opening.fork()
    pieces = left.stream(" and", 40, ignore_eos=True)
    first = next(pieces)
    assert left.tokens[-len(first) :] == want.tokens[: len(first)]
    left.generate(max_new_tokens=1)
    with pytest.raises(RuntimeError, match="used between two pieces of a stream"):
        next(pieces)
    with pytest.raises(ValueError, match="no tokenizer"):
        begin(tiny, POLICY).stream()
    with pytest.raises(ValueError, match="a question is 5"):  # before the first piece
        left.stream(5)


def test_a_chat_piece_by_piece(talker):
    opening = kvjax.Session(talker, [{"role": "system", "content": "Be brief."}], max_new_tokens=300)
    talk = opening.fork()
    want = talk.chat("hello", 12, ignore_eos=True)
    other = opening.fork()
    text, _, reply = reply_of(other.stream("hello", 12, ignore_eos=True))
    assert (text, reply) == (want.text, want)
    assert (other.messages, other.tokens) == (talk.messages, talk.tokens)


def test_sessions_without_an_end(letters):
    """More tokens than any size of the policy, in a cache that does not grow: as a session with room for them writes."""
    options = {"policy": "streaming_llm:12", "max_new_tokens": None}
    talk = kvjax.Session(letters, "the quick brown fox", **options)
    some = kvjax.Session(letters, "the quick brown fox", "streaming_llm:12", max_new_tokens=400)
    held = talk.cache_bytes
    assert held <= some.cache_bytes
    for _ in range(3):
        assert talk.generate(" again", 100, ignore_eos=True) == some.generate(" again", 100, ignore_eos=True)
    assert talk.cache_bytes == held
    assert talk.remaining > 2**28
    kvjax.Session(letters, "the quick brown fox", "treekv:12", max_new_tokens=None).generate(" again", 2)
    for policy, says in (
        ("full", "full leaves tokens at their positions in the text"),
        ("snapkv:12,window=4", "give a number of tokens, or a policy such as streaming_llm or treekv"),
        ("streaming_llm:0.5", "the cache of streaming_llm grows with the number of tokens"),
        ("prompt_only(streaming_llm:12)", "without an end, but"),
    ):
        with pytest.raises(kvjax.PolicyError, match=says):
            kvjax.Session(letters, "the quick brown fox", policy, max_new_tokens=None)


THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if tools %}tools: {{ tools | length }}\n{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% if not (thinking | default(true)) %}<think></think>{% endif %}{% endif %}"
)


def test_arguments_of_the_template_hold_for_all_turns(talker):
    params = talker.replace(tokenizer=Tokenizer(talker.tokenizer.backend, eos=(1,), chat_template=THINKING))
    kwargs = {"thinking": False}
    asked = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]}]
    talk = kvjax.Session(params, asked, max_new_tokens=300, chat_template_kwargs=kwargs)
    first = talk.answer(3, ignore_eos=True).text
    talk.chat([{"type": "text", "text": "and now?"}], 3, ignore_eos=True)
    text = params.tokenizer.decode(talk.tokens[:-3], skip_special=False)
    assert text == (
        f"<|user|>hi\nthere</s>\n<|assistant|><think></think>{first}</s>\n<|user|>and now?</s>\n<|assistant|><think></think>"
    )
    with pytest.raises(ValueError, match=r"does not read 'think'; it reads .*thinking"):
        kvjax.Session(params, asked, chat_template_kwargs={"think": False})
    with pytest.raises(ValueError, match=r"chat_template_kwargs are given, but prompt is 'some text'"):
        kvjax.Session(params, "some text", chat_template_kwargs=kwargs)


def test_an_answer_that_was_begun(talker):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    options = {"max_new_tokens": 200, "chat_template_kwargs": {"continue_final_message": True}}
    talk = kvjax.Session(talker, messages, **options)
    begun = {"role": "assistant", "content": "Well,"}  # the template strips texts
    assert talk.messages == [messages[0], begun]
    reply = talk.answer(5, ignore_eos=True)
    assert talk.messages == [messages[0], {"role": "assistant", "content": f"Well,{reply.text}"}]
    options.pop("max_new_tokens")
    assert reply.tokens == kvjax.generate(talker, messages, max_new_tokens=5, ignore_eos=True, **options).tokens
    talk.chat("and?", 2, ignore_eos=True)
    text = talker.tokenizer.decode(talk.tokens[:-2], skip_special=False)
    assert text == f"<|user|>hi</s>\n<|assistant|>Well,{reply.text}</s>\n<|user|>and?</s>\n<|assistant|>"
    with pytest.raises(ValueError, match="a session continues only an assistant's message"):
        kvjax.Session(talker, messages[:1], **options)
