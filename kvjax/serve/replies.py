"""Answers in OpenAI's format, whole or in chunks."""

import dataclasses
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from kvjax.conversion.tokenizer import Tokenizer

from .cache_report import CacheReporter, CacheSizes
from .reasoning import thought_tokens
from .schema import ChatRequest, CompletionRequest
from .serving import Choice, NewToken, Running

Tokens = Sequence[NewToken]

LOWEST = -9999.0
"""Sent in place of lower log-probabilities, as JSON has no infinity."""


@dataclasses.dataclass(frozen=True)
class Maker:
    """What all answers of a server have in common.

    Attributes:
        model: name of the model.
        fingerprint: changes when anything changes that tokens depend on.
        tokenizer: the model's tokenizer.
        caches: sizes of caches, for reports.
    """

    model: str
    fingerprint: str
    tokenizer: Tokenizer | None
    caches: CacheSizes

    def text(self, token: int) -> str:
        """Text of a single token, also of a special one."""
        return "" if self.tokenizer is None else self.tokenizer.decode([token], skip_special=False)


def finish_reason(choice: Choice) -> str | None:
    """OpenAI's word for why a choice has ended; None if it goes on."""
    reason = choice.row.stop_reason
    if reason in ("eos", "stop"):
        return "tool_calls" if choice.parser.called else "stop"
    return reason


def usage(running: Running, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Numbers of tokens. A prompt counts once, however many sequences continue it."""
    prompt = sum(len(prompt.ids) for prompt in running.prompts)
    new = sum(len(choice.row.tokens) for choice in running.choices)
    found: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    cached = sum({id(choice.row.prompt): choice.reused for choice in running.choices}.values())
    found["prompt_tokens_details"] = {"cached_tokens": cached}
    thinking = [choice for choice in running.choices if choice.parsing.thoughts]
    if thinking and tokenizer is not None:
        count = sum(thought_tokens(tokenizer, each.row.tokens, each.parsing.opened) for each in thinking)
        found["completion_tokens_details"] = {"reasoning_tokens": count}
    return found


class _Reply:
    """An answer, from its first chunk to its last, or whole."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, maker: Maker, request: CompletionRequest | ChatRequest) -> None:
        self._maker = maker
        self._ids = bool(request.return_token_ids)
        self._usage = bool(request.stream_options and request.stream_options.include_usage)
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time())}

    def whole(self, running: Running) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(i, choice, running) for i, choice in enumerate(running.choices)]
        return self._envelope(self.kind, choices) | {"usage": usage(running, self._maker.tokenizer)}

    def chunks(self, running: Running, changed: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Chunks with what is new in these choices."""
        for i in changed:
            choice = running.choices[i]
            for part in self._parts(i, choice, running):
                yield self._envelope(self.chunk_kind, [part]) | ({"usage": None} if self._usage else {})

    def last(self, running: Running) -> Iterator[dict[str, Any]]:
        """The chunk after all others, if it was asked for."""
        if self._usage:
            yield self._envelope(self.chunk_kind, []) | {"usage": usage(running, self._maker.tokenizer)}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        common = {"model": self._maker.model, "system_fingerprint": self._maker.fingerprint}
        return {"id": self._head["id"], "object": kind, "created": self._head["created"], **common, "choices": choices}

    def _choice(self, index: int, choice: Choice, running: Running) -> dict[str, Any]:
        raise NotImplementedError

    def _parts(self, index: int, choice: Choice, running: Running) -> Iterator[dict[str, Any]]:
        raise NotImplementedError


class CompletionReply(_Reply):
    """An answer of `/v1/completions`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, maker: Maker, request: CompletionRequest) -> None:
        super().__init__(maker, request)
        self._logprobs = request.logprobs is not None
        self._offsets: dict[int, int] = {}

    def _choice(self, index: int, choice: Choice, running: Running) -> dict[str, Any]:
        return self._part(index, choice, *choice.take(), prompt=choice.row.prompt)

    def _parts(self, index: int, choice: Choice, running: Running) -> Iterator[dict[str, Any]]:
        first = index not in self._offsets
        text, new = choice.take()
        if new or choice.finished:
            yield self._part(index, choice, text, new, prompt=choice.row.prompt if first else None)

    def _part(self, index: int, choice: Choice, text: str, new: Tokens, prompt: Sequence[int] | None) -> dict[str, Any]:
        logprobs = self._logprobs_of(index, new) if self._logprobs else None
        self._offsets.setdefault(index, 0)
        found = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason(choice)}
        return found | (_token_ids(new, prompt) if self._ids else {})

    def _logprobs_of(self, index: int, new: Tokens) -> dict[str, Any]:
        texts, offsets, at = [self._maker.text(each.id) for each in new], list[int](), self._offsets.get(index, 0)
        for text in texts:
            offsets.append(at)
            at += len(text)
        self._offsets[index] = at
        values = [max(each.logprob, LOWEST) for each in new]
        tops: list[dict[str, float]] = []
        for each, text, value in zip(new, texts, values, strict=True):
            top: dict[str, float] = {}
            for token, logprob in each.tops:  # of tokens with the same text, the most likely one counts
                top.setdefault(self._maker.text(token), max(logprob, LOWEST))
            tops.append(top if text in top else top | {text: value})
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


