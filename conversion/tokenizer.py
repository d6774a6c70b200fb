"""`Tokenizer`: vocabulary, special tokens and chat template as one hashable value.

It is a static field of `Params`, so it is part of the cache keys of compiled programs. Tokenizers with the same content
are equal and have equal hashes.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import tokenizers
from pydantic import BeforeValidator

from . import chat, tokenizer_bounds
from .errors import CheckpointError, shortened, told
from .schema import Strict, checked
from .text_files import present, read_json, read_text

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")

_MOST_TOKENS = 1 << 22
"""Limit on token ids, sixteen times the largest vocabularies."""

_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""Spelling of a single-byte token in SentencePiece vocabularies."""

_CONTEXT = 8
"""Number of preceding tokens with which new tokens are decoded. A token's text depends on whether it is the first (it may then lose a space), on up to three tokens with earlier bytes of the same character, and on a whole run of byte tokens.
"""


class Tokenizer:
    """Converts text to token ids and back.

    Args:
        backend: the vocabulary, a tokenizer of the `tokenizers` library.
        eos: ids that end a sequence.
        bos: id that starts a sequence, if any.
        chat_template: the model's Jinja template, if any.
        special: texts of the special tokens that templates refer to, by name (``bos_token`` …).
        now: time for chat templates that write the date; None uses the clock.
        chat_arguments: other arguments of the chat template by name, see `for_chat`.

    Attributes:
        eos, bos, chat_template, special, now, chat_arguments: as passed.
        vocab_size: number of ids in the vocabulary, including special tokens.

    Example:
        >>> chat.tokenizer.encode("Hi"), chat.tokenizer.decode(chat.tokenizer.encode("Hi"))
        ([41, 74], 'Hi')
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos: Sequence[int] = (),
        bos: int | None = None,
        chat_template: str | None = None,
        special: Mapping[str, str] | None = None,
        now: datetime.datetime | None = None,
        chat_arguments: Mapping[Any, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.eos = tuple(eos)
        self.bos = bos
        self.chat_template = chat_template
        self.special = dict(special or {})
        self.now = now
        self.chat_arguments = chat.checked_arguments(chat_arguments)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_directory(
        cls, path: Path, *, eos: Sequence[int] = (), bos: int | None = None, vocab_size: int | None = None
    ) -> Self | None:
        """Read `tokenizer.json` and its companion files.

        Args:
            path: the directory.
            eos: ids that end a sequence; by default those of the tokenizer's configuration.
            bos: id that starts a sequence; by default that of the tokenizer's configuration.
            vocab_size: number of tokens that the model knows. A larger vocabulary gives a warning.

        Returns:
            The tokenizer, or None if the directory has none.

        Raises:
            CheckpointError: a file is damaged.
        """
        file = path / "tokenizer.json"
        if not present(file):
            if present(path / "tokenizer.model"):
                warnings.warn(
                    f"{path}: tokenizer.model alone is not supported, so the model is loaded without a tokenizer. Prompts given "
                    "as token ids work; to add the missing tokenizer.json, save the tokenizer with transformers",
                    stacklevel=2,
                )
            return None
        content = read_text(file)
        tokenizer_bounds.check(content, file)
        with library_errors(f"{file}: not a tokenizer"):
            backend = tokenizers.Tokenizer.from_str(content)
            backend.no_truncation()
            backend.no_padding()
        config = _read(path / "tokenizer_config.json")
        special = {name: text for name in _SPECIAL if (text := getattr(config, name)) is not None}
        if not eos and "eos_token" in special:
            eos = _known(backend, special["eos_token"])
        if bos is None and "bos_token" in special:
            bos = next(iter(_known(backend, special["bos_token"])), None)
        if config.add_bos_token:
            with library_errors(f"{file}: not a tokenizer"):
                backend = _begun(backend, special.get("bos_token", ""))
        made = cls(backend, eos=eos, bos=bos, chat_template=_template(path, config), special=special)
        return made.within(vocab_size, file)

    def within(self, vocab_size: int | None, source: Path | str) -> Self:
        """Return the tokenizer itself, with a warning if it has tokens that the model does not know.

        Args:
            vocab_size: number of tokens that the model knows; None skips the warning.
            source: file name for messages.

        Raises:
            CheckpointError: an id is so large that the library would exhaust memory with the missing ids below it.
        """
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        text, token = max(vocabulary.items(), key=lambda item: item[1], default=("", 0))
        if token >= _MOST_TOKENS:
            raise CheckpointError(
                f"{source}: token {shortened(text)} has id {token}; it should be below {_MOST_TOKENS}"
            )
        if vocab_size is not None and token >= vocab_size:
            beyond = sorted((token, text) for text, token in vocabulary.items() if token >= vocab_size)
            warnings.warn(
                f"{source}: {len(beyond)} tokens are beyond the model's vocabulary of {vocab_size}, the first of them "
                f"{shortened(beyond[0][1])} with id {beyond[0][0]}; prompts that hold them are refused",
                stacklevel=2,
            )
        return self

    def at(self, now: datetime.datetime | None) -> "Tokenizer":
        """Copy of the tokenizer whose chat template sees a fixed time, so that prompts are the same every day.

        Args:
            now: the time; None uses the clock.

        Example:
            >>> import datetime
            >>> tokenizer = chat.tokenizer.at(datetime.datetime(2024, 7, 26))
            >>> tokenizer.now.year
            2024
        """
        if not isinstance(now, datetime.datetime | None):
            raise ValueError(f"now={shortened(now)}; give a datetime.datetime, or None for the time of the clock")
        return self._with(now=now)

    def for_chat(self, arguments: Mapping[Any, Any] | None) -> "Tokenizer":
        """Copy of the tokenizer whose chat template gets these arguments.

        Args:
            arguments: values by name, as keywords of transformers' `apply_chat_template`. `tools` is a list of JSON
                schemas, and `documents` a list of dictionaries. Others are variables that the template reads, such as
                `enable_thinking` or `date_string`. They replace earlier arguments. None gives no arguments.

        Raises:
            ValueError: an argument has the wrong type. A template that does not read one raises when it is rendered.

        Example:
            >>> tokenizer = chat.tokenizer.for_chat({"enable_thinking": False})
            >>> tokenizer.chat_arguments
            {'enable_thinking': False}
        """
        return self._with(chat_arguments=arguments)

    def _with(self, **changes: Any) -> "Tokenizer":
        names = ("eos", "bos", "chat_template", "special", "now", "chat_arguments")
        return Tokenizer(self.backend, **{name: getattr(self, name) for name in names} | changes)

    def save(self, path: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` so that transformers can read them."""
        (path / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= self.special
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Convert text to token ids.

        Args:
            text: the text.
            add_special: whether to add the start token that the model expects. A text that already begins with it gets
                no second one.

        Raises:
            ValueError: the text contains half of a surrogate pair, or the vocabulary cannot encode it.
        """
        with library_errors("the tokenizer cannot encode this text", ValueError):
            encoded = self.backend.encode(text, add_special_tokens=add_special)
        ids, added = encoded.ids, encoded.special_tokens_mask
        return ids[1:] if added[:2] == [1, 0] and ids[0] == ids[1] else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Convert token ids to text, without special tokens unless `skip_special` is False."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, rendered by the model's chat template.

        Args:
            messages: one ``{"role": …, "content": …}`` per message. The content is text, or a list of parts
                ``{"type": "text", "text": …}``.
            add_generation_prompt: whether to end with the opening of the assistant's answer.
            continue_final_message: whether to end with the text of the last message, which the model then continues. No
                answer is opened.

        Raises:
            ValueError: the model has no template, or the template rejects the messages, does not read one of the
                `chat_arguments`, fails, or exceeds its limits on time and memory.
        """
        text = self.render(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        )
        return self.encode(text, add_special=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Text of a conversation, which `chat` encodes. Arguments and errors as for `chat`."""
        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template: it was not trained on conversations, or its files do not say how; "
                "pass the prompt as a string instead of messages"
            )
        opens = add_generation_prompt and not continue_final_message
        return chat.render(
            self.chat_template,
            messages,
            self.special,
            opens,
            self.now,
            self.chat_arguments,
            continue_final_message,
        )

    def decode_after(self, given: Sequence[int], ids: Sequence[int]) -> str:
        """Text that `ids` add to the text of `given`.

        If `ids` complete a character that `given` began, the text of `ids` alone is returned. Only the last few of the
        given ids are decoded.
        """
        context = self._context(given)
        before, both = self.decode(context), self.decode([*context, *ids])
        return both[len(before) :] if both.startswith(before) else self.decode(ids)

    def stream_decoder(self, given: Sequence[int] = ()) -> "StreamDecoder":
        """Create a decoder of ids that arrive bit by bit, and continue `given`."""
        return StreamDecoder(self, self._context(given))

    def is_silent(self, token: int) -> bool:
        """Whether `decode` skips an id: a special token, or an id without a token."""
        return self._kind(token) == "silent"

    def is_byte(self, token: int) -> bool:
        """Whether an id is a single-byte token. A run of them is decoded together."""
        return self._kind(token) == "byte"

    def _kind(self, token: int) -> str:
        known = self._kinds
        if (kind := known.get(token)) is None:
            text = self.backend.id_to_token(token)
            silent = text is None or token in self._silent
            known[token] = kind = "silent" if silent else "byte" if _BYTE.fullmatch(text or "") else "text"
        return kind

    @functools.cached_property
    def _kinds(self) -> dict[int, str]:
        """Kinds of the ids seen so far."""
        return {}

    def _context(self, given: Sequence[int]) -> list[int]:
        """The last of the given ids: those that the text of later ids can depend on."""
        context, in_row = [], True
        for token in reversed(given):
            if self.is_silent(token):
                continue
            context.append(token)
            in_row = in_row and self.is_byte(token)
            if len(context) >= _CONTEXT and not in_row:
                break
        return context[::-1]

    @functools.cached_property
    def special_ids(self) -> dict[str, int]:
        """Ids of the special tokens, which `decode` skips, by their texts."""
        added = self.backend.get_added_tokens_decoder()
        return {text.content: token for token, text in added.items() if text.special}

    @functools.cached_property
    def _silent(self) -> frozenset[int]:
        return frozenset(self.special_ids.values())

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of the tokenizer's content; equal tokenizers have equal digests."""
        fields = [self.backend.to_str(), self.eos, self.bos, self.chat_template, sorted(self.special.items())]
        if self.now is not None:
            fields.append(self.now.isoformat())
        if self.chat_arguments:
            fields.append(self.chat_arguments)
        return hashlib.sha256(json.dumps(fields).encode()).digest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Tokenizer) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, eos={self.eos}, bos={self.bos}, chat={self.chat_template is not None})"


