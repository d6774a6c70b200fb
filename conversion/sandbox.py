"""Jinja within bounds: a template that comes with a model can take neither long, nor much memory, nor Python's objects.

Jinja's own sandbox keeps templates from Python's internals but lets them compute for ever. Here everything that a template
makes is counted against an `Allowance`, and what one operation could blow up (``'a' * 10**10``) is estimated before it runs.
Every loop, comparison and call looks at the clock in between. Nothing needs signals, threads or processes.
"""

import contextvars
import dataclasses
import functools
import inspect
import re
import sys
import time
from collections.abc import Callable, Generator, ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

SECONDS = 3.0
"""That a template may take; the longest ones known take milliseconds."""

SIZE = 1 << 20
"""Characters and elements that a template may make, beside some for each that it is given."""

SOURCE = 1 << 17
"""Characters of a template; the longest ones known have a fifth of it."""

_BITS = 4096
"""Of an integer."""

_COUNT = 10**5
"""Of an integer that says how much of something a filter or a method is to make."""

_UNOFFERED = ("pprint", "urlize", "wordwrap", "xmlattr")
"""Filters for web pages and debugging, whose time is hard to bound."""

_UNBOUNDED_FORMAT = re.compile(r"\d{5}|\*|\{[^}]*\{")
"""Widths of fields that are huge, or come from elsewhere."""


class ExceededError(Exception):
    """A template goes beyond what it is allowed."""


@dataclasses.dataclass
class Allowance:
    """What is left to a template that is being rendered.

    Attributes:
        size: the most that one value may hold, written out.
        left: characters and elements that may still be made.
        end: when time is up, by `time.monotonic`.
    """

    size: int
    left: int
    end: float

    @classmethod
    def of(cls, inputs: Any) -> "Allowance":
        """For a template that is given `inputs`."""
        size = SIZE + 20 * written(inputs)
        return cls(size, size, time.monotonic() + SECONDS)

    def spend(self, size: int = 1) -> bool:
        """Count what is about to be made; True."""
        self.left -= size
        if self.left < 0:
            raise ExceededError(f"it makes more than {self.size} characters and elements")
        if time.monotonic() > self.end:
            raise ExceededError(f"it takes more than {SECONDS:g} seconds")
        return True

    def made(self, value: Any) -> Any:
        """Count a value that was made; the value. What it holds counts once here, but must be short when written out."""
        if isinstance(value, int) and value.bit_length() > _BITS:
            raise ExceededError(f"it makes an integer of {value.bit_length()} bits")
        self.spend(1 + (len(value) if isinstance(value, _SIZED) and not isinstance(value, range) else 0))
        if isinstance(value, _HOLDERS):
            written(value, self.size)
        return value

    def foresee(self, size: int) -> None:
        """Refuse an operation whose result would be as large as this."""
        if size > self.size:
            raise ExceededError(f"it makes {size} characters or elements at once")


_HOLDERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)
_SIZED = (str, bytes, range, *_HOLDERS)

_allowance: contextvars.ContextVar[Allowance] = contextvars.ContextVar("allowance")


def written(value: Any, most: int = sys.maxsize, indent: int = 0) -> int:
    """How long a value is when all that it holds is written out, each line indented by its depth.

    Raises:
        ExceededError: more than `most`.
    """
    size, walked, held = 0, 0, [(value, 0)]
    while held:
        value, depth = held.pop()
        size += 1 + depth * indent
        walked += 1
        if not walked % 4096 and most < sys.maxsize:
            _allowance.get().spend(0)
        if isinstance(value, str | bytes | range):
            size += len(value)
        elif isinstance(value, Mapping):
            held.extend((item, depth + 1) for pair in value.items() for item in pair)
        elif isinstance(value, _HOLDERS):
            held.extend((item, depth + 1) for item in value)
        elif isinstance(value, jinja2.utils.Namespace) and depth:
            raise ExceededError("it puts a namespace into another value")
        if size > most or len(held) > most:
            raise ExceededError(f"it makes values of more than {most} characters and elements")
    return size


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Where templates run: set an allowance and render by `bounded`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_shown, optimized=False, **options)
        self.filters = {
            name: _bounded_filter(name, function) for name, function in self.filters.items() if name not in _UNOFFERED
        }
        self.filters |= {"_made": _made, "_concat": _bounded_filter("_concat", _concat)}
        self.tests = {name: _counted(function) for name, function in self.tests.items()}
        self.globals["_tick"] = lambda: _allowance.get().spend()
        del self.globals["lipsum"]

    def offer(self, name: str, function: Callable[..., Any]) -> None:
        """Add or replace a filter."""
        self.filters[name] = _bounded_filter(name, function)

    def bounded(self, template: jinja2.Template, **values: Any) -> str:
        """Render.

        Raises:
            ExceededError: too much time or size.
            Exception: whatever the template runs into.
        """
        allowance = Allowance.of(list(values.values()))
        token = _allowance.set(allowance)
        try:
            return _joined(template.generate(**values))
        finally:
            _allowance.reset(token)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > SOURCE:
            raise ExceededError(f"it has {len(source)} characters; at most {SOURCE} are allowed")
        return _Guard().visit(super()._parse(source, name, filename))

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        allowance = _allowance.get()
        allowance.spend()
        args = tuple(_settled(arg) for arg in args)
        owner = getattr(inspect.unwrap(__obj), "__self__", None)
        if isinstance(owner, str | bytes | int | float):
            _foresee(allowance, getattr(__obj, "__name__", ""), (owner, *args), kwargs)
        return allowance.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        allowance = _allowance.get()
        if operator in ("*", "**"):
            _foresee_product(allowance, operator, left, right)
        elif operator == "%" and isinstance(left, str | bytes):
            _foresee(allowance, "format", (left, right), {})
        return allowance.made(super().call_binop(context, operator, left, right))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join what a macro or a block has written."""
        return _joined(parts)


class _Guard(NodeTransformer):
    """Puts what Jinja computes without asking its environment under an environment's eyes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_tick(), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_tick(), node.test, lineno=node.lineno)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        return nodes.And(_tick(), self.generic_visit(node), lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = self._visit_made(nodes.List(node.nodes, lineno=node.lineno))
        return nodes.Filter(parts, "_concat", [], [], None, None, lineno=node.lineno)

    def _visit_made(self, node: Any) -> nodes.Node:
        node = self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or (
            isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice)
        ):
            return node
        return nodes.Filter(node, "_made", [], [], None, None, lineno=node.lineno)

    visit_List = visit_Tuple = visit_Dict = visit_Getitem = _visit_made


