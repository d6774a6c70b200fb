"""Tokenizers: encoding, chat templates, and those rebuilt from GGUF metadata."""

import base64
import copy
import datetime
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import TEMPLATE, byte_tokenizer, default_model
from tokenizers import processors

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


def test_the_time_that_templates_see() -> None:
    tokenizer = small(chat_template="{{ strftime_now('%d %b %Y %H:%M:%S.%f %z') }}")
    now = datetime.datetime(2024, 7, 26, 1, 2, 3, 4)
    fixed = tokenizer.at(now)
    assert fixed.render(MESSAGES) == "26 Jul 2024 01:02:03.000004 "
    assert fixed.at(now.replace(tzinfo=datetime.UTC)).render(MESSAGES).endswith(" +0000")
    assert (fixed, hash(fixed)) == (tokenizer.at(now), hash(tokenizer.at(now)))
    assert fixed != tokenizer
    assert fixed.at(None) == tokenizer
    assert fixed.now == now
    assert abs(float(small(chat_template="{{ strftime_now('%s') }}").render(MESSAGES)) - time.time()) < 60, "the clock"


def test_a_text_has_one_start_token(tmp_path: Path) -> None:
    """Of a configuration that asks for it, whatever `tokenizer.json` adds; and none more where a text begins with it already."""
    post = [
        None,
        processors.ByteLevel(),
        processors.TemplateProcessing(single=["$A", "</s>"], pair=["$A", "$B"], special_tokens=[("</s>", 1)]),
        processors.TemplateProcessing(single=["<s>", "$A"], pair=["<s>", "$A", "$B"], special_tokens=[("<s>", 0)]),
    ]
    post.append(processors.Sequence([post[1], post[2]]))
    for i, each in enumerate(post):
        backend = byte_tokenizer()
        if each is not None:
            backend.post_processor = each
        end = [1] if i in (2, 4) else []
        backend.save(str(tmp_path / "tokenizer.json"))
        for fields, begun in (
            ({}, i == 3),
            ({"add_bos_token": False}, i == 3),
            ({"add_bos_token": True}, True),
            ({"add_bos_token": True, "bos_token": None}, i == 3),
            ({"add_bos_token": True, "bos_token": "unknown"}, i == 3),
        ):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"} | fields))
            tokenizer = Tokenizer.from_directory(tmp_path)
            assert tokenizer is not None
            start = [0] if begun else []
            assert tokenizer.encode("hell") == [*start, 260, *end]
            assert tokenizer.encode("") == [*start, *end]
            assert tokenizer.encode("<s>hell") == [0, 260, *end]
            assert tokenizer.encode("<s><s>hell") == [0, 0, 260, *end]
            assert tokenizer.encode("hell", add_special=False) == [260]
            (tmp_path / "saved").mkdir(exist_ok=True)
            tokenizer.save(tmp_path / "saved")
            again = Tokenizer.from_directory(tmp_path / "saved")
            assert again is not None
            assert again.encode("hell") == tokenizer.encode("hell")
    hand = sentencepiece()
    assert hand.encode("<s>hello") == [1, *hand.encode("hello", add_special=False)]


GENERATION = (
    "{%- for m in messages %}\n  {%- set x = 1 %}\n  {%- if m.role == 'assistant' %}\n"
    "{% generation %}\n    {%- set x = 2 %}\n{{ m.content | trim }} {{ x }}{{ loop.index }}\n  {% endgeneration %}\n"
    "{%- else %}\n{{ x }}{{ m.content }}{% generation %}{% endgeneration %}{%- endif %}\n{{ x }}{%- endfor %}"
)
FIELDS = (
    "{% for m in messages %}{{ m.content is defined }} {{ m.tool_calls is defined }} {{ m.thinking }} {{ m.reasoning_content }} "
    "{{ m.reasoning }} {{ m | tojson(sort_keys=true) }}\n{% endfor %}"
)
CALLS: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": "hi",
        "name": None,
        "number": 1.5,
        "yes": True,
        "tuple": (1, "é"),
        "more": {"x": [None, {}]},
    },
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]},
    {"role": "assistant", "content": "a", "reasoning": "b"},
    {"role": "assistant", "content": "a", "thinking": "b"},
    {"role": "assistant", "content": "a", "reasoning_content": "b", "thinking": None},
    {"role": "assistant", "content": "a", "tool_calls": None},
]


