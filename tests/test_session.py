"""Sessions against the same tokens read one by one, forks that do not disturb each other, and chats turn by turn."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import HF_CONFIG, write_hf

import kvjax
from kvjax import decoding, session
from kvjax.cache import layer_specs
from kvjax.sampling import Greedy

STEP = jax.jit(decoding.step, static_argnums=(0, 1))
RNG = np.random.default_rng(11)
PROMPT, FIRST, SECOND = (RNG.integers(0, 64, size).tolist() for size in (57, 9, 5))
ROOM = 60
POLICY = kvjax.ChunkKV(budget=0.3, chunk=4, window=4)


def by_hand(params, policy, pieces):
    """Each piece is read token by token after the prompt, then six tokens are drawn; draws by piece."""
    policy = policy.bind(params.config)
    specs = layer_specs(params.config, 1, len(PROMPT) - 1, ROOM + 1, params.dtype)
    ends, seed = jnp.zeros((0,), jnp.int32), jnp.zeros((1,), jnp.uint32)
    state, _ = decoding.prefill(policy, specs, params, *decoding.padded([PROMPT[:-1]]), seed, Greedy(), ends)
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
    return kvjax.Session(params, PROMPT, policy, room=ROOM)


def test_turns_are_read_into_the_compressed_cache(tiny, monkeypatch):
    """Two turns; then the same with pieces so short that the first turn takes three."""
    expected = by_hand(tiny, POLICY, [FIRST, SECOND])
    for piece in (session.PIECE, 4):
        monkeypatch.setattr(session, "PIECE", piece)
        talk = begin(tiny, POLICY)
        held = talk.cache_bytes
        assert [talk.generate(text, 6, ignore_eos=True).tokens for text in (FIRST, SECOND)] == expected
        assert talk.tokens == PROMPT + FIRST + expected[0] + SECOND + expected[1]
        assert talk.room == ROOM - 9 - 6 - 5 - 6
        assert talk.cache_bytes == held


def test_questions_are_asked_of_forks(tiny):
    talk = begin(tiny, POLICY)
    apart = [begin(tiny, POLICY).generate(question, 6, ignore_eos=True) for question in (FIRST, SECOND)]
    for _ in range(2):
        replies = talk.ask([FIRST, SECOND], 6, ignore_eos=True)
        assert [reply.tokens for reply in replies] == [reply.tokens for reply in apart]
    with pytest.raises(ValueError, match="no tokenizer"):
        talk.generate("", 6)
    with pytest.raises(ValueError, match="9 tokens are more than"):
        talk.generate(FIRST, ROOM - 8)
    assert (talk.tokens, talk.room) == (PROMPT, ROOM)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    path = tmp_path_factory.mktemp("talker") / "small"
    write_hf(path, HF_CONFIG | {"max_position_embeddings": 512}, tokenizer=True)
    from kvjax.conversion import load

    return load(path)


def test_a_chat_reads_what_the_template_says(talker):
    """After any turns the session has read what the template makes of the conversation, but for cut answers' missing ends."""
    talk = kvjax.Session(talker, [{"role": "system", "content": "Be brief."}], kvjax.StreamingLLM(budget=48), room=300)
    tokenizer = talker.tokenizer
    for message in ("hello", "and now?"):
        reply = talk.say(message, 5, ignore_eos=True)
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


def test_an_end_token_is_not_read_twice(talker, monkeypatch):
    """An answer that ends by itself has drawn the end that the template puts behind it."""
    talk = kvjax.Session(talker, [{"role": "user", "content": "hi"}], room=200)
    talk.answer(3, ignore_eos=True)
    talk._ids[-1], talk._unread = 1, [1]  # as if the last token drawn had been the end
    talk.say("again", 2)
    text = talker.tokenizer.decode(talk.tokens, skip_special=False)
    assert text.count("</s>\n<|user|>again</s>\n<|assistant|>") == 1
    assert "</s></s>" not in text


def test_what_a_session_refuses(tiny, talker):
    talk = begin(tiny, POLICY)
    with pytest.raises(ValueError, match="61 tokens are more than the session's room for 60"):
        talk.generate(max_new_tokens=61)
    with pytest.raises(ValueError, match="did not begin with chat messages"):
        talk.say("hello")
    with pytest.raises(ValueError, match="no message of the user's"):
        talk.answer()
    with pytest.raises(ValueError, match="two tokens or more"):
        kvjax.Session(tiny, PROMPT[:1])
    with pytest.raises(ValueError, match="room=0"):
        kvjax.Session(tiny, PROMPT, room=0)
    with pytest.raises(ValueError, match="assistant's turn"):
        kvjax.Session(talker, [{"role": "user", "content": "hi"}], room=200).say("again")
