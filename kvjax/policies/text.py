"""Policies written as text: what `policy=` takes, in Python and on the command line, and how a policy is printed.

    treekv                                         a policy as published
    treekv:0.2                                     with a budget
    chunkkv:budget=0.2,chunk=20                    with hyperparameters
    offloaded(clusterkv:1024; steps=2)             a transform of a policy, and its own settings
    recompress(snapkv:512; every=128)
    thresholded(knorm:512; threshold=-12)
    prompt_only(tova:512)
    critical(snapkv:512)
    by_layer(full; treekv:0.2)                     a policy for each layer
    by_head(a=full; b=treekv:256; profile=(("a", "b"), ("b", "b")))

Commas separate hyperparameters, semicolons what stands in parentheses. A value that is a policy itself stands in parentheses:
`catekv:adaptive=(quest:1024)`.
"""

import ast
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from kvjax.settings import LITERAL_ERRORS, parse_value, split_setting

from .base import Policy
from .info import PolicyError
from .registry import make_policy, policies, policy_class, replaced
from .transforms.by_head import by_head
from .transforms.by_layer import by_layer
from .transforms.critical import Critical
from .transforms.offload import Offloaded
from .transforms.prompt_only import PromptOnly
from .transforms.pyramid import Pyramid
from .transforms.quantize import Quantized
from .transforms.recompress import Recompress
from .transforms.threshold import Thresholded

_MOST_DEPTH = 32
"""Brackets within brackets: several times what any policy needs."""

_WRAPPERS: dict[str, type[Any]] = {
    "critical": Critical,
    "offloaded": Offloaded,
    "quantized": Quantized,
    "prompt_only": PromptOnly,
    "pyramid": Pyramid,
    "recompress": Recompress,
    "thresholded": Thresholded,
}


def parse_policy(text: str) -> Policy:
    """The policy that a text names.

    Raises:
        PolicyError: a name is unknown, brackets do not match, or a value is none that its hyperparameter takes.
    """
    text = text.strip()
    _check_depth(text)
    name, bracket, inside = text.partition("(")
    if bracket and ":" not in name:
        if not inside.endswith(")"):
            raise PolicyError(f"{text!r}: close the bracket, as in offloaded(clusterkv:1024; steps=2)")
        return _combined(text, name.strip(), _filled(split(inside[:-1], ";")))
    name, _, settings = text.partition(":")
    return make_policy(name, parse_settings(text, get_type_hints(policy_class(name)), _filled(split(settings, ","))))


def get_policy(policy: str | Policy, **hyperparameters: Any) -> Policy:
    """A policy from its text or name, and hyperparameters (those left out, or None, take the method's defaults).

    A `Policy` is returned as it is, with the given hyperparameters replaced. A policy that has no budget, such as `full` and `kivi`,
    takes any `budget`, which then has no effect: a sweep needs no exception for it.

    Args:
        policy: such as "treekv", "chunkkv:budget=0.2,chunk=20" or "offloaded(clusterkv:1024)"; see this module.

    Raises:
        PolicyError: the name is unknown, the policy has no such hyperparameter, or does not take that value.
    """
    if isinstance(policy, str):
        policy = parse_policy(policy)
    if not callable(getattr(policy, "layer", None)):
        raise PolicyError(f"policy={policy!r}; give a name ({', '.join(policies())}) or a Policy")
    return replaced(policy, {name: value for name, value in hyperparameters.items() if value is not None})


def split(text: str, at: str) -> list[str]:
    """The parts of a text between separators that stand outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += 0 if quote else (letter in "([{") - (letter in ")]}")
        if letter == at and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def split_policies(text: str) -> list[str]:
    """Texts of policies from a list separated by commas: `full,chunkkv:budget=0.2,chunk=20,treekv` are three.

    A part that begins with a setting belongs to the policy before it.

    Raises:
        PolicyError: there is nothing between two commas, or nothing at all.
    """
    found: list[str] = []
    for part in split(text, ","):
        if not part:
            raise PolicyError(f"{text!r}: give policies separated by commas, none of them empty")
        setting = part.partition("=")[0]
        if found and "=" in part and setting.replace("_", "").replace("-", "").isalnum():
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def parse_settings(text: str, hints: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Hyperparameters from `name=value`, and a budget from a value alone that comes first.

    Args:
        text: what they are written in, for messages.
        hints: the types that they are declared with; one that is not among them goes through as a number or text.

    Raises:
        PolicyError: a setting is not written so, or does not take that value.
    """
    values: dict[str, Any] = {}
    for i, setting in enumerate(settings):
        try:
            key, value = split_setting(setting if i or "=" in setting else f"budget={setting}")
        except ValueError as error:
            raise PolicyError(f"{text!r}: {error}") from None
        if value.startswith("(") and _is_policy(hints.get(key)):
            values[key] = parse_policy(value[1:-1])
            continue
        try:
            values[key] = parse_value(value, hints.get(key, int | float | str))
        except ValueError as error:
            raise PolicyError(f"{text!r}: {key}={value!r}; {error}") from None
    return values


def _filled(parts: list[str]) -> list[str]:
    return [part for part in parts if part]


def _combined(text: str, name: str, parts: list[str]) -> Policy:
    if name == "by_layer":
        return by_layer([parse_policy(part) for part in parts])
    if name == "by_head":
        given = dict(split_setting(part) for part in parts)
        if "profile" not in given:
            raise PolicyError(f"{text!r}: by_head needs profile=, the label of every KV head as ((...), (...))")
        profile = _profile(text, given.pop("profile"))
        return by_head({label: parse_policy(part) for label, part in given.items()}, profile)
    if name not in _WRAPPERS:
        raise PolicyError(
            f"unknown transform {name!r} in {text!r}; known: {', '.join([*_WRAPPERS, 'by_layer', 'by_head'])}"
        )
    if not parts:
        raise PolicyError(f"{text!r} has no policy; write one, as in {name}(full)")
    cls = _WRAPPERS[name]
    policy, settings = parse_policy(parts[0]), parse_settings(text, get_type_hints(cls), parts[1:])
    for field in dataclasses.fields(cls)[1:]:
        if field.default is dataclasses.MISSING and field.name not in settings:
            raise PolicyError(f"{text!r}: give {field.name}=, for which {name} has no default")
    return cls(policy, **settings)


def _profile(text: str, written: str) -> Any:
    try:
        return ast.literal_eval(written)
    except LITERAL_ERRORS:
        raise PolicyError(f"{text!r}: profile={written!r}; give labels as ((...), (...))") from None


def _check_depth(text: str) -> None:
    depths = itertools.accumulate((letter in "([{") - (letter in ")]}") for letter in text)
    if (deepest := max(depths, default=0)) > _MOST_DEPTH:
        raise PolicyError(f"{text[:40]!r}…: brackets are nested {deepest} deep; nest at most {_MOST_DEPTH}")


def _is_policy(hint: Any) -> bool:
    kinds = getattr(hint, "__args__", (hint,))
    return any(isinstance(kind, type) and issubclass(kind, Policy) for kind in kinds)
