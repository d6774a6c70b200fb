"""Chat templates within bounds: hostile ones end soon in a clear error, well-known ones render as they would anywhere."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest
from hypothesis import strategies as st

from kvjax.conversion import chat, sandbox

MESSAGES = [{"role": "user", "content": "hi"}]

BIG = "{% set a = 'a' * 100000 %}"
RANGE = "{% set r = range(100000) %}"
GROWING = (
    "{{% set ns = namespace(x={0}) %}}{{% for i in range(100) %}}{{% set ns.x = {1} %}}{{% endfor %}}{{{{ ns.x }}}}"
)

HOLDING = (
    "{{% set n = namespace(x=[1]) %}}{{% for i in range(40) %}}{{% set n.x = {0} %}}{{% endfor %}}{{{{ n.x|string }}}}"
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
    "joining": RANGE + BIG + "{{ r|join(a) }}",
    "joining lazily": BIG + "{{ ([a] * 100)|map('upper')|join }}",
    "method join": BIG + "{{ a.join(['b'] * 100000) }}",
    "indentation": "{{ ('\\na' * 100000)|indent(100000) }}",
    "JSON's indentation": RANGE + "{{ (r|list)|tojson(indent=100000) }}",
    "JSON's separators": BIG + "{{ range(1000)|list|tojson(separators=(a, a)) }}",
    "batches": "{{ [1]|batch(10**9, 'x')|list }}",
    "quadratic sum": "{{ ([[1]] * 100000)|sum(start=[]) }}",
    "filler": "{{ lipsum(10**6) }}",
    # What Jinja's own objects hold.
    "cycler": HOLDING.format("cycler(n.x, n.x).items"),
    "joiner": HOLDING.format("joiner([n.x, n.x]).sep"),
    "groupby": HOLDING.format("([{'a': n.x}, {'a': n.x}]|groupby('a'))"),
    "what loops hold": "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% for j in [n.x, n.x] %}"
    "{% set n.x = [loop.nextitem, loop.previtem, j] %}{% endfor %}{% endfor %}{{ n.x|string }}",
}


def held(who: int) -> int:
    """The most kilobytes that this process, or one that it has waited for, has held."""
    return resource.getrusage(who).ru_maxrss


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Neither this process nor the one that renders takes much: together less than 1 GB with all that is imported here."""
    before, children = held(resource.RUSAGE_SELF), held(resource.RUSAGE_CHILDREN)
    yield
    assert held(resource.RUSAGE_SELF) - before < 100_000
    # Linux counts what this process held when it started the other one as the other's, too.
    assert held(resource.RUSAGE_CHILDREN) <= max(children, held(resource.RUSAGE_SELF), 350_000)


def refusal(template: str) -> str:
    """Why a template is refused, soon and in one short line; nothing if it renders."""
    begun, found = time.monotonic(), None
    try:
        chat.render(template, MESSAGES, {}, add_generation_prompt=True)
    except ValueError as error:
        found = error
    assert time.monotonic() - begun < 5
    assert type(found) in (type(None), ValueError)
    text = "" if found is None else str(found)
    assert "\n" not in text
    assert len(text) < 500
    return text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.15)
    with little_memory():
        assert refusal(HOSTILE[name]).startswith("the model's chat template refuses these messages: ")


