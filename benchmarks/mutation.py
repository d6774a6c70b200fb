"""Which small faults in the code the default tests find, without torch and transformers.

    python -m benchmarks.mutation                        # go on with benchmarks/results/mutation.json
    python -m benchmarks.mutation --files 'kvjax/cache/*.py' --count 300

Places are drawn with a seed, from every file of `FILES` in proportion to what can be changed there, and one change (by cosmic-ray's
operators, or a function for its opposite) is made at each, in a copy of the tracked files. A changed file's own tests run first, then wider
ones, until one fails. A mutant that was found stays found while its line is the same; one that survived is tried again, unless its row
in the results has `equivalent`, written by hand: why no test can tell it from the code.

Compiled programs are kept on disk between runs, since nearly all of them are the same. Needs the `mutation` extra.
"""

import argparse
import ast
import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

# What imports kvjax or JAX is imported where it is used: processes that run tests begin with this file, and must import the copy.

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "kvjax/policies/**/*.py",
    "kvjax/cache/*.py",
    "kvjax/runtime/sampling.py",
    "kvjax/runtime/decoding.py",
    "models/rope.py",
    "conversion/*.py",
)

POLICIES = "tests/policies"
SCORED = f"{POLICIES}/test_scoring.py"
SLOTS = f"tests/test_cache.py {POLICIES}/test_compose.py | {POLICIES}/test_streaming_llm.py {POLICIES}/test_chunkkv.py"
OWN = {
    **{f"kvjax/cache/{name}.py": SLOTS for name in ("attention", "spec", "state", "tokens", "update")},
    "kvjax/cache/packing.py": f"{POLICIES}/test_quantized.py",
    "kvjax/cache/host_memory.py": f"{POLICIES}/test_offload.py",
    "kvjax/runtime/sampling.py": "tests/test_generation.py",
    "kvjax/runtime/decoding.py": "tests/test_decoding.py | tests/test_generation.py",
    "models/rope.py": "tests/models/test_rope.py",
    "conversion/chat.py": "tests/conversion/test_tokenizer.py",
    "conversion/checkpoint.py": "tests/conversion/test_loading.py",
    "conversion/config_json.py": "tests/conversion/test_hf_config.py",
    "conversion/describe.py": "tests/conversion/test_loading.py",
    "conversion/gguf_file.py": "tests/conversion/test_gguf.py",
    "conversion/gguf_tokenizer.py": "tests/conversion/test_tokenizer.py | tests/conversion/test_gguf.py",
    "conversion/huggingface.py": "tests/conversion/test_loading.py | tests/conversion/test_writing.py",
    "conversion/layout.py": "tests/conversion/test_loading.py | tests/conversion/test_writing.py",
    "conversion/orbax_directory.py": "tests/conversion/test_writing.py tests/conversion/test_loading.py",
    "conversion/state_dict.py": "tests/conversion/test_loading.py",
    "kvjax/policies/base.py": f"{POLICIES}/test_compose.py {POLICIES}/test_streaming_llm.py | {SCORED}",
    "kvjax/policies/catekv.py": f"{POLICIES}/test_catekv.py | tests/calibration/test_head_types.py",
    "kvjax/policies/chelsea.py": f"{POLICIES}/test_chelsea.py | tests/calibration/test_chelsea_outliers.py",
    "kvjax/policies/expected_attention.py": SCORED,
    "kvjax/policies/full.py": f"{POLICIES}/test_compose.py",
    "kvjax/policies/h2o.py": SCORED,
    "kvjax/policies/keydiff.py": SCORED,
    "kvjax/policies/knorm.py": SCORED,
    "kvjax/policies/families/scoring.py": SCORED,
    "kvjax/policies/kivi.py": f"{POLICIES}/test_quantized.py",
    "kvjax/policies/text.py": f"{POLICIES}/test_text.py",
    **{f"kvjax/policies/{name}.py": f"{POLICIES}/test_defaults.py | {SCORED}" for name in ("budget", "fields", "info")},
    "kvjax/policies/capabilities.py": f"{POLICIES}/test_traits.py",
    **{f"kvjax/policies/transforms/by_{kind}.py": f"{POLICIES}/test_compose.py" for kind in ("layer", "head")},
    "kvjax/policies/transforms/offload.py": f"{POLICIES}/test_offload.py",
    "kvjax/policies/transforms/pyramid.py": f"{POLICIES}/test_pyramidkv.py",
    "kvjax/policies/transforms/quantize.py": f"{POLICIES}/test_quantized.py",
    "kvjax/policies/families/noise.py": f"{POLICIES}/test_cam.py {SCORED}",
    "kvjax/policies/families/pages.py": f"{POLICIES}/test_quest.py",
    "kvjax/policies/profile.py": f"{POLICIES}/test_duoattention.py | {POLICIES}/test_catekv.py tests/calibration/test_head_types.py",
    "kvjax/policies/random_eviction.py": SCORED,
    "kvjax/policies/families/sparse.py": f"{POLICIES}/test_quest.py | {POLICIES}/test_clusterkv.py {POLICIES}/test_offload.py",
    "kvjax/policies/registry.py": f"{POLICIES}/test_compose.py tests/test_generation.py",
    "kvjax/policies/families/skewing.py": f"{POLICIES}/test_infinigen.py tests/calibration/test_skewing.py",
    "kvjax/policies/snapkv.py": SCORED,
    "kvjax/policies/families/soft_matching.py": f"{POLICIES}/test_chelsea.py",
    "kvjax/policies/tova.py": SCORED,
    "kvjax/policies/transforms/wrapper.py": f"{POLICIES}/test_offload.py {POLICIES}/test_quantized.py",
}
"""The tests of files that have none of their own name, those before a bar first."""

