"""Chat templates within bounds: hostile ones end soon in a clear error, well-known ones render as they would anywhere."""

import json
import resource
import time
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from kvjax.conversion import chat, sandbox

MESSAGES = [{"role": "user", "content": "hi"}]

BIG = "{% set a = 'a' * 100000 %}"
RANGE = "{% set r = range(100000) %}"
GROWING = (
    "{{% set ns = namespace(x={0}) %}}{{% for i in range(100) %}}{{% set ns.x = {1} %}}{{% endfor %}}{{{{ ns.x }}}}"
)

HOSTILE = {
    # Errors of Python's own.
    "division": "{{ 1 / 0 }}",
    "range": "{{ range(10**9) }}",
    "half a pair": "{{ '\\ud800' }}",
    "date": "{{ strftime_now(5) }}",
    "undefined": "{{ nope.x }}",
    "inclusion": "{% include 'x' %}",
    # Recursion.
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "parentheses": "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
    "lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "branches": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "attributes": "{{ messages" + ".a" * 10000 + " }}",
    # Time.
    "nested loops": RANGE + "{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "filtered loop": RANGE + "{% set b = r|list %}{% for a in r if a not in b %}{% endfor %}",
    "tests": RANGE + "{% set b = r|list %}{{ b|select('in', b)|list }}",
    "two calls": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": GROWING.format("9", "ns.x * ns.x"),
    "rounding": "{{ 1.5|round(10**9, 'ceil') }}",
    "source": "x" * 200_000,
    # Size.
    "text": "{{ 'a' * 10**10 }}",
    "list": "{{ [1] * 10**10 }}",
    "messages": "{{ messages * 10**9 }}",
    "sums": GROWING.format("'a'", "ns.x + ns.x"),
    "concatenation": GROWING.format("'a'", "ns.x ~ ns.x"),
    "shared lists": GROWING.format("[1]", "[ns.x, ns.x]"),
    "shared lists as JSON": "{% set a = [1] %}" + "{% set a = [a, a, a, a] %}" * 20 + "{{ a|tojson }}",
    "shared namespaces": "{% set n = namespace(a=1) %}" + "{% set n = namespace(a=n, b=n) %}" * 30 + "{{ n }}",
    "namespace in a list": "{% set n = namespace(a=1) %}{{ [n] }}",
    "output": BIG + "{{ a }}" * 100,
    "macro's output": BIG + "{% macro f() %}" + "{{ a }}" * 5000 + "{% endmacro %}{{ f() }}",
    "block's output": BIG + "{% set b %}" + "{{ a }}" * 5000 + "{% endset %}",
    "one concatenation": BIG + "{% set b = " + " ~ ".join("a" * 5000) + " %}",
    "padding": "{{ 'a'.ljust(10**10) }}",
    "centring": "{{ 'a'|center(10**10) }}",
    "tabs": "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "percent filter": "{{ '%10000000000d'|format(1) }}",
    "braces": "{{ '{:>10000000000}'.format(1) }}",
    "braces in braces": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "replacement": BIG + "{{ a.replace('a', a) }}",
    "replacement of nothing": BIG + "{{ a|replace('', a) }}",
    "translation": "{{ 'a'.translate({97: 'b' * 100000}) }}",
    "joining": RANGE + BIG + "{{ r|join(a) }}",
    "joining lazily": BIG + "{{ ([a] * 100)|map('upper')|join }}",
    "method join": BIG + "{{ a.join(['b'] * 100000) }}",
    "indentation": "{{ ('\\n' * 100000)|indent(100000) }}",
    "JSON's indentation": RANGE + "{{ (r|list)|tojson(indent=100000) }}",
    "JSON's separators": BIG + "{{ range(1000)|list|tojson(separators=(a, a)) }}",
    "batches": "{{ [1]|batch(10**9, 'x')|list }}",
    "quadratic sum": "{{ ([[1]] * 100000)|sum(start=[]) }}",
    "filler": "{{ lipsum(10**6) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ValueError, match="the model's chat template refuses these messages: ") as raised:
        chat.render(HOSTILE[name], MESSAGES, {}, add_generation_prompt=True)
    assert time.monotonic() - begun < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"
    assert type(raised.value) is ValueError
    assert "TypeCheckError" not in str(raised.value), "the template's own failure, not ours"
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_errors_name_what_was_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    for source, what in (
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ 'a' * 10**10 }}", "it makes 20000000000 characters or elements at once"),
        (HOSTILE["power"], "it makes an integer of 40000000000 bits"),
        (HOSTILE["nested loops"], "it takes more than 0.5 seconds"),
        (HOSTILE["source"], "it has 200000 characters; at most 131072 are allowed"),
    ):
        with pytest.raises(ValueError, match=rf"refuses these messages: {what}"):
            chat.render(source, MESSAGES, {}, add_generation_prompt=True)


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"é": [1, 2.5]}}}}
    for name in ("weather", "time")
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": MESSAGES,
    "system": [{"role": "system", "content": " Be brief. "}, *MESSAGES],
    "tools": [
        *MESSAGES,
        CALL,
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "<think>a</think>Sun."},
    ],
    "long": [{"role": role, "content": f"{i} " * 500} for i in range(500) for role in ("user", "assistant")],
    "a book": [{"role": "user", "content": "word " * 1_000_000}],
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ["smollm2", "llama3", "qwen2.5", "qwen3"])
def test_well_known_templates(name: str, conversation: str) -> None:
    """They render as in Jinja's own sandbox, with tools (which the template sets here) and without."""
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    plain.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    source = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()
    messages = CONVERSATIONS[conversation]
    for tools in (None, TOOLS):
        given = source if tools is None else "{% set tools = " + json.dumps(tools) + " %}" + source
        values = {"messages": messages, "tools": tools, "bos_token": "<s>", "add_generation_prompt": True}
        expected = plain.from_string(source).render(values)
        assert chat.render(given, messages, {"bos_token": "<s>"}, add_generation_prompt=True) == expected


def test_a_template_is_counted_alone() -> None:
    environment = sandbox.Environment()
    template = environment.from_string("{{ 'a' * 300000 }}")
    assert {len(environment.bounded(template)) for _ in range(5)} == {300_000}, "more than one may make, in all"