def test_generation_blocks_are_rendered_as_they_are() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}"
    assert small(chat_template=source).render(MESSAGES) == " hello .hell."


@pytest.mark.oracle
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_equals_transformers(tmp_path: Path, prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{%- if messages[0].role == 'system' %}\n    {{- messages[0].content }}\n{%- endif %}\n"
        "{% for m in messages %}\n    {% if loop.last %}last {% endif %}\n  {{ bos_token }}{{ m | tojson }}\n"
        "{% endfor %}\n{% if add_generation_prompt %}<|assistant|>{% endif %}\n"
    )
    for source in (TEMPLATE, template, GENERATION):
        tokenizer = small(chat_template=source, special={"bos_token": "<s>", "eos_token": "</s>"})
        tokenizer.save(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, tokenize=False)
        assert tokenizer.render(MESSAGES, add_generation_prompt=prompt) == expected
        assert tokenizer.chat(MESSAGES, add_generation_prompt=prompt) == theirs.encode(
            expected, add_special_tokens=False
        )
    small(chat_template=FIELDS).save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert small(chat_template=FIELDS).render(CALLS) == theirs.apply_chat_template(CALLS, tokenize=False)
    strange = [
        {"role": "user", "content": "hi", "x": np.float32(1.5), "y": np.arange(3), "z": b"bytes", "w": np.int64(3)}
    ]
    assert small(chat_template=FIELDS).render(strange) == theirs.apply_chat_template(strange, tokenize=False)


