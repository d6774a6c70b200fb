"""Policies as text: what `policy=` accepts in Python and on the command line, and how a policy is printed.

    treekv                                         a policy as published
    treekv:0.2                                     with a budget
    chunkkv:budget=0.2,chunk=20                    with hyperparameters
    offloaded(clusterkv:1024; steps=2)             a transform of a policy, with settings of the transform
    recompress(snapkv:512; every=128)
    thresholded(knorm:512; threshold=-12)
    prompt_only(tova:512)
    critical(snapkv:512)
    chunkkv(expected_attention:512; chunk=20)
    then(snapkv:0.25; quest:256)                   a policy for the prompt, and one for what queries read of it
    by_layer(full; treekv:0.2)                     a policy for each layer
    by_head(a=full; b=treekv:256; profile=(("a", "b"), ("b", "b")))

Commas separate hyperparameters, and semicolons separate the parts within parentheses. A policy as a value is in
parentheses: `catekv:adaptive=(quest:1024)`. A number without a name is the policy's budget. `budget=` among the
settings of a transform sets the budget of the policy within. Text that does not follow this grammar is an error.
"""

import ast
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_type_hints

from kvjax._util.arguments import short
from kvjax._util.settings import parse_value, split_setting

from .base import Policy
from .info import PolicyError
from .registry import make_policy, policies, policy_class, replaced, unknown_hyperparameter
from .transforms.by_head import by_head
from .transforms.by_layer import by_layer
from .transforms.chunks import Chunks
from .transforms.critical import Critical
from .transforms.offload import Offloaded
from .transforms.prompt_only import PromptOnly
from .transforms.pyramid import Pyramid
from .transforms.quantize import Quantized
from .transforms.recompress import Recompress
from .transforms.then import then
from .transforms.threshold import Thresholded

_WRAPPERS: dict[str, type[Any]] = {
    "chunkkv": Chunks,
    "critical": Critical,
    "offloaded": Offloaded,
    "quantized": Quantized,
    "prompt_only": PromptOnly,
    "pyramid": Pyramid,
    "recompress": Recompress,
    "thresholded": Thresholded,
}


_OF_PARTS = ("then", "by_layer", "by_head")
"""Combinations of several policies."""

MOST_DEEP = 32
"""Maximum depth of nested brackets, far below Python's recursion limit."""

MOST_SHOWN = 200
"""Maximum number of characters of a text that an error repeats."""


def parse_policy(text: str) -> Policy:
    """Parse a policy.

    Raises:
        PolicyError: a name is unknown, brackets do not match, a part is empty or given twice, or a hyperparameter does
            not take a value. The message repeats the text.
    """
    text = text.strip()
    with naming(text):
        return _parsed(text)


@contextlib.contextmanager
def naming(text: str) -> Iterator[None]:
    """Context manager that adds a text to policy errors that do not contain it."""
    try:
        yield
    except PolicyError as error:
        shown = short(text, MOST_SHOWN)
        raise PolicyError(str(error) if shown in str(error) else f"{shown}: {error}") from None


def _parsed(text: str) -> Policy:
    parts = split(text, ";")  # also checks that brackets match
    text = text.strip()
    name, bracket, inside = text.partition("(")
    if bracket and ":" not in name:
        if len(parts) > 1 or not inside.endswith(")"):
            raise PolicyError(f"{_short(text)}: there is text after the closing bracket of a transform. Remove it.")
        return _combined(text, name.strip(), split(inside[:-1], ";"))
    name, colon, settings = text.partition(":")
    cls = policy_class(name)
    given = parse_settings(text, cls.about.name, _hints(cls), split(settings, ",")) if colon else {}
    return make_policy(name, given)


