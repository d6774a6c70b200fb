"""Limits on the texts that a `tokenizer.json` can produce.

The `tokenizers` library does whatever a file says. Thirty replacements of "a" by "aa", or one by a long text, turn one
character into a gigabyte. `check` therefore inspects the file before the library reads it.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointError, shortened, told
from .text_files import unique

GROWTH = 64
"""Limit on how many times longer a text may become. Known tokenizers need two to eight."""

LONGEST = 1024
"""Limit on the characters of a token. Known vocabularies have up to 256."""

ADDED = 64
"""Limit on the tokens added around a text."""

_PARTS = 1 << 22
"""Limit on the lists and objects of a file. The largest known file has a million, most of them merges."""

_PIECE = 36
"""Maximum bytes of a character after Unicode normalisation, rounded up. This growth is not counted."""


def check(text: str, source: Path) -> None:
    """Raise for a `tokenizer.json` that could turn a short text into a huge one.

    Raises:
        CheckpointError: the file is not JSON, or a text, a token or the added tokens may become too long.
    """
    try:
        if (parts := text.count("[") + text.count("{")) > _PARTS:
            raise ValueError(f"it has {parts} lists and objects; {_PARTS} are allowed")
        fields = json.loads(text, object_pairs_hook=unique)  # the library may use either of two duplicate keys
        if not isinstance(fields, dict):
            raise ValueError(f"a JSON object was expected, got {type(fields).__name__}")
        _check_growth(fields)
        _check_tokens(fields)
        _check_added(fields.get("post_processor"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not a tokenizer that can be used ({told(error)})") from error


def _check_growth(fields: Mapping[str, Any]) -> None:
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (growth := math.prod(map(_growth, _objects(fields.get(part))))) > GROWTH:
            raise ValueError(f"its {part} may make a text {growth:.4g} times as long; {GROWTH} times are allowed")


def _growth(step: Mapping[str, Any]) -> float:
    """Maximum number of characters that one step makes of one character."""
    if isinstance(step.get("prepend"), str):
        return 1.0 + len(step["prepend"])
    if isinstance(step.get("precompiled_charsmap"), str):
        # The number of bytes of a trie, the trie, then the replacements, each terminated by zero.
        content = base64.b64decode(step["precompiled_charsmap"])
        pieces = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
        return max(1.0, max(map(len, pieces)) / _PIECE)
    if isinstance(step.get("content"), str) and "pattern" in step:
        pattern = step["pattern"]
        found = pattern.get("String") if isinstance(pattern, Mapping) else None
        # A regular expression, like an empty text, may match between any two characters.
        return max(1.0, len(step["content"]) / len(found)) if found else len(step["content"]) + 1.0
    return 2.0 if step.get("suffix") == "" else 1.0


def _objects(node: Any) -> Iterator[Mapping[str, Any]]:
    """Iterate over all objects nested in an object or a list."""
    if isinstance(node, Mapping):
        yield node
        for value in node.values():
            yield from _objects(value)
    elif isinstance(node, list):
        for value in node:
            yield from _objects(value)


def _check_tokens(fields: Mapping[str, Any]) -> None:
    model = fields.get("model")
    model = model if isinstance(model, Mapping) else {}
    vocabulary, added = model.get("vocab"), fields.get("added_tokens")
    texts = [*vocabulary] if isinstance(vocabulary, Mapping) else []
    if isinstance(vocabulary, list):  # with scores
        texts += [entry[0] for entry in vocabulary if isinstance(entry, list) and entry]
    if isinstance(added, list):
        texts += [entry.get("content") for entry in added if isinstance(entry, Mapping)]
    texts += [value for key, value in model.items() if key not in ("vocab", "merges")]
    longest = max((text for text in texts if isinstance(text, str)), key=len, default="")
    if len(longest) > LONGEST:
        raise ValueError(f"the token {shortened(longest)} has {len(longest)} characters; {LONGEST} are allowed")


def _check_added(processor: Any) -> None:
    for step in _objects(processor):
        for form in ("single", "pair"):
            if isinstance(step.get(form), list) and len(step[form]) > ADDED:
                raise ValueError(f"its post_processor joins {len(step[form])} parts; {ADDED} are allowed")
        if isinstance(step.get("ids"), list) and len(step["ids"]) > ADDED:
            raise ValueError(f"its post_processor adds {len(step['ids'])} tokens at once; {ADDED} are allowed")