WIDER = {
    "models": "tests/models tests/conversion/test_hf_config.py tests/conversion/test_gguf.py",
    "conversion": "tests/conversion tests/cli/test_convert.py tests/cli/test_process.py",
    "policies": f"{POLICIES}/test_invariants.py -k {{name}}",
    "all": f"{POLICIES}/test_traps.py {POLICIES}/test_compose.py {POLICIES}/test_offload.py tests/test_decoding.py tests/test_generation.py "
    "tests/test_session.py tests/test_question.py tests/test_prefill_blocks.py tests/test_costs.py tests/test_settings.py",
}

NOTHING = 5
"""Pytest's exit code where there are no tests: all are slow."""

SECONDS = 90
"""Of processor time, that a test may take."""

ELSEWHERE = 99
"""Exit code of tests that imported another kvjax than the copy."""

ABSENT = "torch", "transformers", "accelerate", "fuzzywuzzy"
PRELOADED = "flax.struct", "jax", "jax.experimental.pallas", "numpy", "tokenizers"  # none that pytest would rewrite

ARITHMETIC = {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod"}
BITS = {"BitOr", "BitAnd", "BitXor"}

_PAIRS = "min max, minimum maximum, argmin argmax, any all, floor ceil, zeros ones, zeros_like ones_like, cos sin, log exp, left right"
OPPOSITES = {a: b for pair in _PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])} | {
    "sum": "max",
    "mean": "sum",
    "append": "extend",
    "cumsum": "cumprod",
}
"""What `Opposite` puts for a function's name."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change at one place of a file."""

    file: str
    line: int
    column: int
    operator: str
    occurrence: int
    before: str = ""
    after: str = ""


