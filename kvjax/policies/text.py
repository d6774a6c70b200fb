"""Policies written as text: what `policy=` takes, in Python and on the command line, and how a policy is printed.

    treekv                                         a policy as published
    treekv:0.2                                     with a budget
    chunkkv:budget=0.2,chunk=20                    with hyperparameters
    offloaded(clusterkv:1024; steps=2)             a transform of a policy, and its own settings
    by_layer(full; treekv:0.2)                     a policy for each layer
    by_head(a=full; b=treekv:256; profile=(("a", "b"), ("b", "b")))

Commas separate hyperparameters, semicolons what stands in parentheses. A value that is a policy itself stands in parentheses:
`catekv:adaptive=(quest:1024)`.
"""

import ast
import dataclasses
from collections.abc import Iterable
from typing import Any, get_type_hints

from kvjax.settings import parse_value, split_setting

from .base import Policy
from .info import PolicyError
from .registry import make_policy, policy_class
from .transforms.by_head import ByHead, by_head
from .transforms.by_layer import ByLayer, by_layer
from .transforms.offload import Offloaded
from .transforms.pyramid import Pyramid
from .transforms.quantize import Quantized

_WRAPPERS: dict[str, type[Policy]] = {"offloaded": Offloaded, "quantized": Quantized, "pyramid": Pyramid}


def parse_policy(text: str) -> Policy:
    """The policy that a text names.

    Raises:
        PolicyError: a name is unknown, brackets do not match, or a value is none that its hyperparameter takes.
    """
    text = text.strip()
    name, bracket, inside = text.partition("(")
    if bracket and ":" not in name:
        if not inside.endswith(")"):
            raise PolicyError(f"{text!r}: close the bracket, as in offloaded(clusterkv:1024; steps=2)")
        return _combined(text, name.strip(), split(inside[:-1], ";"))
    name, _, settings = text.partition(":")
    return make_policy(name, _values(text, policy_class(name), split(settings, ",")))


def policy_text(policy: Policy) -> str:
    """The text that `parse_policy` makes this policy of; hyperparameters at their defaults are left out.

    Raises:
        PolicyError: a hyperparameter is a value that no text stands for, such as a profile that is in no file.
    """
    match policy:
        case ByLayer(layers):
            return f"by_layer({'; '.join(map(policy_text, layers))})"
        case ByHead(groups, heads):
            names = [f"g{i}" for i in range(len(groups))]
            count = 1 + max(head for layers in heads for layer in layers for head in layer)
            labels = [
                tuple(next(names[g] for g in range(len(groups)) if head in heads[g][at]) for head in range(count))
                for at in range(len(heads[0]))
            ]
            parts = [f"{name}={policy_text(group)}" for name, group in zip(names, groups, strict=True)]
            return f"by_head({'; '.join([*parts, f'profile={tuple(labels)!r}'])})"
    for name, cls in _WRAPPERS.items():
        if type(policy) is cls:
            first, *others = dataclasses.fields(policy)
            return f"{name}({'; '.join([policy_text(getattr(policy, first.name)), *_settings(policy, others)])})"
    settings = ",".join(_settings(policy, dataclasses.fields(policy)))
    return f"{policy.info.name}:{settings}" if settings else policy.info.name


def split(text: str, at: str) -> list[str]:
    """The parts of a text between separators that stand outside of brackets and quotes; those that are empty are left out."""
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
    return [part.strip() for part in parts if part.strip()]


def split_policies(text: str) -> list[str]:
    """Texts of policies from a list separated by commas: `full,chunkkv:budget=0.2,chunk=20,treekv` are three.

    A part that begins with a setting belongs to the policy before it.
    """
    found: list[str] = []
    for part in split(text, ","):
        setting = part.partition("=")[0]
        if found and "=" in part and setting.replace("_", "").replace("-", "").isalnum():
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _combined(text: str, name: str, parts: list[str]) -> Policy:
    if name == "by_layer":
        return by_layer([parse_policy(part) for part in parts])
    if name == "by_head":
        given = dict(split_setting(part) for part in parts)
        if "profile" not in given:
            raise PolicyError(f"{text!r}: by_head needs profile=, the label of every KV head as ((...), (...))")
        profile = ast.literal_eval(given.pop("profile"))
        return by_head({label: parse_policy(part) for label, part in given.items()}, profile)
    if name not in _WRAPPERS:
        raise PolicyError(
            f"unknown transform {name!r} in {text!r}; known: {', '.join([*_WRAPPERS, 'by_layer', 'by_head'])}"
        )
    if not parts:
        raise PolicyError(f"{text!r} has no policy; write one, as in {name}(full)")
    cls = _WRAPPERS[name]
    return cls(parse_policy(parts[0]), **_values(text, cls, parts[1:]))


def _values(text: str, cls: type[Policy], settings: list[str]) -> dict[str, Any]:
    """Hyperparameters from `name=value`, and a budget from a value alone."""
    hints, fields = get_type_hints(cls), {field.name for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for i, setting in enumerate(settings):
        try:
            key, value = split_setting(setting if i or "=" in setting else f"budget={setting}")
        except ValueError as error:
            raise PolicyError(f"{text!r}: {error}") from None
        if value.startswith("(") and key in fields and _is_policy(hints[key]):
            values[key] = parse_policy(value[1:-1])
            continue
        try:
            # Which are of this kind is told by the field; an unknown one is refused with the names of all.
            values[key] = parse_value(value, hints.get(key, int | float | str))
        except ValueError as error:
            raise PolicyError(f"{text!r}: {key}={value!r}; {error}") from None
    return values


def _is_policy(hint: Any) -> bool:
    kinds = getattr(hint, "__args__", (hint,))
    return any(isinstance(kind, type) and issubclass(kind, Policy) for kind in kinds)


def _settings(policy: Policy, fields: Iterable[Any]) -> list[str]:
    """`name=value` of all that is not at its default."""
    hints, written = get_type_hints(type(policy)), []
    for field in fields:
        value = getattr(policy, field.name)
        if value == field.default:
            continue
        if isinstance(value, Policy):
            written.append(f"{field.name}=({policy_text(value)})")
            continue
        text = "none" if value is None else str(value)
        try:
            read = parse_value(text, hints[field.name])
        except ValueError:
            read = None
        if read != value:
            raise PolicyError(f"{policy.info.name}: {field.name} is {value!r}, which cannot be written as text")
        written.append(f"{field.name}={text}")
    return written
