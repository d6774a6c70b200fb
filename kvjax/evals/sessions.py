"""Asking the questions of one context: a `Session` prefills and compresses the context once for all of them."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from kvjax.models import Params
from kvjax.policies import Policy
from kvjax.runtime.generation import Reply
from kvjax.runtime.session import Session

from .task import Example, Format


class Answered(NamedTuple):
    """The answer to one example, and the time it took.

    Attributes:
        context_tokens: tokens of the context.
        question_tokens: tokens that were read after the context was compressed, for this example alone.
        prefill_seconds: this example's share of prefilling and compressing the context.
        decode_seconds: its share of reading the question and generating the answer.
    """

    reply: Reply
    context_tokens: int
    question_tokens: int
    prefill_seconds: float
    decode_seconds: float


def ask(
    params: Params,
    policy: Policy,
    form: Format,
    examples: Sequence[Example],
    prefill_block: int | None,
    mesh: Mesh | None = None,
) -> list[Answered]:
    """Answers to the examples of one session, in their order.

    Args:
        prefill_block, mesh: as for `kvjax.Session`.

    Raises:
        ValueError: an example has stop strings. Their tokens would be part of the session's history.
        PolicyError: the policy cannot work with sequences of this length.
    """
    if any(example.stop for example in examples):
        raise ValueError(
            "questions of a session have stop strings; leave them out, answers there end at the model's end tokens"
        )
    context, questions, most = plan(form, examples)
    begun = time.perf_counter()
    session = Session(params, context, policy, max_new_tokens=most, prefill_block=prefill_block, mesh=mesh)
    prefill_seconds = (time.perf_counter() - begun - session.compile_seconds) / len(examples)
    found: list[Answered] = []
    for example, question in zip(examples, questions, strict=True):
        begun, compiled = time.perf_counter(), session.compile_seconds
        asked = session if example.history == "own" else session.fork()
        if (
            example.history == "own"
            and found
            and question[:1] == asked.tokens[-1:]
            and question[0] in params.config.eos
        ):
            question = question[1:]  # the answer before it ended with this end token
        reply = asked.generate(question, example.max_new_tokens)
        seconds = time.perf_counter() - begun - (session.compile_seconds - compiled)
        found.append(Answered(reply, len(context), len(question), prefill_seconds, seconds))
        if example.history == "reference" and len(found) < len(examples):
            session.read([*question, *reference_answer(form, example)])
    return found


def plan(form: Format, examples: Sequence[Example]) -> tuple[list[int], list[list[int]], int]:
    """Token ids of a session's context and of its questions, and the maximum number of tokens that follow the context."""
    context, first = form.encode(examples[0])
    if examples[0].history == "none":
        questions = [form.encode(example)[1] for example in examples]
        return (
            context,
            questions,
            max(len(question) + example.max_new_tokens for question, example in zip(questions, examples, strict=True)),
        )
    questions = [first, *(form.encode_next(example) for example in examples[1:])]
    most = sum(
        len(question) + max(example.max_new_tokens, len(reference_answer(form, example)))
        for question, example in zip(questions, examples, strict=True)
    )
    return context, questions, most


def reference_answer(form: Format, example: Example) -> list[int]:
    """Token ids of an example's reference answer, as if the model had generated it."""
    return form.tokenizer.encode(", ".join(example.answers), add_special=False)