NAMES = st.sampled_from(
    ["messages", "x", "y", "ns", "ns.x", "loop", "f", "cycler", "joiner", "range", "dict", "namespace", "self"]
)
FILTERS = st.sampled_from(
    [
        "list",
        "join",
        "length",
        "upper",
        "tojson",
        "groupby('a')",
        "batch(3)",
        "slice(9999)",
        "sum",
        "sort",
        "unique",
        "reverse",
        "first",
        "map('upper')",
        "indent(99999)",
        "center(10**8)",
        "replace('a','a'*9999)",
        "string",
        "pprint",
        "urlize",
        "wordwrap(1)",
        "items",
        "select('in',x)",
        "format(x)",
        "xmlattr",
        "dictsort",
        "escape",
        "default(x)",
        "tojson(indent=9999)",
        "round(10**6)",
        "attr('items')",
    ]
)
CONSTANTS = st.sampled_from(
    [
        "0",
        "1",
        "-1",
        "7",
        "9**9",
        "99999",
        "1.5",
        "'a'",
        "'ab'",
        "'%9999999d'",
        "'{:>9999999}'",
        "none",
        "true",
        "'</think>'",
    ]
)
OPERATORS = st.sampled_from(["+", "-", "*", "**", "~", "%", "//", "/", "in", "==", "<", "and", "or", "is"])
CALLED = st.sampled_from(
    [
        "cycler",
        "joiner",
        "range",
        "dict",
        "namespace",
        "f",
        "loop",
        "lipsum",
        "x.join",
        "x.format",
        "strftime_now",
        "caller",
    ]
)
ATTRIBUTES = st.sampled_from(["items", "x", "sep", "next()", "__class__", "nextitem", "previtem", "append", "0"])


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Expressions of Jinja that are made of others."""
    return st.one_of(
        st.builds("({} {} {})".format, inner, OPERATORS, inner),
        st.builds("({}|{})".format, inner, FILTERS),
        st.builds("{}({}, {})".format, CALLED, inner, inner),
        st.builds("{}({})".format, CALLED, inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("{{'a': {}, 'b': {}}}".format, inner, inner),
        st.builds("({})[{}]".format, inner, inner),
        st.builds("({}).{}".format, inner, ATTRIBUTES),
        st.builds("({})[{}::{}]".format, inner, inner, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("(not {})".format, inner),
    )


EXPRESSIONS = st.recursive(st.one_of(NAMES, CONSTANTS), larger, max_leaves=6)


def blocks(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Statements of Jinja that hold others."""
    loops = st.sampled_from(["range(99999)", "range(40)", "messages", "[1, 2]", "x", "y"])
    return st.one_of(
        st.builds("{{% for y in {} %}}{}{{% endfor %}}".format, loops, inner),
        st.builds(
            "{{% for y in {} if {} recursive %}}{}{{% else %}}{}{{% endfor %}}".format, loops, EXPRESSIONS, inner, inner
        ),
        st.builds("{{% if {} %}}{}{{% elif {} %}}{}{{% endif %}}".format, EXPRESSIONS, inner, EXPRESSIONS, inner),
        st.builds("{{% macro f(x, y=1) %}}{}{{% endmacro %}}{{{{ f({}) }}}}".format, inner, EXPRESSIONS),
        st.builds("{{% call(x) f({}) %}}{}{{% endcall %}}".format, EXPRESSIONS, inner),
        st.builds("{{% filter {} %}}{}{{% endfilter %}}".format, FILTERS, inner),
        st.builds("{{% set x %}}{}{{% endset %}}".format, inner),
        st.builds("{{% block a %}}{}{{% endblock %}}".format, inner),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, inner),
        st.builds("{{% with x = {} %}}{}{{% endwith %}}".format, EXPRESSIONS, inner),
        st.builds("{}{}".format, inner, inner),
    )


STATEMENTS = st.one_of(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
    st.builds("{{% set x = {} %}}".format, EXPRESSIONS),
    st.builds("{{% set ns.x = {} %}}".format, EXPRESSIONS),
    st.sampled_from(
        ["text", "{% break %}", "{% continue %}", "{% include 'x' %}", "{% raw %}{{{% endraw %}", "{# #}", "\n  "]
    ),
)
TEMPLATES = st.builds(
    "{{% set x = {} %}}{{% set ns = namespace(x=x) %}}{}".format,
    EXPRESSIONS,
    st.recursive(STATEMENTS, blocks, max_leaves=8),
)


@hypothesis.settings(max_examples=150)
@hypothesis.given(TEMPLATES)
def test_any_template_renders_or_is_refused(template: str) -> None:
    with pytest.MonkeyPatch.context() as patch, little_memory():
        patch.setattr(sandbox, "SECONDS", 0.15)
        refusal(template)


@pytest.mark.slow
@pytest.mark.rotating
# By these names, the cases are in different parts of the rotating tests.
@pytest.mark.parametrize("seed", range(3), ids=["part 1", "part 2", "part 3"])
def test_very_many_templates_render_or_are_refused(seed: int) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=700)
    @hypothesis.given(TEMPLATES)
    def check(template: str) -> None:
        with little_memory():
            refusal(template)

    check()


