"""Tokenizers: encoding, chat templates, and those rebuilt from GGUF metadata."""

import copy
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from checkpoints import TEMPLATE, byte_tokenizer, default_model

from kvjax.conversion import CheckpointError, Tokenizer
from kvjax.conversion.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer
from kvjax.models import Params

TEXTS = [
    "Hello, world!",
    "In 2024 there were 365 + 1 = 366 days; 1,000,000.5",
    "naïve café — “quotes” ½ ☕",
    "日本語のテキスト 한국어 😀👩‍👩‍👧‍👦",
    "def f(x):\n    return x ** 2\n\n\n# done\t",
    "   leading and trailing   ",
    "I'm you're THEY'LL don't",
    "",
]
MESSAGES = [{"role": "user", "content": " hello "}, {"role": "assistant", "content": "hell"}]


def small(**options: Any) -> Tokenizer:
    return Tokenizer(
        byte_tokenizer(),
        **{"eos": (1,), "bos": 0, "chat_template": TEMPLATE, "special": {"eos_token": "</s>"}} | options,
    )


@pytest.mark.parametrize("text", TEXTS)
def test_decode_inverts_encode(text: str) -> None:
    tokenizer = small()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_attributes() -> None:
    tokenizer = small()
    assert (tokenizer.eos, tokenizer.bos, tokenizer.vocab_size) == ((1,), 0, 261)
    assert tokenizer.encode("hell</s>") == [260, 1]
    assert tokenizer.decode([260, 1]) == "hell"
    assert tokenizer.decode([260, 1], skip_special=False) == "hell</s>"


def test_equal_by_content() -> None:
    tokenizer = small()
    assert tokenizer == small()
    assert hash(tokenizer) == hash(small())
    assert copy.deepcopy(tokenizer) == tokenizer
    for other in (small(eos=(2,)), small(bos=None), small(chat_template=None), small(special={}), "tokenizer"):
        assert tokenizer != other
    backend = byte_tokenizer()
    backend.add_tokens(["new"])
    assert tokenizer != Tokenizer(backend, eos=(1,), bos=0, chat_template=TEMPLATE, special={"eos_token": "</s>"})


def test_equal_tokenizers_share_a_compiled_program(tiny: Params) -> None:
    traces = []

    @jax.jit
    def first(params: Params) -> jax.Array:
        traces.append(params.tokenizer)
        return params.norm[0]

    first(tiny.replace(tokenizer=small()))
    first(tiny.replace(tokenizer=small()))
    assert len(traces) == 1
    first(tiny.replace(tokenizer=small(bos=None)))
    assert len(traces) == 2


def test_files(tmp_path: Path) -> None:
    tokenizer = small(special={"eos_token": "</s>", "bos_token": "<s>"})
    assert Tokenizer.from_directory(tmp_path) is None
    tokenizer.save(tmp_path)
    assert Tokenizer.from_directory(tmp_path) == tokenizer, "ids of special tokens follow from their texts"
    assert Tokenizer.from_directory(tmp_path, eos=(5,)) != tokenizer

    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["eos_token"] = {"content": "</s>", "lstrip": False}
    config["chat_template"] = [{"name": "tools", "template": "?"}, {"name": "default", "template": TEMPLATE}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_directory(tmp_path) == tokenizer, "older spellings"

    (tmp_path / "chat_template.jinja").write_text("its own file")
    found = Tokenizer.from_directory(tmp_path)
    assert found is not None
    assert found.chat_template == "its own file"

    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: not valid JSON"):
        Tokenizer.from_directory(tmp_path)


def test_chat() -> None:
    tokenizer = small()
    text = "<|user|>hello</s>\n<|assistant|>hell</s>\n"
    assert tokenizer.render(MESSAGES, add_generation_prompt=False) == text
    assert tokenizer.chat(MESSAGES) == tokenizer.encode(text + "<|assistant|>")
    assert tokenizer.chat(MESSAGES).count(1) == 2, "special tokens of the template are tokens"


def test_chat_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"this model has no chat template.*pass the prompt as a string"):
        small(chat_template=None).chat(MESSAGES)
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="chat template refuses these messages: roles must alternate"):
        small(chat_template=refusing).chat(MESSAGES)
    with pytest.raises(ValueError, match="chat template refuses these messages"):
        small(chat_template="{% for %}").chat(MESSAGES)
    with pytest.raises(ValueError, match="chat template refuses these messages"):
        small(chat_template="{{ 'a' + messages[0]['content'] }}").chat([{"role": "user", "content": 5}])


def test_templates_cannot_reach_python() -> None:
    for escape in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['os'] }}",
    ):
        with pytest.raises(ValueError, match="chat template refuses"):
            small(chat_template=escape).render(MESSAGES)


def test_blocks_of_templates_leave_no_space() -> None:
    """A line that holds a block alone gives nothing, indented or not: templates are written for that."""
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert small(chat_template=source).render([{"role": "user", "content": "hi"}]) == "hi\n"


def test_template_helpers() -> None:
    source = "{{ messages[0] | tojson }} {% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}x{% endfor %}"
    messages = [{"role": "user", "content": "<é>"}]
    assert small(chat_template=source).render(messages) == '{"role": "user", "content": "<é>"} '
    year = small(chat_template="{{ strftime_now('%Y') }}").render(messages)
    assert year.isdigit()
    assert len(year) == 4