class StreamDecoder:
    """Decodes a growing sequence piece by piece. A character is returned once all its bytes are there.

    The joined pieces and the final `pending` equal `Tokenizer.decode_after` for the whole sequence. The cost per id is
    constant, except within a run of byte tokens, where it grows with the run.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        self._before = self._text = tokenizer.decode(context)
        self._shown = len(self._text)
        # Ids that may complete a character of the context; None once that is decided. If they do, they are decoded
        # alone.
        self._unsure: list[int] | None = []

    def push(self, token: int) -> str:
        """Add one id and return the text that is now certain, which is often empty."""
        return self.extend([token])

    def extend(self, tokens: Iterable[int]) -> str:
        """Add ids and return the text that is now certain. Several together take less time than one after the other."""
        found, waiting = "", False  # for ids without bytes to be decoded together
        for token in map(int, tokens):
            if self._tokenizer.is_silent(token):
                continue
            byte = self._tokenizer.is_byte(token)
            if waiting and (byte or self._unsure is not None):
                found, waiting = found + self._decoded(), False
            self._ids.append(token)
            if self._unsure is not None:
                self._unsure.append(token)
            if byte:  # the next byte may still make the whole run invalid
                self._text = None
            waiting = not byte
        return found + self._decoded() if waiting else found

    def _decoded(self) -> str:
        """Text of the ids that has become certain."""
        self._text = self._tokenizer.decode(self._ids)
        if self._unsure is not None:
            self._decide(self._unsure)
        end = len(self._text) - self._text.endswith("\ufffd")
        new = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        if len(self._ids) > 2 * _CONTEXT and self._unsure is None:
            held = len(self._text) - self._shown
            self._ids = self._ids[-_CONTEXT:]
            self._text = self._tokenizer.decode(self._ids)
            self._shown = len(self._text) - held
        return new

    def pending(self) -> str:
        """Text that `push` has withheld, if the sequence ends here. Bytes that form no character become U+FFFD."""
        text = self._tokenizer.decode(self._ids) if self._text is None else self._text
        if self._unsure is not None and not text.startswith(self._before):
            return self._tokenizer.decode(self._unsure)
        return text[self._shown :]

    def _decide(self, new: list[int]) -> None:
        assert self._text is not None
        if not self._text.startswith(self._before):
            self._ids, self._text, self._shown, self._unsure = new, self._tokenizer.decode(new), 0, None
        elif len(self._text) > len(self._before):
            self._unsure = None


@contextlib.contextmanager
def library_errors(what: str, kind: type[ValueError] = CheckpointError) -> Iterator[None]:
    """Convert errors of the `tokenizers` library, which raises bare `Exception` and panics, to `kind`."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what} ({told(error)})") from error


