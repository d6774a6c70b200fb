"""Chat templates: the Jinja dialect that model repositories are written in."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext

from . import sandbox
from .errors import told


def render(
    template: str, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str], add_generation_prompt: bool
) -> str:
    """The text of a conversation.

    Args:
        template: Jinja source. It comes with the model, so it runs sandboxed, within bounds of time and size.
        messages: ``{"role": …, "content": …}`` each.
        special: texts of ``bos_token``, ``eos_token`` … that templates refer to.
        add_generation_prompt: end with the opening of the assistant's answer.

    Raises:
        ValueError: the template is malformed, refuses these messages, fails, or goes beyond its bounds.
    """
    try:
        text = _environment().bounded(
            _compile(template),
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special,
        )
        text.encode()  # half of a surrogate pair is no text
        return text
    except Exception as error:  # a template is a program: it may run into anything
        refused = isinstance(error, jinja2.TemplateError | sandbox.ExceededError)
        what = told(error) if refused else f"{type(error).__name__}: {told(error)}"
        raise ValueError(f"the model's chat template refuses these messages: {what}") from error


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> sandbox.Environment:
    environment = sandbox.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.offer("tojson", _to_json)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which models never saw in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
