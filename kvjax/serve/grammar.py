"""Answers of a given form: JSON of a schema, or calls of tools, by llguidance."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax._util.extras import optional
from kvjax.conversion.tokenizer import Tokenizer
from kvjax.runtime.sampling import Grammar

from . import grammar_trial
from .errors import APIError
from .reasoning import CLOSE, OPEN
from .tools import Format, calls_grammar

UNSUPPORTED = "unsupported_schema"
"""The error's code for schemas that no grammar can be made of, though they may be valid."""

MOST_SCHEMA = 1 << 16
"""Maximum number of characters of a schema."""

MOST_STATES = 50_000
"""Limit on the states of a grammar's automaton, of 1 to 2 kB each."""

_COMPACT = {"whitespace_flexible": False}
"""Small models may write white space without end."""


class Grammars:
    """Makes grammars for a model. May be used by several threads.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: number of the model's logits.
        eos: the model's end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos: Sequence[int]) -> None:
        self._library = optional("llguidance", "response_format", "grammar")
        self._fill = optional("llguidance.numpy", "response_format", "grammar").fill_next_token_bitmask
        self._vocabulary, self._tokenizer = vocabulary, tokenizer
        text = tokenizer.backend.to_str()
        self._known = self._library.LLTokenizer(text, n_vocab=vocabulary, eos_token=list(eos))

    def json(self, schema: Mapping[str, Any], *, thoughts: bool, opened: bool) -> "TextGrammar":
        """A grammar of JSON texts.

        Args:
            schema: the JSON schema.
            thoughts: whether the model may think before it answers.
            opened: whether the prompt has opened the thoughts.

        Raises:
            APIError: the schema is invalid, too large, or not supported.
        """
        text = json.dumps({"x-guidance": _COMPACT, **schema})
        return self._made(text, "json", "response_format", thoughts, opened)

    def calls(
        self,
        kind: Format,
        functions: Mapping[str, Mapping[str, Any] | None],
        *,
        several: bool,
        thoughts: bool,
        opened: bool,
    ) -> "TextGrammar":
        """A grammar of texts that call functions.

        Args:
            kind: the format of calls.
            functions: JSON schemas of the arguments of each function; None for any.
            several: whether there may be more than one call.
            thoughts, opened: as for `json`.

        Raises:
            APIError: a schema is invalid or not supported, or all together are too large.
        """
        text = calls_grammar(kind, functions, several=several, after_thoughts=thoughts)
        return self._made(text, "lark", "tools", thoughts, opened)

    def _made(self, text: str, kind: grammar_trial.Kind, param: str, thoughts: bool, opened: bool) -> "TextGrammar":
        """A grammar from its text, which comes from a field of the request."""
        library = self._library

        def refused(message: str) -> APIError:
            return _refused(message, param)

        if len(text) > MOST_SCHEMA:
            raise refused(f"the schema has {len(text)} characters; at most {MOST_SCHEMA} are allowed")
        try:
            grammar_trial.check(kind, text)
        except ValueError as error:
            raise refused(f"the schema is not supported: {error}") from None
        convert = library.LLMatcher.grammar_from_json_schema if kind == "json" else library.LLMatcher.grammar_from_lark
        try:
            grammar = convert(text)
        except ValueError as error:
            raise refused(f"the schema is invalid: {error}") from None
        limits = library.LLParserLimits(max_lexer_states=MOST_STATES)
        matcher = library.LLMatcher(self._known, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise refused(f"the schema is not supported: {matcher.get_error().strip().splitlines()[0]}")
        if warnings := matcher.get_grammar_warnings():
            raise refused(f"the schema is not supported: {'; '.join(warnings)}")
        backend = self._tokenizer.backend
        tags = (backend.token_to_id(OPEN), backend.token_to_id(CLOSE)) if thoughts else (None, None)
        made = TextGrammar(matcher, self._fill, self._vocabulary, tags, opened, param)
        made.copy()([])  # a schema that no text satisfies fails here
        return made


def _refused(message: str, param: str) -> APIError:
    return APIError(400, message, param=param, code=UNSUPPORTED)


class TextGrammar:
    """The tokens that continue one text. Thoughts before it are free.

    Args:
        matcher: llguidance's matcher.
        fill: llguidance's function that computes the bits.
        vocabulary: number of the model's logits.
        tags: tokens that open and close thoughts; None where there are none.
        opened: whether the thoughts have been opened.
        param: name of the field that asks for the grammar.
    """

    def __init__(
        self,
        matcher: Any,
        fill: Any,
        vocabulary: int,
        tags: tuple[int | None, int | None],
        opened: bool,
        param: str,
    ) -> None:
        self._how = fill, vocabulary, tags, opened, param
        self._param, self._matcher, self._fill, (self._open, self._close) = param, matcher, fill, tags
        self._thinking = opened and self._close is not None
        self._bits: Any = np.zeros((1, -(-vocabulary // 32)), np.int32)
        self._all: Any = np.full(self._bits.shape[1], -1, np.int32)
        self._seen = self._said = 0

    def copy(self) -> Grammar:
        """A grammar for another text, at its beginning."""
        return TextGrammar(self._matcher.deep_copy(), *self._how)

    def __call__(self, tokens: Sequence[int]) -> Any:
        """Bits of the tokens that may follow.

        Raises:
            APIError: no token may follow, or it takes too much time or memory to find them.
        """
        for token in tokens[self._seen :]:
            if self._thinking:
                self._thinking = token != self._close
            elif not self._said and token == self._open and self._seen == 0:
                self._thinking = True
            else:
                self._said += 1
                self._matcher.consume_token(token)
            self._seen += 1
        if self._thinking:
            return self._all
        self._fill(self._matcher, self._bits)
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().splitlines()[0]
            raise _refused(
                f"no answer satisfies the schema, or it is too complex ({reason}); send a simpler one", self._param
            )
        if self._open is not None and self._close is not None and not self._seen:
            self._bits[0, self._open // 32] |= np.int32(np.uint32(1 << self._open % 32).view(np.int32))
        return self._bits[0]