def main() -> None:
    """Draw mutants, run their tests, and write what became of each after every one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count", type=int, default=240, help="places to change, over all of FILES (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--files", nargs="+", default=[], metavar="PATH", help="only mutants of files whose path begins so"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/mutation.json")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "kvjax-mutation-programs")
    parser.add_argument("--unchecked", action="store_true", help="the tests are known to pass on the code as it is")
    parser.add_argument(
        "--near", action="store_true", help="only a file's own tests; a run without it then tries the rest"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))

    os.environ["JAX_PLATFORMS"] = "cpu"
    from benchmarks import report

    drawn = draw(args.count, args.seed)
    rows = {key(row): row for row in (json.loads(args.out.read_text())["rows"] if args.out.exists() else ())}
    rows |= {key(vars(m)): {**rows.get(key(vars(m)), {}), **vars(m)} for m in drawn}
    todo = [
        m
        for m in drawn
        if m.file.startswith(tuple(args.files) or "")
        and rows[key(vars(m))].get("outcome") != "found"
        and "equivalent" not in rows[key(vars(m))]
    ]
    print(f"{len(drawn)} mutants, of which {len(todo)} are tried now", flush=True)
    random.Random(args.seed).shuffle(todo)  # a run that is stopped has tried a fair sample
    versions = report.header(seed=args.seed, count=args.count, absent=ABSENT)
    with runner(args.cache, not args.unchecked, args.near) as run:
        for i, mutant in enumerate(todo):
            start = time.monotonic()
            outcome = run(mutant)
            rows[key(vars(mutant))] |= {**outcome, "seconds": round(time.monotonic() - start, 1)}
            report.write(args.out, versions, list(rows.values()))
            print(f"{i + 1}/{len(todo)} {mutant.file}:{mutant.line} {outcome} {mutant.after.strip()}", flush=True)
    print(summary(list(rows.values())))


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    """What makes a mutant the same one when other lines have changed."""
    return row["file"], row["before"], row["after"]


def summary(rows: list[dict[str, Any]]) -> str:
    """How many were found, and those that were not."""
    real = [row for row in rows if "equivalent" not in row and "outcome" in row]
    found = sum(row["outcome"] == "found" for row in real)
    left = [f"{r['file']}:{r['line']}\n-{r['before']}\n+{r['after']}" for r in real if r["outcome"] != "found"]
    return "\n".join([*left, f"{found} of {len(real)} found, besides {len(rows) - len(real)} equivalent or not tried"])


def draw(count: int, seed: int) -> list[Mutant]:
    """One mutant at each of `count` places; a file gets a share of them by its number of places, and at least two."""
    places = {path: _places(path) for path in sorted(p for glob in FILES for p in ROOT.glob(glob))}
    places = {path: found for path, found in places.items() if found}
    total = sum(map(len, places.values()))
    drawn = []
    for path, found in places.items():
        chance = random.Random(f"{seed} {path.relative_to(ROOT)}")
        order = chance.sample(sorted(found), len(found))  # so that a larger count adds to a smaller one's
        for place in order[: max(2, round(count * len(found) / total))]:
            mutant = chance.choice(found[place])
            before, after = _lines(path, mutant)
            if after != before:
                drawn.append(dataclasses.replace(mutant, before=before, after=after))
    return drawn


def _places(path: Path) -> dict[tuple[int, int], list[Mutant]]:
    """All that can be changed in a file, by place; but for annotations, which only other tools read, and functions' heads."""
    from cosmic_ray.ast import ast_nodes, get_ast  # pyright: ignore[reportMissingImports]

    source = path.read_text(encoding="utf-8")
    places = defaultdict(list)
    nodes = list(ast_nodes(get_ast(source)))
    spans = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):  # where cosmic-ray takes the star before keywords for a product
            spans.append(((node.lineno, node.col_offset), (node.body[0].lineno, node.body[0].col_offset)))
        elif isinstance(node, ast.AnnAssign):
            spans.append(((node.lineno, node.annotation.col_offset), (node.lineno, node.annotation.end_col_offset)))
    for name, operator in _operators().items():
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (line, column) in enumerate(positions):
            if not any(start <= (line, column) < end for start, end in spans):
                places[line, column].append(Mutant(str(path.relative_to(ROOT)), line, column, name, occurrence))
    return dict(places)


@cache
def _operators() -> dict[str, Any]:
    """Operators by name: cosmic-ray's that take no arguments, and `Opposite`."""
    import parso.python.tree  # before cosmic-ray, which imports it in a circle otherwise
    from cosmic_ray import plugins  # pyright: ignore[reportMissingImports]
    from cosmic_ray.operators.operator import Operator  # pyright: ignore[reportMissingImports]

    class Opposite(Operator):  # pyright: ignore[reportUntypedBaseClass]
        """A function for its opposite."""

        def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
            if not isinstance(node, parso.python.tree.Name) or node.value not in OPPOSITES:
                return
            before, after = node.get_previous_leaf(), node.get_next_leaf()
            if (before is None or before.value != "def") and after is not None and after.value == "(":
                yield node.start_pos, node.end_pos

        def mutate(self, node: Any, index: int) -> Any:
            return parso.python.tree.Name(OPPOSITES[node.value], node.start_pos, node.prefix)

        @classmethod
        def examples(cls) -> tuple[()]:
            return ()

    core = {name: plugins.get_operator(name) for name in sorted(plugins.operator_names()) if _worthwhile(name)}
    return {name: cls() for name, cls in core.items() if not cls.arguments()} | {"Opposite": Opposite()}


def _worthwhile(operator: str) -> bool:
    """Whether an operator of cosmic-ray's gives more than what no run survives, or every run: an exception, or the same value."""
    _, _, change = operator.partition("Operator_")
    if "BinaryOperator" in operator:
        return any(set(change.split("_")) <= kind for kind in (ARITHMETIC, BITS))
    if "ComparisonOperator" in operator:
        return len({name.startswith("Is") for name in change.split("_")}) == 1
    return "RemoveDecorator" not in operator and "ExceptionReplacer" not in operator  # the latter fails on dotted names