def _tick() -> nodes.Expr:
    return nodes.Call(nodes.Name("_tick", "load"), [], [], None, None)


def _made(value: Any) -> Any:
    return _allowance.get().made(value)


def _concat(parts: list[Any]) -> str:
    return "".join(map(str, parts))


def _joined(parts: Iterable[str]) -> str:
    allowance, held = _allowance.get(), []
    for part in parts:
        allowance.spend(len(part))
        held.append(part)
    return "".join(held)


@jinja2.pass_context
def _shown(context: Any, value: Any) -> Any:
    """What stands between braces, before it becomes text."""
    allowance = _allowance.get()
    allowance.spend(written([value], allowance.size))
    return value


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _allowance.get().spend()
        return function(*args, **kwargs)

    return counted


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or the environment comes first

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        allowance = _allowance.get()
        allowance.spend()
        args = (*args[:passed], *(_settled(arg) for arg in args[passed:]))
        _foresee(allowance, name, args[passed:], kwargs)
        return allowance.made(function(*args, **kwargs))

    return bounded


def _settled(value: Any) -> Any:
    """What a lazy filter gives, at once: its size then is known."""
    return _allowance.get().made(list(value)) if isinstance(value, Generator) else value


def _foresee(allowance: Allowance, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Estimate what a filter, or a method of text and numbers, makes of its arguments; the first is what it works on."""
    subject, rest = args[0] if args else "", (*args[1:], *kwargs.values())
    counts = [abs(arg) for arg in rest if isinstance(arg, int | float)]
    if any(count > _COUNT for count in counts):
        raise ExceededError(f"it asks {name} for {max(counts):g} of something")
    texts = [len(arg) for arg in rest if isinstance(arg, str | bytes)]
    longest, most = max(texts, default=0), max(counts, default=0)
    match name:
        case "replace":
            found = len(subject)
            if rest and isinstance(subject, str) and isinstance(rest[0], str) and rest[0]:
                found = subject.count(rest[0])
            allowance.foresee(written(subject) + (found + 1) * longest)
        case "join":
            parts = rest[0] if isinstance(subject, str | bytes) and rest else subject
            between = len(subject) if parts is not subject else longest
            number = len(parts) if isinstance(parts, _SIZED) else 0
            allowance.foresee(written(parts, allowance.size) + number * between)
        case "indent":
            allowance.foresee(written(subject) + (str(subject).count("\n") + 1) * max(int(most), longest))
        case "expandtabs":
            allowance.foresee(len(subject) * (int(most) + 8))
        case "translate" | "maketrans":
            raise ExceededError(f"it calls {name}")
        case "tojson":
            written(subject, allowance.size // max(longest, 1), indent=int(most))
            allowance.foresee(written(subject, allowance.size) * max(1, *(len(str(arg)) for arg in rest), 1))
        case "format" | "format_map":
            if _UNBOUNDED_FORMAT.search(str(subject)):
                raise ExceededError("it formats fields of a huge width")
            fields = str(subject).count("%") + str(subject).count("{") + 1
            allowance.foresee(len(subject) + fields * sum(written(arg, allowance.size) for arg in rest))
        case "sum" if not isinstance(kwargs.get("start", args[2] if len(args) > 2 else 0), int | float):
            raise ExceededError("it sums what is no number")
        case _:
            pass


def _foresee_product(allowance: Allowance, operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _BITS:
            raise ExceededError(f"it makes an integer of {bits} bits")
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(value, _SIZED) and isinstance(times, int):
                allowance.foresee(written(value, allowance.size) * max(times, 0))