class ChatReply(_Reply):
    """An answer of `/v1/chat/completions`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, maker: Maker, request: ChatRequest) -> None:
        super().__init__(maker, request)
        self._logprobs = bool(request.logprobs)
        self._begun: set[int] = set()
        self._reporter: CacheReporter | None = None
        self._held: dict[int, list[NewToken]] = {}

    def whole(self, running: Running) -> dict[str, Any]:
        """The whole answer, with the last report of its cache."""
        report, session = self._report(running), running.session
        more = ({} if report is None else {"cache": report}) | ({} if session is None else {"session": session})
        return super().whole(running) | more

    def chunks(self, running: Running, changed: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Chunks with what is new in these choices. A report of the cache has a chunk of its own, without choices."""
        yield from super().chunks(running, changed)
        if (report := self._report(running)) is not None:
            yield self._envelope(self.chunk_kind, []) | {"cache": report}

    def last(self, running: Running) -> Iterator[dict[str, Any]]:
        """Chunks after all others: of the saved conversation, and of the usage, if they were asked for."""
        if running.session is not None:
            yield self._envelope(self.chunk_kind, []) | {"session": running.session}
        yield from super().last(running)

    def _report(self, running: Running) -> dict[str, Any] | None:
        """What is new of the cache of the request's only sequence, if that was asked for."""
        texts = running.prompts[0].texts
        if texts is None:
            return None
        if self._reporter is None:
            self._reporter = CacheReporter(self._maker.caches, texts)
        return self._reporter.report(running.choices[0], self._maker.text)

    def _choice(self, index: int, choice: Choice, running: Running) -> dict[str, Any]:
        text, new = choice.take()
        return {
            "index": index,
            "message": choice.parser.message(text),
            "logprobs": self._logprobs_of(new),
            "finish_reason": finish_reason(choice),
        } | (_token_ids(new, choice.row.prompt) if self._ids else {})

    def _parts(self, index: int, choice: Choice, running: Running) -> Iterator[dict[str, Any]]:
        if index not in self._begun:
            self._begun.add(index)
            ids = _token_ids([], choice.row.prompt) if self._ids else {}
            yield self._part(index, {"role": "assistant", "content": ""}, None) | ids
        text, new = choice.take()
        held = self._held.setdefault(index, [])
        held += new
        deltas = choice.parser.push(text, final=choice.finished)
        if choice.finished and held and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:  # the first one carries all tokens
            ids = _token_ids(held, None) if self._ids else {}
            yield self._part(index, delta, self._logprobs_of(held) if held else None) | ids
            held.clear()
        if choice.finished:
            yield self._part(index, {}, None, finish_reason(choice))

    @staticmethod
    def _part(index: int, delta: dict[str, Any], logprobs: Any, reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs_of(self, new: Tokens) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            self._logprob_of(each.id, each.logprob) | {"top_logprobs": [self._logprob_of(*top) for top in each.tops]}
            for each in new
        ]
        return {"content": content, "refusal": None}

    def _logprob_of(self, token: int, value: float) -> dict[str, Any]:
        text = self._maker.text(token)
        # A token may be a part of a character, which has no text of its own.
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(value, LOWEST), "bytes": data}


def _token_ids(new: Tokens, prompt: Sequence[int] | None) -> dict[str, Any]:
    ids: dict[str, Any] = {"token_ids": [each.id for each in new]}
    return ids if prompt is None else ids | {"prompt_token_ids": list(prompt)}