def _mutated(source: str, mutant: Mutant) -> str:
    from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]

    return mutate_code(source, _operators()[mutant.operator], mutant.occurrence)


def _lines(path: Path, mutant: Mutant) -> tuple[str, str]:
    """The line before and after."""
    source = path.read_text(encoding="utf-8")
    sources = source, _mutated(source, mutant)
    before, after = (text.splitlines()[mutant.line - 1] for text in sources)
    return (before, after) if before != after or sources[0] == sources[1] else (before, f"{after}  # changed nearby")


def tests_of(file: str, near: bool) -> list[str]:
    """Arguments of pytest for the tests of a file, from near to wide, or only its own."""
    path = Path(file)
    own = OWN.get(file)
    if own is None:
        own = f"{POLICIES if 'policies' in path.parts else 'tests/conversion'}/test_{path.stem}.py"
        if not (ROOT / own).exists():
            own = ""
    name = path.stem.removesuffix("_eviction")
    if path.parent.name == "conversion":
        wider = [WIDER["conversion"]]
    elif path.parent.name == "models":
        wider = [WIDER["models"]]
    elif "policies" in path.parts:
        wider = [WIDER["policies"].format(name=name), WIDER["all"]]
    else:
        wider = [WIDER["all"]]
    own = own.split(" | ") if own else []
    return own if near and own else [*own, *wider]


@contextlib.contextmanager
def runner(programs: Path, checked: bool, near: bool) -> Iterator[Any]:
    """A function that tells what became of a mutant; tests run in processes forked from one that has imported the libraries."""
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "kvjax"
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in tracked.split("\0")[:-1]:
            if (ROOT / name).exists():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)

        def tests(arguments: str) -> int:
            """Pytest's exit code, negative where a signal ended it."""
            process = context.Process(target=_pytest, args=(str(copy), arguments))
            process.start()
            try:
                process.join()
            finally:
                if process.is_alive() and process.pid is not None:
                    os.killpg(process.pid, signal.SIGKILL)
            assert process.exitcode is not None
            return process.exitcode

        @cache
        def check(arguments: str) -> None:
            """See that tests pass on the code as it is."""
            if checked and (code := tests(arguments)) not in (0, NOTHING):
                output = Path(f"{copy}.log").read_text()
                raise SystemExit(f"{arguments}: exit code {code} without any change:\n{output}")

        def put(path: Path, source: str) -> None:
            path.write_text(source, encoding="utf-8")
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
                compiled.unlink()

        def run(mutant: Mutant) -> dict[str, str]:
            path = copy / mutant.file
            source = path.read_text(encoding="utf-8")
            for stage in tests_of(mutant.file, near):
                check(stage)
                put(path, _mutated(source, mutant))
                code = tests(stage)
                put(path, source)
                output = Path(f"{copy}.log").read_text(errors="replace")
                if code == ELSEWHERE:
                    raise SystemExit(f"{stage}: exit code {code}:\n{output}")
                if code not in (0, NOTHING):
                    failed = re.findall("^(?:FAILED|ERROR) (\\S+)", output, re.MULTILINE)
                    by = failed[0] if failed else "time" if code == -signal.SIGVTALRM else f"exit code {code}"
                    return {"outcome": "found", "by": by}
            return {"outcome": "survived"}

        yield run


def _pytest(directory: str, arguments: str) -> None:
    """Run tests in a copy of the repository, in this process; extras that the default tests do without cannot be imported."""
    os.setsid()
    os.chdir(directory)
    log = os.open(f"{directory}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[:] = [directory, *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    os.environ["PYTHONPATH"] = directory
    sys.dont_write_bytecode = False  # what is not changed is compiled once
    for name in ABSENT:
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]
    import pytest

    class Limited:
        """A plugin: a test that takes too long ends the process, as one does that never ends."""

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(self) -> None:
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which what runs in a shell's background ignores
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=line"]
    names, _, selected = arguments.partition(" -k ")
    code = pytest.main([*options, *names.split(), *(["-k", selected] if selected else [])], [Limited()])
    origin = getattr(sys.modules.get("kvjax"), "__file__", directory)
    os._exit(int(code) if str(origin).startswith(directory) else ELSEWHERE)


if __name__ == "__main__":
    main()