def _text(token: Any) -> Any:
    return token["content"] if isinstance(token, Mapping) and "content" in token else token


_Token = Annotated[str, BeforeValidator(_text)]
"""A special token: its text, or an object with its text as `content`."""


class _Named(Strict):
    name: str
    template: str


def _named(template: Any) -> Any:
    return [{"name": "default", "template": template}] if isinstance(template, str) else template


_Templates = Annotated[list[_Named], BeforeValidator(_named)]
"""One template, or several with names."""


class _Config(Strict):
    """The fields of a `tokenizer_config.json` or `chat_template.json` that are read."""

    bos_token: _Token | None = None
    eos_token: _Token | None = None
    unk_token: _Token | None = None
    pad_token: _Token | None = None
    add_bos_token: bool | None = None
    chat_template: _Templates | None = None

    @property
    def template(self) -> str | None:
        return next((entry.template for entry in self.chat_template or () if entry.name == "default"), None)


def _read(path: Path) -> _Config:
    return checked(_Config, read_json(path), path) if present(path) else _Config()


def _template(path: Path, config: _Config) -> str | None:
    """Read the chat template from its own file (newer checkpoints) or from the tokenizer's configuration."""
    file = path / "chat_template.jinja"
    if present(file):
        return read_text(file)
    return config.template or _read(path / "chat_template.json").template


def _begun(backend: tokenizers.Tokenizer, start: str) -> tokenizers.Tokenizer:
    """Make a vocabulary prepend the start token, if it has one and does not prepend it already."""
    bos = backend.token_to_id(start)
    if bos is None or backend.encode("").ids[:1] == [bos]:
        return backend
    state = json.loads(backend.to_str())
    existing = state["post_processor"]
    steps = existing["processors"] if existing and existing["type"] == "Sequence" else [existing] if existing else []
    template = next((step for step in steps if step["type"] == "TemplateProcessing"), None)
    if template is None:  # two template processors in a row do not work
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        template = {"type": "TemplateProcessing", "single": [first], "pair": [first, second], "special_tokens": {}}
        steps.append(template)
    for form in ("single", "pair"):
        template[form].insert(0, {"SpecialToken": {"id": start, "type_id": 0}})
    template["special_tokens"][start] = {"id": start, "ids": [bos], "tokens": [start]}
    state["post_processor"] = {"type": "Sequence", "processors": steps}
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _known(backend: tokenizers.Tokenizer, token: str) -> tuple[int, ...]:
    found = backend.token_to_id(token)
    return () if found is None else (found,)
