"""Splits an answer into what the model thinks and what it says.

Models that think write `<think>`, their thoughts, `</think>`, and then the answer. Some templates write `<think>`
themselves, at the end of the prompt.
"""

from collections.abc import Sequence

from kvjax.conversion.tokenizer import Tokenizer

from .held_text import begun

OPEN, CLOSE = "<think>", "</think>"

_LAST = 8
"""Number of last tokens of a prompt in which a template may open the thoughts."""


def thinks(tokenizer: Tokenizer) -> bool:
    """Whether the model's template knows thoughts, and answers show where they end."""
    return CLOSE in (tokenizer.chat_template or "") and CLOSE not in tokenizer.special_ids


def is_open(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends with the beginning of thoughts."""
    return tokenizer.decode(prompt[-_LAST:], skip_special=False).rstrip().endswith(OPEN)


class Reasoning:
    """Splits a growing text. White space around the thoughts is dropped.

    Args:
        opened: whether the prompt has opened the thoughts.
    """

    def __init__(self, opened: bool) -> None:
        self._state = "thoughts" if opened else "start"
        self._held = ""
        self._empty = True

    def push(self, text: str, *, final: bool) -> list[tuple[str, str]]:
        """Add text. Returns pairs of "reasoning" or "content", and new text of it.

        Args:
            text: the new text.
            final: whether no text follows.
        """
        found: list[tuple[str, str]] = []
        text = self._held + text
        self._held = ""
        if self._state == "start":
            text = self._start(text, final)
        if self._state == "thoughts":
            text = self._thoughts(text, final, found)
        if self._state == "gap" and (text := text.lstrip()):
            self._state = "content"
        if self._state == "content" and text:
            found.append(("content", text))
        return found

    def _start(self, text: str, final: bool) -> str:
        """Decide whether the text begins with thoughts. Returns what is left of it."""
        stripped = text.lstrip()
        if stripped.startswith(OPEN):
            self._state = "thoughts"
            return stripped.removeprefix(OPEN)
        if OPEN.startswith(stripped) and not final:
            self._held = text
            return ""
        self._state = "content"
        return text

    def _thoughts(self, text: str, final: bool, found: list[tuple[str, str]]) -> str:
        """Take thoughts off the text. Returns what follows them."""
        thought, closed, rest = text.partition(CLOSE)
        if closed:
            self._state = "gap"
            thought = thought.rstrip()
        elif not final:
            certain = len(thought) - begun(thought, CLOSE)
            certain = len(thought[:certain].rstrip())  # it may be the last of the thoughts
            thought, self._held = thought[:certain], thought[certain:]
        if self._empty:
            thought = thought.lstrip()
        if thought:
            self._empty = False
            found.append(("reasoning", thought))
        return rest


def thought_tokens(tokenizer: Tokenizer, tokens: Sequence[int], opened: bool) -> int:
    """Number of tokens of the thoughts, with the tag that closes them. 0 if that is not a token of its own."""
    close, opening = (tokenizer.backend.token_to_id(tag) for tag in (CLOSE, OPEN))
    if close is None or not (opened or opening in tokens[:2]):
        return 0
    return tokens.index(close) + 1 if close in tokens else len(tokens)
