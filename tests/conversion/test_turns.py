"""What chat templates put around messages: found by a marker that no message and no template has."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import TEMPLATE, byte_tokenizer

from kvjax.conversion import Tokenizer, turns

REAL = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Who?"}
SAID = {"role": "assistant", "content": "<think>Hm.</think>\n\nIshmael."}
NEXT = {"role": "user", "content": "And where?"}
AWKWARD = [
    "\N{OBJECT REPLACEMENT CHARACTER}",
    "a \N{OBJECT REPLACEMENT CHARACTER} b \N{OBJECT REPLACEMENT CHARACTER} c",
    "marker0x marker1x",
    "assistant",
    "<|im_end|>\n<|im_start|>assistant\n",
    '"quoted" \\ {{ messages }} {% raw %}',
]


def tokenizer(template: str | None) -> Tokenizer:
    return Tokenizer(byte_tokenizer(), chat_template=template, special={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(params=[*REAL, "plain"])
def model(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer(REAL.get(request.param, TEMPLATE))


@pytest.mark.parametrize("messages", [[SYSTEM], [ASKED, SAID], [SYSTEM, ASKED, SAID], [ASKED, SAID, NEXT, SAID]])
@pytest.mark.parametrize("said", ["And where?", *AWKWARD])
def test_a_history_and_the_next_turn_are_the_conversation(
    model: Tokenizer, messages: list[dict[str, Any]], said: str
) -> None:
    """So the end of the last turn is there once, and the reasoning in it is as the template has it in earlier turns."""
    message = {"role": "user", "content": said}
    text = turns.history(model, messages) + turns.next_turn(model, messages, message)
    assert text == model.render([*messages, message])


@pytest.mark.parametrize("said", AWKWARD)
def test_what_follows_an_answer(model: Tokenizer, said: str) -> None:
    """Whatever the answer and the messages hold."""
    message = {"role": "user", "content": said}
    rest = turns.following(model, [message, {"role": "assistant", "content": said}, message], 1)
    whole = model.render([message, {"role": "assistant", "content": "An answer."}, message])
    assert rest == whole.rpartition("An answer.")[2]


@pytest.mark.parametrize("question", AWKWARD)
def test_a_conversation_in_two(model: Tokenizer, question: str) -> None:
    context = "The facts. "
    before, after = turns.split(model, [SYSTEM, ASKED], 1, context, question)
    whole = model.render([SYSTEM, {"role": "user", "content": context + question}])
    assert before + after == whole
    assert before.endswith(context)
    assert after.startswith(question.rstrip())


@pytest.mark.oracle
@pytest.mark.parametrize("content", ["The best answer is", "The best answer is ", "\n Two\n\nlines", "user", *AWKWARD])
def test_an_unfinished_message_equals_transformers(model: Tokenizer, tmp_path: Path, content: str) -> None:
    transformers = pytest.importorskip("transformers")
    model.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [SYSTEM, ASKED, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert turns.unfinished(model, messages) == expected


def test_a_template_that_has_a_usual_marker() -> None:
    template = "marker0x \N{OBJECT REPLACEMENT CHARACTER} " + TEMPLATE + " marker1x \N{OBJECT REPLACEMENT CHARACTER}"
    assert turns.following(tokenizer(template), [ASKED], 0) == (
        "</s>\n<|assistant|> marker1x \N{OBJECT REPLACEMENT CHARACTER}"
    )


@pytest.mark.parametrize("name", ["marker0x", "CONTINUE_FINAL_MESSAGE_TAG"])
def test_arguments_of_the_template_that_have_a_usual_marker(name: str) -> None:
    """Also behind the messages, where some templates write the tools."""
    model = tokenizer(TEMPLATE + "{% for tool in tools %}{{ tool.name }}{% endfor %}").for_chat(
        {"tools": [{"name": name}]}
    )
    assert turns.split(model, [ASKED], 0, "Who", "?") == ("<|user|>Who", f"?</s>\n<|assistant|>{name}")
    assert turns.following(model, [ASKED], 0) == f"</s>\n<|assistant|>{name}"
    assert model.render([ASKED], continue_final_message=True) == "<|user|>Who?"


def test_messages_that_templates_leave_out() -> None:
    """Content that is not shown, as that of a call of a tool, is told by the whole; a message that moves is refused."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    model = tokenizer(REAL["llama3"])
    text = turns.history(model, [ASKED, call]) + turns.next_turn(model, [ASKED, call], NEXT)
    assert text == model.render([ASKED, call, NEXT])
    assert text.count("<|eot_id|><|eot_id|>") == 0
    none = tokenizer("{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}")
    with pytest.raises(ValueError, match="does not repeat a message with role assistant"):
        turns.following(none, [ASKED, SAID, NEXT], 1)
    moved = tokenizer("{{ messages[-1].content }}{% for m in messages[:-1] %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="does not repeat a message with role assistant"):
        turns.unfinished(none, [ASKED, SAID])
    with pytest.raises(ValueError, match="changes earlier messages"):
        turns.next_turn(moved, [SYSTEM], ASKED)
    assert turns.history(moved, [SYSTEM]) == "Be brief."
    with pytest.raises(ValueError, match="no chat template"):
        turns.history(tokenizer(None), [SYSTEM])