TOOL = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time, <now> & here.",
        "parameters": {"type": "object", "properties": {}},
    },
}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": " are you?"}]}]
READS_PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}</s>\n{% endfor %}"
    "{% for d in documents or [] %}{{ d.title }}{% endfor %}"
)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["llama3", "qwen2.5", "qwen3", "parts"])
def test_template_arguments_equal_transformers(tmp_path: Path, name: str) -> None:
    """Tools, documents, thinking, the date, messages in parts, and messages to continue."""
    transformers = pytest.importorskip("transformers")
    file = Path(__file__).parent / "templates" / f"{name}.jinja"
    source = READS_PARTS if name == "parts" else file.read_text()
    tokenizer = small(chat_template=source, special={"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    user = [{"role": "user", "content": "Who are you?"}]
    begun = [*user, {"role": "assistant", "content": "I am "}]
    cases: list[tuple[list[Any], dict[str, Any]]] = [(begun, {"continue_final_message": True})]
    if name == "parts":
        documents = [{"title": "Moby-Dick", "text": "Call me"}]
        begun_parts = [*user, {"role": "assistant", "content": PARTS[0]["content"]}]
        cases += [(PARTS, {}), (begun_parts, {"continue_final_message": True}), (user, {"documents": documents})]
    else:
        cases += [(user, {"tools": [TOOL]}), (user, {"tools": [TOOL, TOOL]}), (user, {"tools": None})]
    if name == "llama3":
        cases.append((user, {"date_string": "1 May 2025"}))
    if name == "qwen3":
        cases += [(user, {"enable_thinking": False}), (user, {"enable_thinking": True, "tools": [TOOL]})]
    for messages, arguments in cases:
        continued = arguments.get("continue_final_message", False)
        own = {key: value for key, value in arguments.items() if key != "continue_final_message"}
        got = tokenizer.for_chat(own).render(messages, continue_final_message=continued)
        want = theirs.apply_chat_template(messages, add_generation_prompt=not continued, tokenize=False, **arguments)
        assert got == want
        assert not continued or got.endswith(("I am ", "I am", "are you?"))


def test_parts_of_templates_that_read_text() -> None:
    """They are joined; a template that reads one part otherwise than its text is taken to read text."""
    strings = "{% for m in messages %}{{ m.content }};{% endfor %}"
    assert small(chat_template=strings).render(PARTS) == "Who \n are you?;"
    assert small(chat_template=READS_PARTS).render(PARTS) == "<|user|>Whoare you?</s>\n"


def test_what_template_arguments_refuse() -> None:
    tokenizer = small(chat_template=TEMPLATE)
    for arguments, says in (
        ({"messages": []}, "chat_template_kwargs has 'messages', which the prompt determines"),
        ({"tools": {"type": "function"}}, "tools is {'type': 'function'}; give a list of JSON schemas"),
        ({"tools": [len]}, r"tools\[0\] is <built-in function len>; give JSON schemas"),
        ({"documents": ["text"]}, r"documents\[0\] is 'text'; give dictionaries"),
        ({1: 2}, "give a dictionary of the template's arguments by name"),
    ):
        with pytest.raises(ValueError, match=says):
            tokenizer.for_chat(arguments)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"it does not read 'tools'; it reads .*messages"):
        tokenizer.for_chat({"tools": [TOOL]}).render(MESSAGES)
    with pytest.raises(ValueError, match="the last message has no text to continue"):
        tokenizer.render([{"role": "assistant", "content": None}], continue_final_message=True)
    with pytest.raises(ValueError, match="does not repeat the last message unchanged"):
        small(chat_template="{{ messages[0].content }}").render(MESSAGES, continue_final_message=True)
    assert tokenizer.for_chat({"x": 1}) != tokenizer
    assert tokenizer.for_chat({}) == tokenizer


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


PHI3 = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
"""Phi-3's special tokens, which follow its bytes and pieces."""

PHI3_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def phi3_metadata(architecture: str = "phi3") -> dict[str, Any]:
    pieces = ["▁", "H", "i", "Hi", "▁Hi", "▁▁"]
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*PHI3[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *PHI3[3:]],
        "tokenizer.ggml.scores": [0.0] * 259 + [-5.0, -6.0, -7.0, -2.0, -1.0, -3.0] + [0.0] * 5,
        "tokenizer.ggml.token_type": [2, 3, 1] + [6] * 256 + [1] * len(pieces) + [3] * 5,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": PHI3_TEMPLATE,
    }


def texts_of(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    return [tokenizer.backend.id_to_token(i) for i in ids]


@pytest.mark.filterwarnings("error")
@pytest.mark.oracle
def test_phi3_chats_from_gguf(tmp_path: Path) -> None:
    """Its markers swallow the space or the newline behind them, as those of the `tokenizer.json` that Phi-3 comes with."""
    transformers = pytest.importorskip("transformers")
    tokenizer = read_tokenizer(phi3_metadata(), eos=(), bos=1, source=Path("m.gguf"))
    assert tokenizer is not None
    assert texts_of(tokenizer, tokenizer.chat([{"role": "user", "content": "Hi"}])) == (
        ["<|user|>", "▁Hi", "<|end|>", "<|assistant|>"]
    )
    for text in ("<|user|> \n Hi", "</s>  Hi", "<s>  Hi", "<|endoftext|> Hi", "<unk>\nHi", "Hi<|end|>Hi"):
        strips = not text.startswith(("<s>", "<unk>", "<|endoftext|>"))
        assert (texts_of(tokenizer, tokenizer.encode(text, add_special=False))[1] in ("▁Hi", "<|end|>")) is strips
    other = read_tokenizer(phi3_metadata("llama"), eos=(), bos=1, source=Path("m.gguf"))
    assert other is not None
    assert texts_of(other, other.encode("<|user|>\nHi", add_special=False))[1:] == ["▁", "<0x0A>", "Hi"]
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.render([{"role": "system", "content": "Hi "}, {"role": "user", "content": " Hi"}])
    assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special=False)


