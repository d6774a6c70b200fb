"""Several questions about one context, which is prefilled and compressed once, in a `Session`."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from kvjax.models import Params
from kvjax.policies import Policy
from kvjax.runtime.generation import Reply
from kvjax.runtime.session import Session

from .budgets import row_bytes
from .task import Example, Format


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question, its answer, and the resources used.

    Attributes:
        reply: the answer.
        context_tokens, question_tokens: tokens of the context, and tokens after it that no earlier question processed.
        cache_bytes, host_cache_bytes, full_cache_bytes: bytes of the session's cache, and of a full cache, on one
            device.
        prefill_seconds: this question's share of prefilling and compressing the context.
        decode_seconds: time to process the question and answer it.
    """

    reply: Reply
    context_tokens: int
    question_tokens: int
    cache_bytes: int
    host_cache_bytes: int
    full_cache_bytes: int
    prefill_seconds: float
    decode_seconds: float


def ask(
    params: Params,
    policy: Policy,
    form: Format,
    examples: Sequence[Example],
    prefill_block: int | None,
    mesh: Mesh | None = None,
) -> list[Asked]:
    """Answer the examples of one session, in their order.

    Args:
        params: the model.
        policy: the policy.
        form: how examples become tokens.
        examples: examples with one context.
        prefill_block: block size of chunked prefill, if any.
        mesh: devices, as for `Session`.

    Raises:
        ValueError: an example has stop strings, which sessions do not support.
        PolicyError: the policy cannot serve sequences of that length.
    """
    if any(example.stop for example in examples):
        raise ValueError("sessions do not support stop strings. Leave them out: answers end by themselves.")
    context, questions, most = plan(form, examples)
    begun = time.perf_counter()
    session = Session(params, context, policy, max_new_tokens=most, prefill_block=prefill_block, mesh=mesh)
    prefill_seconds = time.perf_counter() - begun - session.compile_seconds
    sizes = params.config, len(context) - 1, most + 1, params.dtype  # the context's last token is processed afterwards
    held: dict[str, Any] = {
        **row_bytes(policy, *sizes, prefill_block),
        "prefill_seconds": prefill_seconds / len(examples),
        "context_tokens": len(context),
    }
    found: list[Asked] = []
    for example, question in zip(examples, questions, strict=True):
        begun, compiled = time.perf_counter(), session.compile_seconds
        asked = session if example.history == "own" else session.fork()
        if (
            example.history == "own"
            and found
            and question[:1] == asked.tokens[-1:]
            and question[0] in params.config.eos
        ):
            question = question[1:]  # the previous answer already has this end token
        reply = asked.generate(question, example.max_new_tokens)
        seconds = time.perf_counter() - begun - (session.compile_seconds - compiled)
        found.append(Asked(reply, question_tokens=len(question), decode_seconds=seconds, **held))
        if example.history == "reference" and len(found) < len(examples):
            session.read([*question, *reference_answer(form, example)])
    return found


def plan(form: Format, examples: Sequence[Example]) -> tuple[list[int], list[list[int]], int]:
    """Token ids of a session's context and of its questions, and the maximum number of tokens after the context."""
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
    """Token ids of an example's reference answer, as if the model had given it."""
    return form.tokenizer.encode(", ".join(example.answers), add_special=False)
