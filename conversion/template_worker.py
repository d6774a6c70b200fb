"""The worker process that renders chat templates. It runs as a script, and imports Jinja but nothing of kvjax.

    python -I -S template_worker.py DIRECTORY...

Jinja is imported from the directories. A request is its length in eight bytes, then a dictionary in Python's `marshal`
format (see `sandbox.render`). A reply is one byte for its kind, its length in eight bytes, then UTF-8 text. The process
exits when its input ends, or when a template exceeds the memory limit.
"""

import contextlib
import datetime
import functools
import json
import marshal
import sys
import time
from typing import Any, BinaryIO, NoReturn

if __name__ == "__main__":
    sys.path += sys.argv[1:]

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

try:
    import resource
except ImportError:  # not available on Windows
    resource = None

READY, TEXT, REFUSED, MEMORY = b"r", b"t", b"e", b"m"
"""Kinds of replies: the process has started; rendered text; an error; the memory limit was exceeded."""

now = datetime.datetime.now
"""The clock of `strftime_now`, replaced by each request."""


class Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks the model's text for training. Its contents are rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert to JSON without escaping HTML characters. Jinja's own filter escapes them, but training data did not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@functools.cache
def environment() -> jinja2.sandbox.SandboxedEnvironment:
    """The sandboxed environment, set up as in transformers' `apply_chat_template`."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: now().strftime(form)
    return made


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """Compile a template's source."""
    return environment().from_string(source)


@functools.lru_cache(maxsize=8)
def variables(source: str) -> list[str]:
    """Names of the variables that a template reads from its arguments."""
    made = environment()
    return sorted(jinja2.meta.find_undeclared_variables(made.parse(source)) - set(made.globals))


def answer(request: dict[str, Any]) -> tuple[bytes, bytes]:
    """Render a request's template and return the kind of the reply and the reply."""
    global now
    try:
        _limit(request["memory"], request["seconds"])
        fixed = request["now"]
        now = datetime.datetime.now if fixed is None else lambda: datetime.datetime.fromisoformat(fixed)
        read = variables(request["template"]) if request["reads"] else []
        if unread := [name for name in request["reads"] if name not in read]:
            return REFUSED, f"it does not read {unread[0]!r}; it reads {', '.join(read)}"[:2000].encode()
        text = compiled(request["template"]).render(request["values"])
        if len(text) > request["most"]:
            return REFUSED, b"it makes %d characters; at most %d are allowed" % (len(text), request["most"])
        return TEXT, text.encode()
    except MemoryError:
        return MEMORY, b""
    except Exception as error:  # a template is a program, so any exception is possible
        line = next((line for line in str(error).splitlines() if line.strip()), "")[:300]
        known = isinstance(error, jinja2.TemplateError)
        name = type(error).__name__
        return REFUSED, (line or name if known else f"{name}: {line}").encode(errors="replace")


def _limit(memory: int, seconds: float) -> None:
    """Limit memory, and CPU time in case the parent no longer waits for the result."""
    if resource is not None:
        _lower(resource.RLIMIT_AS, memory)
        _lower(resource.RLIMIT_CPU, int(time.process_time() + seconds) + 2)
        _lower(resource.RLIMIT_CORE, 0)


def _lower(kind: int, most: int) -> None:
    """Lower a limit, as far as the system allows."""
    assert resource is not None
    _, hard = resource.getrlimit(kind)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until the input ends."""
    environment()
    replies.write(READY + bytes(8))
    replies.flush()
    while len(head := requests.read(8)) == 8:
        kind, reply = answer(marshal.loads(requests.read(int.from_bytes(head, "little"))))
        replies.write(kind + len(reply).to_bytes(8, "little") + reply)
        replies.flush()
        if kind == MEMORY:
            return


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