def _hints(cls: type[Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """The types of a policy's hyperparameters."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.name not in without}


def get_policy(policy: str | Policy, **hyperparameters: Any) -> Policy:
    """Return a policy from its text or name, with the given hyperparameters. None keeps a hyperparameter's default.

    A `Policy` is returned with the given hyperparameters replaced. A policy without a budget, such as `full` and
    `kivi`, accepts any `budget`, which has no effect. A sweep over policies therefore needs no exception.

    Args:
        policy: a `Policy`, or text such as "treekv", "chunkkv:budget=0.2,chunk=20" or "offloaded(clusterkv:1024)" (see
            `kvjax.policies.text`).
        hyperparameters: values by name.

    Raises:
        PolicyError: the name is unknown, the policy has no such hyperparameter, or does not take that value.

    Example:
        >>> kvjax.get_policy("snapkv:0.25,window=16")
        SnapKV(budget=0.25, window=16, pool='max', kernel=7)
        >>> kvjax.get_policy("tova", budget=512)
        TOVA(budget=512, keep_newest=False)
    """
    if isinstance(policy, str):
        policy = parse_policy(policy)
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise PolicyError(
            f"policy is the class {policy.__name__}. Give a policy of this class, {policy.__name__}(...)."
        )
    if not callable(getattr(policy, "layer", None)):
        raise PolicyError(f"policy={policy!r} is not a policy. Give a name ({', '.join(policies())}) or a Policy.")
    given = {name: value for name, value in hyperparameters.items() if value is not None}
    return replaced(policy, given) if given else policy


def split(text: str, at: str) -> list[str]:
    """Split a text at separators outside of brackets and quotes.

    Raises:
        PolicyError: brackets or quotes do not match, or are nested too deeply.
    """
    parts = [""]
    for letter, depth in _depths(text):
        if letter == at and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _depths(text: str) -> Iterator[tuple[str, int]]:
    """Yield each letter with the number of open brackets and quotes after it. Apostrophes within words are letters."""
    closing, before = "", ""
    for letter in text:
        if closing[-1:] in ("'", '"'):
            closing = closing[:-1] if letter == closing[-1] else closing
        elif letter in "([{":
            closing += ")]}"["([{".index(letter)]
        elif letter in "\"'" and not before.isalnum():
            closing += letter
        elif letter in ")]}":
            if not closing.endswith(letter):
                raise PolicyError(f"{_short(text)}: {letter!r} closes no bracket. Remove it, or open one before it.")
            closing = closing[:-1]
        if len(closing) > MOST_DEEP:
            raise PolicyError(f"{_short(text)}: brackets are nested more than {MOST_DEEP} deep. Nest fewer policies.")
        yield letter, len(closing)
        before = letter
    if closing:
        what = "quote" if closing[-1] in "\"'" else "bracket"
        raise PolicyError(
            f"{_short(text)}: a {what} is open. Close it with {closing[-1]}, as in offloaded(clusterkv:1024; steps=2)."
        )


def split_policies(text: str) -> list[str]:
    """Split a comma-separated list of policies: `full,chunkkv:budget=0.2,chunk=20,treekv` are three.

    A part that begins with a setting belongs to the policy before it.

    Raises:
        PolicyError: a part or the whole text is empty, or brackets do not match.
    """
    found: list[str] = []
    for part in split(text, ","):
        if not part:
            raise PolicyError(f"{_short(text)}: a policy is empty. Give policies separated by commas.")
        setting = part.partition("=")[0]
        if found and "=" in part and setting.replace("_", "").replace("-", "").isalnum():
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def parse_settings(text: str, name: str, hints: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Parse hyperparameters from `name=value`, and a budget from a value without a name that comes first.

    Args:
        text: the whole text, for messages.
        name: name of the policy or transform.
        hints: types of its hyperparameters.
        settings: the settings.

    Raises:
        PolicyError: a setting is empty, malformed, given twice or unknown, or does not take that value.
    """
    values: dict[str, Any] = {}
    for i, setting in enumerate(settings):
        if not setting:
            raise PolicyError(f"{_short(text)}: a setting is empty. Write NAME=VALUE, or remove the separator.")
        if not i and "=" not in setting:
            if "budget" not in hints:
                takes = f"Write NAME=VALUE, with {', '.join(hints)}." if hints else "It takes no hyperparameters."
                raise PolicyError(f"{_short(text)}: {name} has no budget that {setting!r} could set. {takes}")
            setting = f"budget={setting}"
        try:
            key, value = split_setting(setting)
        except ValueError as error:
            raise PolicyError(f"{_short(text)}: {error}") from None
        if key not in hints:
            raise PolicyError(f"{_short(text)}: {unknown_hyperparameter(name, key, list(hints))}")
        if key in values:
            raise PolicyError(f"{_short(text)}: {key} is given twice. Give it once.")
        if value.startswith("(") and value.endswith(")") and _is_policy(hints[key]):
            values[key] = _parsed(value[1:-1])
            continue
        try:
            values[key] = parse_value(value, hints[key])
        except ValueError as error:
            raise PolicyError(f"{_short(text)}: {key}={_short(value)}; {error}") from None
    return values


def _short(text: str) -> str:
    return short(text, MOST_SHOWN)


def _combined(text: str, name: str, parts: list[str]) -> Policy:
    if name not in (*_WRAPPERS, *_OF_PARTS):
        raise PolicyError(
            f"unknown transform {name!r} in {_short(text)}. Known transforms: {', '.join([*_WRAPPERS, *_OF_PARTS])}."
        )
    if parts == [""]:
        raise PolicyError(f"{_short(text)} has no policy. Write one, as in {name}(full).")
    if "" in parts:
        raise PolicyError(f"{_short(text)}: there is nothing on one side of a semicolon. Remove the semicolon.")
    if name == "by_layer":
        return by_layer([_parsed(part) for part in parts])
    if name == "then":
        if len(parts) != 2:
            raise PolicyError(
                f"{_short(text)}: then takes two policies. Write them as in then(snapkv:0.25; quest:256)."
            )
        return then(_parsed(parts[0]), _parsed(parts[1]))
    if name == "by_head":
        return _by_head(text, parts)
    cls = _WRAPPERS[name]
    try:
        policy = _parsed(parts[0])
    except PolicyError as error:
        if parts[1:] or "," not in parts[0]:
            raise
        raise PolicyError(
            f"{str(error).rstrip('.')}. Settings of {name} follow a semicolon: {name}(POLICY; NAME=VALUE)."
        ) from None
    hints = _hints(cls, without=("policy",)) | {"budget": int | float}
    if parts[1:] and "=" not in parts[1]:
        raise PolicyError(
            f"{_short(text)}: {name} has no budget that {parts[1]!r} could set. Write NAME=VALUE, with {', '.join(hints)}."
        )
    settings = parse_settings(text, name, hints, parts[1:])
    if "budget" in settings:
        policy = policy.with_budget(settings.pop("budget"))
    for field in dataclasses.fields(cls)[1:]:
        if field.default is dataclasses.MISSING and field.name not in settings:
            raise PolicyError(f"{_short(text)}: {field.name}= is missing, and {name} has no default for it. Give it.")
    return cls(policy, **settings)


def _by_head(text: str, parts: list[str]) -> Policy:
    given: dict[str, str] = {}
    for part in parts:
        label, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not label or label in given:
            raise PolicyError(
                f"{_short(text)}: {part!r} is not valid. Write LABEL=POLICY once for each label, and profile=."
            )
        given[label] = value
    if "profile" not in given:
        raise PolicyError(
            f"{_short(text)}: profile is missing. Give profile=, the label of every KV head as ((...), (...))."
        )
    profile = _labels(given.pop("profile"))
    if not profile or not given:
        raise PolicyError(
            f"{_short(text)}: by_head is malformed. Write a policy for each label, and the label of every KV head, layer by layer: "
            "by_head(a=full; b=treekv:256; profile=(('a', 'b'), ('b', 'b')))"
        )
    return by_head({label: _parsed(part) for label, part in given.items()}, profile)


def _labels(text: str) -> tuple[tuple[str, ...], ...] | None:
    """Parse labels [layer][head] from Python tuples or lists of strings. None for anything else."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(found, tuple | list) or not all(isinstance(layer, tuple | list) and layer for layer in found):
        return None
    labels = tuple(tuple(layer) for layer in found)
    return labels if all(isinstance(label, str) for layer in labels for label in layer) else None


def _is_policy(hint: Any) -> bool:
    kinds = getattr(hint, "__args__", (hint,))
    return any(isinstance(kind, type) and issubclass(kind, Policy) for kind in kinds)
