"""`Row`: one sequence of a call, from its prompt to its end."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from kvjax.conversion.tokenizer import Tokenizer
from kvjax.runtime.growing_text import GrowingText
from kvjax.runtime.request import Request

StopReason = Literal["eos", "length", "stop"]


@dataclasses.dataclass
class Row:
    """Progress of one sequence.

    Attributes:
        prompt, question: given token ids.
        tokenizer: None if the model has no tokenizer.
        growing: decodes the text token by token, for streaming and stop strings.
        tokens, logprobs: what has been sampled so far.
        stop_reason: None while the sequence is running.
        state: the cache that the sequence ended with, if it was asked for.
        kept_share: share of its tokens that its cache keeps, see `GenerationStats.kept_shares`.
        again: number of sampled tokens that were prefilled again when the rotation changed.
        request: what is asked for. Its seed is that of this sequence.
    """

    prompt: Sequence[int]
    question: Sequence[int]
    tokenizer: Tokenizer | None
    request: Request
    growing: GrowingText | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    stop_reason: StopReason | None = None
    again: int = 0
    state: Any = None
    kept_share: float | None = None

    @property
    def read_first(self) -> Sequence[int]:
        """Tokens that are prefilled."""
        return [*self.prompt, *self.question, *self.tokens[: self.again]] if self.again else self.prompt

    @property
    def read_next(self) -> Sequence[int]:
        """Tokens that are processed one by one after prefill."""
        return [] if self.again else self.question

    def watch(self) -> None:
        """Decode the text token by token, up to the first stop string."""
        assert self.tokenizer is not None
        self.growing = GrowingText(self.tokenizer, self._given, self.request.stop)

    def text(self) -> str | None:
        """The new text; None if the model has no tokenizer."""
        if self.tokenizer is None:
            return None
        if self.growing is not None:
            return self.growing.whole()
        return self.tokenizer.decode_after(self._given, self.tokens)

    @property
    def _given(self) -> Sequence[int]:
        """Tokens before the first sampled one."""
        return [*self.prompt, *self.question] if self.question else self.prompt

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append newly sampled tokens, up to the end of the sequence."""
        request, growing, ends, before = self.request, self.growing, self.request.ends, len(self.tokens)
        for token, logprob in zip(tokens, logprobs, strict=True):
            if self.stop_reason is not None:
                break
            self.tokens.append(int(token))
            self.logprobs.append(float(logprob))
            if token in ends:
                self.stop_reason = "eos" if token in request.eos else "stop"
            if growing is not None and request.stop and growing.push(token):
                self.stop_reason = "stop"
        if growing is not None and not request.stop:
            growing.extend(self.tokens[before:])