def test_phi4_chats_from_gguf() -> None:
    """Byte-level, of which the markers of turns swallow what is behind them, and others do not."""
    backend = byte_tokenizer()
    tokens = [backend.id_to_token(i) for i in range(261)] + ["<|user|>", "<|end|>", "<|tool|>"]
    metadata = {
        "general.architecture": "phi3",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-4o",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.token_type": [3, 3] + [1] * 259 + [3] * 3,
    }
    tokenizer = read_tokenizer(metadata, eos=(1,), bos=0, source=Path("m.gguf"))
    assert tokenizer is not None
    space = tokenizer.encode(" ", add_special=False)
    assert tokenizer.encode("<|user|> hell<|end|> <|tool|> ", add_special=False) == [261, 260, 262, 263, *space]


@pytest.mark.parametrize("token_type", [1, 3, 4])
def test_tokens_that_end_an_answer_are_special(token_type: int) -> None:
    """Whatever type a file gives them: their text is no text of an answer."""
    metadata = phi3_metadata() | {"tokenizer.ggml.token_type": [2, 3, 1] + [6] * 256 + [1] * 6 + [token_type] * 5}
    tokenizer = read_tokenizer(metadata, eos=(), bos=1, source=Path("m.gguf"))
    assert tokenizer is not None
    end = metadata["tokenizer.ggml.tokens"].index("<|end|>")
    assert tokenizer.encode("<|end|>", add_special=False) == [end]
    assert tokenizer.is_silent(end)
    assert tokenizer.is_silent(2)


def test_a_padding_token_beyond_the_vocabulary_is_none() -> None:
    for beyond in (265, 2**32 - 1):
        tokenizer = byte_level("smollm", padding_token_id=beyond, eos_token_id=1)
        assert tokenizer is not None
        assert tokenizer.special == {"eos_token": "</s>"}
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.unknown_token_id is 265; it should be below 265"):
        byte_level("smollm", unknown_token_id=265)


def test_many_long_tokens_are_refused() -> None:
    """How each is merged is found by all ways to cut it: of these, for minutes."""
    metadata = phi3_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"], *(f"{i:01024}" for i in range(300))]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * len(tokens)}
    metadata["tokenizer.ggml.token_type"] = [1] * len(tokens)
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.tokens has too many long tokens"):
        read_tokenizer(metadata, eos=(), bos=1, source=Path("m.gguf"))


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
        ("seed-coder", ["1", "2", "3", "4", "5", "Ġ", "1", "2"]),
        ("default", ["12", "3", "4", "5", "Ġ", "12"]),
        ("tekken", ["1", "2", "3", "4", "5", "Ġ", "1", "2"]),
        ("gpt-4o", ["12", "3", "4", "5", "Ġ", "12"]),
    ],
)
def test_digits_by_pre_tokenizer(pre: str, pieces: list[str]) -> None:
    tokenizer = byte_level(pre)
    assert tokenizer is not None
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("12345 12", add_special=False)] == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"), [("qwen2", ["hell", "!?\n\n", "he"]), ("seed-coder", ["hell", "!?", "\n\n", "he"])]
)
def test_line_ends_by_pre_tokenizer(pre: str, pieces: list[str]) -> None:
    """Seed's keeps them apart from the punctuation before them."""
    tokenizer = byte_level(pre)
    assert tokenizer is not None
    split = tokenizer.backend.pre_tokenizer.pre_tokenize_str("hell!?\n\nhe")
    assert [text.replace("Ċ", "\n") for text, _ in split] == pieces


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
        ("tekken", {}, True),
        ("tekken", {"add_bos_token": False}, False),
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


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLE = replaced({"String": "a"}, "aa")
CHARSMAP = base64.b64encode((0).to_bytes(4, "little") + b"x" * 5000 + b"\0").decode()
PIECES = {"A": {"Sequence": {"id": "A", "type_id": 0}}, "x": {"SpecialToken": {"id": "x", "type_id": 0}}}