def test_errors_name_what_was_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    for source, what in (
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ 'a' * 10**10 }}", "it takes more than 256 MiB of memory"),
        ("{{ 'a' * 10**7 }}", r"it makes 10000000 characters; at most \d{7} are allowed"),
        (HOSTILE["power"], "it takes more than 0.5 seconds"),
        (HOSTILE["nested loops"], "it takes more than 0.5 seconds"),
        (HOSTILE["source"], "it has 200000 characters; at most 131072 are allowed"),
    ):
        # On a busy machine other templates may take half a second, too.
        monkeypatch.setattr(sandbox, "SECONDS", 0.5 if "0.5 seconds" in what else 30.0)
        with pytest.raises(ValueError, match=rf"refuses these messages: {what}"):
            chat.render(source, MESSAGES, {}, add_generation_prompt=True)


def rendered(text: str = "{{ messages[0].content }}") -> str:
    return chat.render(text, MESSAGES, {}, add_generation_prompt=True)


def worker() -> int:
    """The process that renders."""
    assert rendered() == "hi"
    assert sandbox._renderer._worker is not None
    return sandbox._renderer._worker._process.pid


def test_a_process_is_kept_for_the_next_template() -> None:
    """Rendering in it takes a millisecond; 20 would be too many."""
    pid, times = worker(), []
    for _ in range(20):
        begun = time.perf_counter()
        rendered()
        times.append(time.perf_counter() - begun)
    assert sorted(times)[10] < 0.02
    assert worker() == pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_has_died_is_started_again(number: int) -> None:
    pid = worker()
    os.kill(pid, number)
    assert worker() != pid


def test_a_process_that_dies_of_a_template_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As of a fault in Python itself; it is not tried forever."""
    sandbox._renderer.close()
    program = Path(sandbox.__file__).with_name("template_worker.py").read_text()
    (tmp_path / "template_worker.py").write_text(
        program.replace("    global now\n", "    global now; import os; os.abort()\n")
    )
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "__file__", str(tmp_path / "sandbox.py"))
        with pytest.raises(ValueError, match="it ends the process that renders it"):
            rendered()
    assert worker()


def test_a_process_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox._renderer.close()
    for executable, says in (
        (sys.executable + "x", "cannot be started"),
        ("/bin/true", "cannot be started"),
        ("", "sys.executable is not a Python interpreter"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sandbox.multiprocessing.spawn, "get_executable", lambda executable=executable: executable)
            with pytest.raises(ValueError, match=says):
                rendered()
    assert worker()


def test_threads_render_side_by_side() -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: rendered(f"{{{{ messages[0].content }}}}{i}"), range(64)))
    assert texts == [f"hi{i}" for i in range(64)]


def test_an_interrupt_ends_a_render_and_leaves_the_next_one_right() -> None:
    begun = time.monotonic()
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        rendered(HOSTILE["nested loops"])
    timer.join()
    assert time.monotonic() - begun < 2
    assert rendered() == "hi"


CHILD = f"""
import importlib.util, os, time
spec = importlib.util.spec_from_file_location("sandbox", {sandbox.__file__!r})
sandbox = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sandbox)

def pid():
    assert sandbox.render("{{{{ x }}}}", {{"x": "hi"}}) == "hi"
    return sandbox._renderer._worker._process.pid
"""


def run(code: str) -> subprocess.Popen[str]:
    """A program of its own that renders, warnings being errors."""
    command = [sys.executable, "-W", "error::ResourceWarning", "-X", "dev", "-c", CHILD + code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_it_ends_with_the_program() -> None:
    """Quietly: as the program ends, is killed, and is forked. A forked program has a process of its own."""
    code = """
mine = pid()
if not (child := os.fork()):
    other = pid()
    print(mine, other, flush=True)
    os._exit(int(other == mine))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert pid() == mine
"""
    found = run(code)
    out, err = found.communicate(timeout=120)
    assert (found.returncode, err) == (0, "")
    assert all(gone(int(number)) for number in out.split())
    killed = run("print(pid(), flush=True); time.sleep(60)")
    assert killed.stdout is not None
    number = int(killed.stdout.readline())
    killed.kill()
    killed.communicate()
    assert gone(number)


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
