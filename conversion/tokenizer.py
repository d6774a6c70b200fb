"""A tokenizer as one hashable value: vocabulary, special tokens and chat template.

It travels as a static field of `Params`, so it takes part in the keys of compiled programs: two tokenizers of the same
content are equal and hash alike.
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
"""Sixteen times the largest vocabularies."""

_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""How SentencePiece vocabularies spell a token that is one byte of a character."""

_CONTEXT = 8
"""Tokens before a text that it is decoded together with. A token's text depends on whether it is the first (which may lose a
space), on the bytes of a character before it (three at most, so three tokens), and in a row of byte tokens on the whole row."""


class Tokenizer:
    """Text to token ids and back.

    Args:
        backend: the vocabulary, as the `tokenizers` library has it.
        eos: ids that end a sequence.
        bos: id that starts one, if any.
        chat_template: the model's Jinja template, if any.
        special: texts of special tokens by their usual names (``bos_token`` …), which templates refer to.
        now: the time that chat templates see, some of which write the date; by default that of the clock.

    Attributes:
        eos, bos, chat_template, special, now: as given.
        vocab_size: ids that the vocabulary defines, special tokens included.
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
    ) -> None:
        self.backend = backend
        self.eos = tuple(eos)
        self.bos = bos
        self.chat_template = chat_template
        self.special = dict(special or {})
        self.now = now
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_directory(
        cls, path: Path, *, eos: Sequence[int] = (), bos: int | None = None, vocab_size: int | None = None
    ) -> Self | None:
        """Read `tokenizer.json` and its companions; None if the directory has none.

        `vocab_size` is how many tokens the model knows; it warns of more.

        Raises:
            CheckpointError: one of the files is damaged.
        """
        file = path / "tokenizer.json"
        if not present(file):
            if present(path / "tokenizer.model"):
                warnings.warn(
                    f"{path}: tokenizer.model alone is not read, so the model is loaded without a tokenizer; prompts given "
                    "as token ids work, and saving the tokenizer with transformers writes the tokenizer.json that is missing",
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
        """Itself; with a warning if it has tokens that a model of so many does not know.

        Raises:
            CheckpointError: an id so large that the library would fill memory with those that are missing.
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
        """This tokenizer with another time for its chat template to see, so that a prompt is the same on every day.

            params = params.replace(tokenizer=params.tokenizer.at(datetime.datetime(2024, 7, 26)))

        Args:
            now: the time; None for that of the clock.
        """
        if not isinstance(now, datetime.datetime | None):
            raise ValueError(f"now={shortened(now)}; give a datetime.datetime, or None for the time of the clock")
        kept = {name: getattr(self, name) for name in ("eos", "bos", "chat_template", "special")}
        return Tokenizer(self.backend, **kept, now=now)

    def save(self, path: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` as transformers reads them."""
        (path / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= self.special
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`, with the start token that the model is used to unless `add_special` is False.

        A text that begins with the start token, as one that a template has made may, gets no second one.

        Raises:
            ValueError: the text is none (it holds half of a surrogate pair), or the vocabulary has no token for it.
        """
        with library_errors("the tokenizer cannot encode this text", ValueError):
            encoded = self.backend.encode(text, add_special_tokens=add_special)
        ids, added = encoded.ids, encoded.special_tokens_mask
        return ids[1:] if added[:2] == [1, 0] and ids[0] == ids[1] else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids, without special tokens unless `skip_special` is False."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation in the model's own template.

        Args:
            messages: ``{"role": …, "content": …}`` each.
            add_generation_prompt: end with the opening of the assistant's answer.

        Raises:
            ValueError: the model has no template, or the template refuses the messages, fails, or takes too much time or memory.
        """
        return self.encode(self.render(messages, add_generation_prompt=add_generation_prompt), add_special=False)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text that `chat` encodes."""
        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template: it was not trained on conversations, or its files do not say how; "
                "pass the prompt as a string instead of messages"
            )
        return chat.render(self.chat_template, messages, self.special, add_generation_prompt, self.now)

    def decode_after(self, given: Sequence[int], ids: Sequence[int]) -> str:
        """Text of ids that follow `given` ones: what they add to the text of the given ones.

        Where they change that text, since it ends inside a character, the text of the ids alone. Of the given ids only the last
        few are decoded.
        """
        context = self._context(given)
        before, both = self.decode(context), self.decode([*context, *ids])
        return both[len(before) :] if both.startswith(before) else self.decode(ids)

    def stream_decoder(self, given: Sequence[int] = ()) -> "StreamDecoder":
        """A decoder that takes ids one at a time, which follow those that are `given`."""
        return StreamDecoder(self, self._context(given))

    def is_silent(self, token: int) -> bool:
        """Whether `decode` leaves an id out: of a special token, or of none."""
        return token in self._silent or self.backend.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether an id stands for one byte, which is decoded together with all such before it and behind it."""
        return _BYTE.fullmatch(self.backend.id_to_token(token) or "") is not None

    def _context(self, given: Sequence[int]) -> list[int]:
        """The last of the given ids, as many as the text of what follows depends on."""
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
        """Ids of the special tokens, which `decode` leaves out, by their texts."""
        added = self.backend.get_added_tokens_decoder()
        return {text.content: token for token, text in added.items() if text.special}

    @functools.cached_property
    def _silent(self) -> frozenset[int]:
        return frozenset(self.special_ids.values())

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of all that makes it the tokenizer it is; equal ones have the same."""
        fields = [self.backend.to_str(), self.eos, self.bos, self.chat_template, sorted(self.special.items())]
        if self.now is not None:
            fields.append(self.now.isoformat())
        return hashlib.sha256(json.dumps(fields).encode()).digest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Tokenizer) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, eos={self.eos}, bos={self.bos}, chat={self.chat_template is not None})"


class StreamDecoder:
    """Text of a growing sequence, piece by piece; a character is given only once all its bytes are there.

    The pieces joined, and `pending` at the end, are what `Tokenizer.decode_after` gives for the whole sequence. Each id costs what
    decoding a few does (and of a row of byte tokens, the row), however many came before.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        self._before = self._text = tokenizer.decode(context)
        self._shown = len(self._text)
        # Whether the first new ids complete a character that was begun before them: then they are decoded alone.
        self._unsure: list[int] | None = []

    def push(self, token: int) -> str:
        """Take one id; the text that became certain, often empty."""
        token = int(token)
        if self._tokenizer.is_silent(token):
            return ""
        self._ids.append(token)
        if self._unsure is not None:
            self._unsure.append(token)
        if self._tokenizer.is_byte(token):  # the next one may still make all bytes of a row invalid
            self._text = None
            return ""
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
        """What `push` has held back: the rest, if the sequence ends here; bytes that are no character come as U+FFFD."""
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
    """Errors of the `tokenizers` library, which raises bare `Exception` and panics, as errors of a kind."""
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
"""A special token: its text, or an object with that as `content`."""


class _Named(Strict):
    name: str
    template: str


def _named(template: Any) -> Any:
    return [{"name": "default", "template": template}] if isinstance(template, str) else template


_Templates = Annotated[list[_Named], BeforeValidator(_named)]
"""One template, or several by name."""


class _Config(Strict):
    """What is read of a `tokenizer_config.json` or `chat_template.json`."""

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
    """The chat template: a file of its own (newer checkpoints), or a field of the tokenizer's configuration."""
    file = path / "chat_template.jinja"
    if present(file):
        return read_text(file)
    return config.template or _read(path / "chat_template.json").template


def _begun(backend: tokenizers.Tokenizer, start: str) -> tokenizers.Tokenizer:
    """A vocabulary whose texts begin with the start token, if there is one; the same if they do already."""
    bos = backend.token_to_id(start)
    if bos is None or backend.encode("").ids[:1] == [bos]:
        return backend
    state = json.loads(backend.to_str())
    existing = state["post_processor"]
    steps = existing["processors"] if existing and existing["type"] == "Sequence" else [existing] if existing else []
    template = next((step for step in steps if step["type"] == "TemplateProcessing"), None)
    if template is None:  # two of them in a row do not work
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
