"""Chat templates: the Jinja dialect that model repositories are written in, in a sandbox."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox


def render(
    template: str, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str], add_generation_prompt: bool
) -> str:
    """The text of a conversation.

    Args:
        template: Jinja source. It comes with the model, so it runs sandboxed.
        messages: ``{"role": …, "content": …}`` each.
        special: texts of ``bos_token``, ``eos_token`` … that templates refer to.
        add_generation_prompt: end with the opening of the assistant's answer.

    Raises:
        ValueError: the template is malformed, or refuses these messages.
    """
    try:
        return _compile(template).render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special,
        )
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: content of a kind the template does not expect
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML characters, which models never saw in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