def template(single: list[Any], ids: int = 1) -> dict[str, Any]:
    token = {"id": "x", "ids": [0] * ids, "tokens": ["x"] * ids}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {"x": token}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 30}},
            r"normalizer may make .* 1.074e\+09 times",
        ),
        (
            {"normalizer": replaced({"String": "ab"}, "b" * 200)},
            "normalizer may make a text 100 times as long; 64 times",
        ),
        ({"normalizer": replaced({"Regex": "(?=.)"}, "b" * 99)}, "normalizer may make a text 100 times as long"),
        ({"normalizer": {"pattern": {"String": "a"}, "content": "b" * 99}}, "may make a text 99 times as long"),
        ({"normalizer": {"type": "Prepend", "prepend": "b" * 99}}, "normalizer may make a text 100 times as long"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}}, "may make a text 138.9 times"),
        ({"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 7}}, "decoder may make a text 128 times as long"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 7}}, "128 times"),
        ({"post_processor": template([PIECES["A"]] * 65)}, "post_processor joins 65 parts; 64 are allowed"),
        ({"post_processor": template([PIECES["A"], PIECES["x"]], 65)}, "post_processor adds 65 tokens at once"),
        (
            {"added_tokens": [{"id": 0, "content": "b" * 1025}]},
            "the token 'b+\\.\\.\\.b+' has 1025 characters; 1024 are",
        ),
        ({"model": {"type": "WordPiece", "vocab": {"b" * 1025: 0}}}, "has 1025 characters"),
        ({"model": {"type": "Unigram", "vocab": [["b" * 1025, 0.0]]}}, "has 1025 characters"),
        ({"model": {"type": "BPE", "vocab": {}, "end_of_word_suffix": "b" * 1025}}, "has 1025 characters"),
    ],
)
def test_small_texts_stay_small(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    """A file that would make gigabytes of a few characters is refused before the library reads it."""
    small().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=rf"tokenizer.json: not a tokenizer that can be used \(.*{told}"):
        Tokenizer.from_directory(tmp_path)


def test_many_lists_are_refused(tmp_path: Path) -> None:
    """A file of nothing but lists takes 2 GB and a quarter of a minute."""
    (tmp_path / "tokenizer.json").write_text('{"x": [' + "[]," * (1 << 22) + "[]]}")
    with pytest.raises(
        CheckpointError, match=r"tokenizer.json: .*it has 4194307 lists and objects; 4194304 are allowed"
    ):
        Tokenizer.from_directory(tmp_path)


def test_keys_that_are_there_twice(tmp_path: Path) -> None:
    """The library takes the first normalizer where the second is null, JSON's readers the second."""
    small().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    steps = json.dumps({"type": "Sequence", "normalizers": [DOUBLE] * 30})
    file.write_text(f'{{"normalizer": {steps}, {file.read_text().strip()[1:]}')
    with pytest.raises(CheckpointError, match=r"tokenizer.json: .*duplicate key normalizer"):
        Tokenizer.from_directory(tmp_path)


def test_usual_steps_are_within_bounds(tmp_path: Path) -> None:
    """Those of SentencePiece's vocabularies, and of CLIP's."""
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        replaced({"String": " "}, "▁"),
        replaced({"Regex": r"\s+"}, " "),
        replaced({"String": "``"}, '"'),
        {"type": "NFKC"},
        {"type": "Lowercase"},
    ]
    backend = byte_tokenizer()
    fields = json.loads(backend.to_str()) | {"normalizer": {"type": "Sequence", "normalizers": steps}}
    small().save(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    found = Tokenizer.from_directory(tmp_path)
    assert found is not None
    assert found.encode("HE") == found.encode("he")