@pytest.mark.oracle
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_equals_transformers(tmp_path: Path, prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{%- if messages[0].role == 'system' %}\n    {{- messages[0].content }}\n{%- endif %}\n"
        "{% for m in messages %}\n    {% if loop.last %}last {% endif %}\n  {{ bos_token }}{{ m | tojson }}\n"
        "{% endfor %}\n{% if add_generation_prompt %}<|assistant|>{% endif %}\n"
    )
    for source in (TEMPLATE, template):
        tokenizer = small(chat_template=source, special={"bos_token": "<s>", "eos_token": "</s>"})
        tokenizer.save(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, tokenize=False)
        assert tokenizer.render(MESSAGES, add_generation_prompt=prompt) == expected
        assert tokenizer.chat(MESSAGES, add_generation_prompt=prompt) == theirs.encode(
            expected, add_special_tokens=False
        )


def sentencepiece(prefix: bool | None = True) -> Tokenizer:
    """A SentencePiece vocabulary as GGUF describes it: specials, all bytes, some letters and words with scores.

    Args:
        prefix: the field `add_space_prefix`; None omits it.
    """
    pieces = [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "he",
        "ll",
        "hell",
        "lo",
        "▁w",
        "▁hell",
        "▁hello",
        "▁world",
        "or",
        "ld",
        "orld",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    scores[-1], scores[-2], scores[-3], scores[-4] = -3.0, -2.0, -2.5, -1.0
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
    } | ({} if prefix is None else {"tokenizer.ggml.add_space_prefix": prefix})
    found = read_tokenizer(metadata, eos=(2,), bos=1, source=Path("m.gguf"))
    assert found is not None
    return found


def test_sentencepiece_from_gguf() -> None:
    tokenizer = sentencepiece()
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("hello world")] == ["<s>", "▁hello", "▁world"]
    assert tokenizer.encode("é", add_special=False) == [259, 3 + 0xC3, 3 + 0xA9], "bytes where there is no piece"
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.special == {"bos_token": "<s>", "eos_token": "</s>"}
    bare = sentencepiece(prefix=False)
    assert bare.backend.id_to_token(bare.encode("hell")[1]) == "hell"
    assert sentencepiece(prefix=None) == tokenizer, "a space is added unless the file says otherwise"


def byte_level(pre: str, **fields: Any) -> Tokenizer | None:
    backend = byte_tokenizer()
    tokens = [backend.id_to_token(i) for i in range(261)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "12", "345", "34", "user"],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "1 2", "3 4", "34 5"],
        "tokenizer.ggml.token_type": [3, 3] + [1] * 262 + [4],
        "tokenizer.chat_template": TEMPLATE,
    } | {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return read_tokenizer(metadata, eos=(1,), bos=0, source=Path("m.gguf"))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4", "5", "Ġ", "1", "2"]),
        ("gpt-2", ["12", "345", "Ġ", "12"]),
        ("llama-bpe", ["12", "3", "4", "5", "Ġ", "12"]),  # groups of three digits from the left: 123, 45
        ("qwen2", ["1", "2", "3", "4", "5", "Ġ", "1", "2"]),
        ("default", ["12", "3", "4", "5", "Ġ", "12"]),
        ("tekken", ["1", "2", "3", "4", "5", "Ġ", "1", "2"]),
        ("gpt-4o", ["12", "3", "4", "5", "Ġ", "12"]),
    ],
)
def test_digits_by_pre_tokenizer(pre: str, pieces: list[str]) -> None:
    tokenizer = byte_level(pre)
    assert tokenizer is not None
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("12345 12", add_special=False)] == pieces


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_is_lossless(pre: str) -> None:
    tokenizer = byte_level(pre)
    assert tokenizer is not None
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("hell user</s>")[-4:] == [260, tokenizer.encode(" ", add_special=False)[0], 264, 1]


def test_start_token_from_gguf() -> None:
    for pre, fields, starts in (
        ("llama-bpe", {}, True),
        ("smollm", {}, False),
        ("smollm", {"add_bos_token": True}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ):
        tokenizer = byte_level(pre, **fields)
        assert tokenizer is not None
        assert (tokenizer.encode("hell")[0] == 0) is starts
        assert tokenizer.encode("hell", add_special=False) == [260]


def test_unknown_gguf_tokenizers_leave_the_model_usable() -> None:
    with pytest.warns(
        UserWarning, match=r"unknown tokenizer.ggml.pre 'martian' .*prompts given as token ids still work"
    ):
        assert byte_level("martian") is None
    with pytest.warns(UserWarning, match=r"unknown tokenizer.ggml.model 't5' \(known: gpt2, llama\)"):
        assert byte_level("smollm", model="t5") is None
    assert read_tokenizer({}, eos=(), bos=None, source=Path("m.gguf")) is None


def test_contradictory_gguf_tokenizers() -> None:
    with pytest.raises(CheckpointError, match=r"m.gguf: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens"):
        byte_level("smollm", merges=["q z"])
    with pytest.raises(
        CheckpointError, match=r"m.gguf: tokenizer.ggml.scores needs one score for each of the 265 tokens"
    ):
        byte_level("smollm", model="llama", scores=[0.0])


def test_default_model_splits_every_digit() -> None:
    tokenizer = default_model().tokenizer()
    ids = tokenizer.encode("Call 5551234 at 10:45, 2024.")
    assert all(sum(c.isdigit() for c in tokenizer.decode([i])) <= 1 for i in ids)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.render([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.chat([{"role": "user", "content": "Hi"}])[0] == 1


def test_ids_far_apart_are_refused(tmp_path: Path) -> None:
    small().save(tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    fields["model"]["vocab"]["hell"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"tokenizer.json: token 'hell' has id 2147483648; it should be below"):
        Tokenizer.from_directory(tmp_path)


def test_text_that_is_none() -> None:
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text"):
        small().encode("half of a pair: \ud83d")
