"""Make small faults in the code, and record which of them the default tests find, without torch and transformers.

    python -m benchmarks.mutation                        # continues benchmarks/results/mutation.json
    python -m benchmarks.mutation --files 'kvjax/cache/*.py' --count 300

Places are drawn with a seed from the files of `FILES`, in proportion to the number of possible changes. One change is
made at each, in a copy of the repository's files: an operator of cosmic-ray, or the opposite of a function. The changed
file's own tests run first, then wider ones, until one fails. A mutant that was found stays found while its line is the
same. One that survived is tried again, unless its row in the results has `equivalent`. This field is written by hand
and explains why no test can distinguish the mutant from the code.

Tests outside the default run find some of the survivors. Their rows then have two fields written by hand: `tier`, the
marker of such a test ("slow", "mesh", "device"), and `by`, its name. Add them only after you have seen the test fail
with the mutant. The summary counts these mutants separately.

All these tests run on the unchanged code first. The results list those that fail, which are not used.

To compare other tests with these, on the same mutants:

    python -m benchmarks.mutation --count 300 --draw mutants.json
    python -m benchmarks.mutation --mutants mutants.json --jobs 2 --out new.json
    python -m benchmarks.mutation --mutants mutants.json --jobs 2 --out old.json --tests ../older/tests
    python -m benchmarks.mutation --compare old.json new.json

Compiled programs are kept on disk between runs, because nearly all of them are the same. The `mutation` extra is
required.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib.machinery
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from multiprocessing import connection
from pathlib import Path
from typing import Any

# What imports kvjax or JAX is imported where it is used: processes that run tests begin with this file, and must import the copy.

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "kvjax/policies/**/*.py",
    "kvjax/cache/*.py",
    "kvjax/runtime/sampling.py",
    "kvjax/runtime/decoding.py",
    "kvjax/runtime/engine.py",
    "kvjax/runtime/mesh.py",
    "kvjax/planning/*.py",
    "kvjax/config/*.py",
    "models/*.py",
    "conversion/*.py",
)

POLICIES = "tests/policies"
SCORED = f"{POLICIES}/test_scoring.py"
SHARDED = "tests/test_sharded_cache.py | tests/test_mesh.py"
FORWARD = "tests/test_generation.py tests/test_decoding.py"
SLOTS = f"tests/test_cache.py {POLICIES}/test_compose.py | {POLICIES}/test_streaming_llm.py {POLICIES}/test_chunkkv.py"
OWN = {
    **{f"kvjax/cache/{name}.py": SLOTS for name in ("attention", "spec", "state", "tokens")},
    **dict.fromkeys(("kvjax/cache/sharded.py", "kvjax/cache/shard.py", "kvjax/policies/sharded.py"), SHARDED),
    "kvjax/cache/update.py": f"{SLOTS} tests/test_sharded_cache.py",
    "kvjax/cache/blocks.py": f"{POLICIES}/test_blocks.py tests/test_cache.py | tests/test_prefill_blocks.py",
    "kvjax/cache/codebook.py": f"{POLICIES}/test_turboquant.py",
    "kvjax/cache/codecs.py": f"{POLICIES}/test_turboquant.py {POLICIES}/test_fp8.py",
    "kvjax/cache/float8.py": f"{POLICIES}/test_fp8.py",
    "kvjax/cache/packing.py": f"{POLICIES}/test_quantized.py",
    "kvjax/cache/host_memory.py": f"{POLICIES}/test_offload.py",
    "kvjax/runtime/sampling.py": "tests/test_generation.py",
    "kvjax/runtime/decoding.py": "tests/test_decoding.py | tests/test_generation.py",
    "kvjax/runtime/engine.py": "tests/test_engine.py | tests/test_generation.py tests/test_session.py",
    "kvjax/runtime/mesh.py": "tests/test_mesh.py | tests/test_sharded_cache.py tests/test_engine.py",
    **{f"kvjax/planning/{name}.py": "tests/test_planning.py" for name in ("plan", "sums", "workspace")},
    "kvjax/config/model.py": "tests/models/test_params.py | tests/conversion/test_hf_config.py tests/test_cache.py",
    "models/params.py": "tests/models/test_params.py tests/models/test_quantised_weights.py | tests/test_mesh.py",
    "kvjax/config/presets.py": "tests/test_planning.py tests/models/test_params.py",
    "kvjax/config/rope.py": "tests/models/test_rope.py",
    "models/sharding.py": "tests/test_mesh.py tests/conversion/test_parts.py | tests/test_planning.py tests/test_sharded_cache.py",
    "models/transformer.py": f"{FORWARD} | tests/models tests/test_mesh.py tests/test_prefill_blocks.py tests/evals/test_perplexity.py",
    "conversion/chat.py": "tests/conversion/test_tokenizer.py",
    "conversion/checkpoint.py": "tests/conversion/test_loading.py",
    "conversion/config_json.py": "tests/conversion/test_hf_config.py",
    "conversion/describe.py": "tests/conversion/test_loading.py",
    "conversion/gguf_file.py": "tests/conversion/test_gguf.py",
    "conversion/gguf_tokenizer.py": "tests/conversion/test_tokenizer.py | tests/conversion/test_gguf.py",
    "conversion/huggingface.py": "tests/conversion/test_loading.py | tests/conversion/test_writing.py",
    "conversion/layout.py": "tests/conversion/test_loading.py | tests/conversion/test_writing.py",
    "conversion/mapped.py": "tests/conversion/test_parts.py",
    "conversion/orbax_streaming.py": "tests/conversion/test_writing.py",
    "conversion/schema.py": "tests/conversion/test_damage.py tests/conversion/test_hf_config.py",
    "conversion/shapes.py": "tests/conversion/test_damage.py tests/conversion/test_parts.py | tests/test_planning.py",
    "conversion/text_files.py": "tests/conversion/test_damage.py tests/conversion/test_streaming_text.py",
    "conversion/orbax_directory.py": "tests/conversion/test_writing.py tests/conversion/test_loading.py",
    "conversion/state_dict.py": "tests/conversion/test_loading.py",
    "kvjax/policies/base.py": f"{POLICIES}/test_compose.py {POLICIES}/test_streaming_llm.py | {SCORED}",
    "kvjax/policies/catekv.py": f"{POLICIES}/test_catekv.py | tests/calibration/test_head_types.py",
    "kvjax/policies/chelsea.py": f"{POLICIES}/test_chelsea.py | tests/calibration/test_chelsea_outliers.py",
    "kvjax/policies/expected_attention.py": SCORED,
    **{f"kvjax/policies/{name}.py": f"{POLICIES}/test_surrogates.py" for name in ("fast_kvzip", "kvzap")},
    **{f"kvjax/policies/{name}.py": f"{POLICIES}/test_kvzip.py" for name in ("replay", "surroundings")},
    "kvjax/policies/families/dense.py": f"{POLICIES}/test_traits.py {POLICIES}/test_quest.py {POLICIES}/test_clusterkv.py",
    "kvjax/policies/families/ragged.py": f"{POLICIES}/test_adakv.py {POLICIES}/test_kvzip.py",
    "kvjax/policies/families/rounds.py": f"{POLICIES}/test_rkv.py {POLICIES}/test_triattention.py | {POLICIES}/test_recompress.py",
    "kvjax/policies/families/surrogates.py": f"{POLICIES}/test_surrogates.py",
    "kvjax/policies/families/trigonometry.py": f"{POLICIES}/test_triattention.py",
    "kvjax/policies/transforms/coded.py": f"{POLICIES}/test_turboquant.py",
    "kvjax/policies/transforms/threshold.py": f"{POLICIES}/test_thresholded.py",
    "kvjax/policies/full.py": f"{POLICIES}/test_compose.py",
    "kvjax/policies/h2o.py": SCORED,
    "kvjax/policies/keydiff.py": SCORED,
    "kvjax/policies/knorm.py": SCORED,
    "kvjax/policies/kvgrad.py": f"{POLICIES}/test_kvgrad.py",
    "kvjax/policies/kvzip.py": f"{POLICIES}/test_kvzip.py {POLICIES}/test_traits.py",
    "kvjax/policies/families/scoring.py": SCORED,
    "kvjax/policies/fp8.py": f"{POLICIES}/test_fp8.py",
    "kvjax/policies/kivi.py": f"{POLICIES}/test_quantized.py | {POLICIES}/test_registry.py",
    "kvjax/policies/text.py": f"{POLICIES}/test_text.py",
    **{
        f"kvjax/policies/{name}.py": f"{POLICIES}/test_defaults.py {POLICIES}/test_registry.py | {SCORED} tests/test_arguments.py"
        for name in ("budget", "fields", "info")
    },
    **{f"kvjax/policies/transforms/by_{kind}.py": f"{POLICIES}/test_compose.py" for kind in ("layer", "head")},
    "kvjax/policies/transforms/offload.py": f"{POLICIES}/test_offload.py",
    "kvjax/policies/transforms/pyramid.py": f"{POLICIES}/test_pyramidkv.py",
    "kvjax/policies/transforms/quantize.py": f"{POLICIES}/test_quantized.py",
    "kvjax/policies/families/noise.py": f"{POLICIES}/test_cam.py {SCORED}",
    "kvjax/policies/families/pages.py": f"{POLICIES}/test_quest.py",
    "kvjax/policies/profile.py": f"{POLICIES}/test_duoattention.py | {POLICIES}/test_catekv.py tests/calibration/test_head_types.py",
    "kvjax/policies/random_eviction.py": f"{SCORED} | {POLICIES}/test_recompress.py",
    "kvjax/policies/families/sparse.py": f"{POLICIES}/test_quest.py | {POLICIES}/test_clusterkv.py {POLICIES}/test_offload.py",
    "kvjax/policies/registry.py": f"{POLICIES}/test_registry.py {POLICIES}/test_compose.py | tests/test_generation.py",
    "kvjax/policies/families/skewing.py": f"{POLICIES}/test_infinigen.py tests/calibration/test_skewing.py",
    "kvjax/policies/snapkv.py": SCORED,
    "kvjax/policies/families/soft_matching.py": f"{POLICIES}/test_chelsea.py",
    "kvjax/policies/tova.py": SCORED,
    "kvjax/policies/transforms/wrapper.py": f"{POLICIES}/test_offload.py {POLICIES}/test_quantized.py",
}
"""The tests of files that have none of their own name, those before a bar first. What is not among the tests that run is passed over."""

WIDER = {
    "models": "tests/models tests/conversion/test_hf_config.py tests/conversion/test_gguf.py",
    "conversion": "tests/conversion tests/cli/test_convert.py tests/cli/test_process.py",
    "policies": f"{POLICIES}/test_invariants.py -k {{name}}",
    "all": f"{POLICIES}/test_traits.py {POLICIES}/test_registry.py {POLICIES}/test_traps.py {POLICIES}/test_compose.py "
    f"{POLICIES}/test_offload.py tests/test_decoding.py tests/test_generation.py "
    "tests/test_session.py tests/test_question.py tests/test_prefill_blocks.py tests/test_costs.py tests/test_settings.py "
    f"tests/test_engine.py tests/test_mesh.py tests/test_sharded_cache.py {POLICIES}/test_blocks.py",
}

NOTHING = 5
"""Pytest's exit code where there are no tests: all are slow."""

SECONDS = 90
"""Of processor time, that a test may take; and four times as long by the clock. On the code as it is three times that."""

ELSEWHERE = 99
"""Exit code of tests that imported another kvjax than the copy."""

BROKEN = 98
"""Exit code where pytest did not begin."""

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
    parser.add_argument("--count", type=int, default=240, help="mutants, over all of FILES (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write the mutants to a file, and do no more")
    parser.add_argument(
        "--mutants", type=Path, metavar="FILE", help="mutants that --draw has written, of the same code"
    )
    parser.add_argument(
        "--files", nargs="+", default=[], metavar="PATH", help="only mutants of files whose path begins so"
    )
    parser.add_argument("--tests", type=Path, metavar="DIR", help="another folder of tests, such as an older commit's")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are tried at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="stop after so long")
    parser.add_argument("--go-on", action="store_true", help="what --out has checked or tried is not looked at again")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/mutation.json")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "kvjax-mutation-programs")
    parser.add_argument("--unchecked", action="store_true", help="the tests are known to pass on the code as it is")
    parser.add_argument(
        "--near", action="store_true", help="only a file's own tests; a run without it then tries the rest"
    )
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="print what two results have found")
    args = parser.parse_args()
    if args.compare:
        return print(comparison(*(json.loads(path.read_text())["rows"] for path in args.compare)))
    until = time.monotonic() + args.limit
    drawn = [Mutant(**m) for m in json.loads(args.mutants.read_text())] if args.mutants else draw(args.count, args.seed)
    if args.draw:
        args.draw.write_text(json.dumps([vars(m) for m in drawn], indent=1) + "\n")
        return print(f"{len(drawn)} mutants of {len({m.file for m in drawn})} files")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    os.environ["JAX_PLATFORMS"] = "cpu"
    from benchmarks import report

    there = json.loads(args.out.read_text()) if args.out.exists() else {"header": {}, "rows": []}
    rows = {key(row): row for row in there["rows"]}
    rows |= {key(vars(m)): {**rows.get(key(vars(m)), {}), **vars(m)} for m in drawn}
    done = {"found", "survived"} if args.go_on else {"found"}
    todo = [
        m
        for m in drawn
        if m.file.startswith(tuple(args.files) or "")
        and rows[key(vars(m))].get("outcome") not in done
        and "equivalent" not in rows[key(vars(m))]
    ]
    print(f"{len(drawn)} mutants, of which {len(todo)} are tried now", flush=True)
    random.Random(args.seed).shuffle(todo)  # a run that is stopped has tried a fair sample
    settings = {"seed": args.seed, "count": len(drawn), "absent": ABSENT}
    header = report.header(**settings, **({"tests": str(args.tests)} if args.tests else {}))
    failing, checked = ([*there["header"].get(k, ())] if args.go_on else [] for k in ("failing", "checked"))

    def write() -> None:
        about = {"failing": failing, "checked": checked, "missing": missing}
        report.write(args.out, header | about, list(rows.values()))

    with workers(args.jobs, args.tests, args.cache) as (copy, pipes):
        names = {name for stages in (*OWN.values(), *WIDER.values()) for name in stages.split() if "/" in name}
        missing = sorted(name for name in names if not (copy / name).exists())
        print("".join(f"not among the tests: {name}\n" for name in missing), end="", flush=True)
        stages = {m.file: tests_of(m.file, args.near, copy) for m in todo}
        parts = {part: None for file in stages for stage in stages[file] for part in _parts(stage, copy)}
        checks = [] if args.unchecked else [part for part in parts if part not in checked]
        for i, (part, failed) in enumerate(share(pipes, ((part, ("check", part)) for part in checks), until)):
            checked.append(part)
            failing += [test for test in failed if test not in failing]
            write()
            print(f"{i + 1}/{len(checks)} {part}" + "".join(f"\n  fails as it is: {t}" for t in failed), flush=True)
        left_out = frozenset(failing)
        tasks = ((m, ("try", m, changed(copy, m), stages[m.file], left_out, time.monotonic())) for m in todo)
        for i, (mutant, outcome) in enumerate(share(pipes, tasks, until)):
            rows[key(vars(mutant))] |= outcome
            write()
            print(f"{i + 1}/{len(todo)} {mutant.file}:{mutant.line} {outcome} {mutant.after.strip()}", flush=True)
    print(summary(list(rows.values())))


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    """What makes a mutant the same one when other lines have changed."""
    return row["file"], row["before"], row["after"]


def summary(rows: list[dict[str, Any]]) -> str:
    """How many were found by which tests, and those that were not."""
    real = [row for row in rows if "equivalent" not in row and "outcome" in row]
    survived = [row for row in real if row["outcome"] != "found"]
    tiers = Counter(row["tier"] for row in survived if "tier" in row)
    left = [f"{r['file']}:{r['line']}\n-{r['before']}\n+{r['after']}" for r in survived if "tier" not in r]
    found = [f"{len(real) - len(survived)} found by the default tests"]
    found += [f"{number} by {tier} tests" for tier, number in tiers.items()]
    counts = f"{len(real)} mutants: {', '.join(found)}, {len(left)} survive"
    return "\n".join([*left, f"{counts}; besides {len(rows) - len(real)} equivalent or not tried"])


def comparison(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> str:
    """What A and B have found of the mutants that both have tried: for every file, every folder and in all; and where they differ."""
    both = [{key(row): row for row in rows if "outcome" in row and "equivalent" not in row} for rows in (a, b)]
    tried = both[0].keys() & both[1].keys()
    found = [{each for each in tried if rows[each]["outcome"] == "found"} for rows in both]
    drawn = {key(row) for row in (*a, *b)}
    groups: dict[str, set[tuple[str, str, str]]] = defaultdict(set)
    for each in sorted(drawn):
        for name in ("all", f"{Path(each[0]).parent}/", each[0]):
            groups[name].add(each)
    lines = [f"{'':55}{'drawn':>7}{'tried':>7}{'A found':>9}{'B found':>9}{'B lost':>8}{'B gained':>10}"]
    for name, of in sorted(groups.items()):
        numbers = len(of), len(of & tried), len(of & found[0]), len(of & found[1])
        lost, gained = len(of & found[0] - found[1]), len(of & found[1] - found[0])
        lines.append(f"{name:55}{numbers[0]:7}{numbers[1]:7}{numbers[2]:9}{numbers[3]:9}{lost:8}{gained:10}")
    for title, which in (("lost by B", 0), ("gained by B", 1)):
        for each in sorted(found[which] - found[1 - which]):
            row = both[which][each]
            lines.append(f"{title}: {each[0]}:{row['line']}, found by {row['by']}\n-{each[1]}\n+{each[2]}")
    shares = (
        f"{name} found {len(f)} of {len(tried)}, {len(f) / max(1, len(tried)):.1%}"
        for name, f in zip("AB", found, strict=True)
    )
    return "\n".join([*lines, *shares])


def draw(count: int, seed: int) -> list[Mutant]:
    """Mutants at `count` places: one of every file that has one, others in proportion to how many places a file has."""
    places = {path: _places(path) for path in sorted({p for glob in FILES for p in ROOT.glob(glob)})}
    mutants = {path: _mutants(path, found, seed) for path, found in places.items() if found}
    drawn = {path: [first] for path, several in mutants.items() if (first := next(several, None)) is not None}
    while drawn and sum(map(len, drawn.values())) < count:  # a larger count adds to a smaller one's
        path = max(drawn, key=lambda path: len(places[path]) / (len(drawn[path]) + 1))
        if (mutant := next(mutants[path], None)) is None:
            places[path] = {}  # there are no more of them
            if not any(places[each] for each in drawn):
                break
        else:
            drawn[path].append(mutant)
    return [mutant for several in drawn.values() for mutant in several]


def _mutants(path: Path, places: dict[tuple[int, int], list[Mutant]], seed: int) -> Iterator[Mutant]:
    """Mutants of a file, no two of one place nor two that `key` takes for one."""
    chance = random.Random(f"{seed} {path.relative_to(ROOT)}")
    source = path.read_text(encoding="utf-8")
    seen = set()
    for place in chance.sample(sorted(places), len(places)):
        mutant = chance.choice(places[place])
        before, after = _lines(source, mutant)
        if after != before and (before, after) not in seen:
            seen.add((before, after))
            yield dataclasses.replace(mutant, before=before, after=after)


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


def _lines(source: str, mutant: Mutant) -> tuple[str, str]:
    """The line before and after."""
    sources = source, _mutated(source, mutant)
    before, after = (text.splitlines()[mutant.line - 1] for text in sources)
    return (before, after) if before != after or sources[0] == sources[1] else (before, f"{after}  # changed nearby")


def changed(copy: Path, mutant: Mutant) -> str:
    """The source of the mutant's file with its change."""
    source = (copy / mutant.file).read_text(encoding="utf-8")
    if _lines(source, mutant) != (mutant.before, mutant.after):
        raise SystemExit(f"{mutant.file}:{mutant.line}: the code has changed since the mutant was drawn")
    return _mutated(source, mutant)


def tests_of(file: str, near: bool, root: Path) -> list[str]:
    """Arguments of pytest for the tests of a file, from near to wide, or only its own; those of tests that are there."""
    path = Path(file)
    folder = POLICIES if "policies" in path.parts else "tests/conversion"
    own = OWN.get(file, f"{folder}/test_{path.stem}.py").split(" | ")
    name = path.stem.removesuffix("_eviction")
    if path.parent.name == "conversion":
        wider = [WIDER["conversion"]]
    elif path.parent.name in ("config", "models"):
        wider = [WIDER["models"], WIDER["all"]]
    elif "policies" in path.parts:
        wider = [WIDER["policies"].format(name=name), WIDER["all"]]
    else:
        wider = [WIDER["all"]]
    own = [stage for each in own if (stage := _there(each, root))]
    return own if near and own else [*own, *(stage for each in wider if (stage := _there(each, root)))]


def _there(stage: str, root: Path) -> str:
    """A stage without files of tests that are not there."""
    names, *selected = stage.partition(" -k ")
    there = [name for name in names.split() if (root / name).exists()]
    return "".join([" ".join(there), *selected]) if there else ""


def _parts(stage: str, root: Path) -> list[str]:
    """What a stage is made of: files of tests, each with what is selected of it."""
    names, *selected = stage.partition(" -k ")
    files = [
        str(path.relative_to(root))
        for name in names.split()
        for path in (sorted((root / name).rglob("test_*.py")) if (root / name).is_dir() else [root / name])
    ]
    return ["".join([file, *selected]) for file in files]


@contextlib.contextmanager
def workers(jobs: int, tests: Path | None, programs: Path) -> Iterator[tuple[Path, list[connection.Connection]]]:
    """Processes that run tests, each in its own copy of the repository: the first copy, and a pipe to each process."""
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "KVJAX_TEST_PROGRAMS": str(programs),
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    processes = []
    with tempfile.TemporaryDirectory() as temporary:
        copies = [Path(temporary) / str(i) / "kvjax" for i in range(jobs)]
        _copy(copies[0], tests)
        for copy in copies[1:]:
            shutil.copytree(copies[0], copy, symlinks=True)
        try:
            pipes = []
            for i, copy in enumerate(copies):
                pipe, end = context.Pipe()
                processes.append(context.Process(target=_work, args=(end, copy, i if jobs > 1 else None)))
                processes[-1].start()
                end.close()
                pipes.append(pipe)
            yield copies[0], pipes
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join()


def _copy(copy: Path, tests: Path | None) -> None:
    """Copy what git tracks or would, or, where git or its data are not there, all but hidden files; with other tests if there are."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]
    except (OSError, subprocess.CalledProcessError):
        found = []
        for folder, folders, files in os.walk(ROOT):
            folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            found += [os.path.relpath(Path(folder) / name, ROOT) for name in (*files, *links)]
    for name in found:
        if os.path.lexists(ROOT / name) and not (tests and name.startswith("tests/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    if tests:
        shutil.copytree(tests, copy / "tests", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))


def share(
    pipes: Sequence[connection.Connection], tasks: Iterable[tuple[Any, Any]], until: float
) -> Iterator[tuple[Any, Any]]:
    """Hand tasks, which come with a name, to workers that are free; names with answers, as they come. What is not done in time is given up."""
    tasks, free, busy = iter(tasks), list(pipes), {}
    while True:
        while free and time.monotonic() < until and (task := next(tasks, None)) is not None:
            name, what = task
            free[-1].send(what)
            busy[free.pop()] = name
        if not busy:
            return
        ready = connection.wait(list(busy), None if until == math.inf else max(0.0, until - time.monotonic()))
        if not ready:
            print("time is up", flush=True)
            return
        for pipe in [pipe for pipe in busy if pipe in ready]:
            try:
                answer = pipe.recv()
            except EOFError:
                raise SystemExit("a worker has ended; what it said is above") from None
            yield busy.pop(pipe), answer
            free.append(pipe)


def _work(pipe: connection.Connection, copy: Path, core: int | None) -> None:
    """A worker: answer what is asked through the pipe, until it is closed. With a number, it keeps to two of the cores."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cores = sorted(os.sched_getaffinity(0))
    if core is not None and len(cores) > 2:  # or each would have as many threads as there are cores
        os.sched_setaffinity(0, {cores[(core + i) % len(cores)] for i in range(2)})
    while True:
        try:
            kind, *what = pipe.recv()
        except EOFError:
            return
        pipe.send((_check if kind == "check" else _try)(copy, *what))


def _check(copy: Path, part: str) -> list[str]:
    """Those of a part's tests that fail on the code as it is."""
    failing: list[str] = []
    while True:
        code, failed = _tests(copy, part, frozenset(failing), first=False)
        if code not in (0, NOTHING) and not failed:
            raise SystemExit(f"{part}: exit code {code} without any change:\n{_output(copy)}")
        failing += failed
        if code >= 0:  # and all has run
            return failing


def _try(
    copy: Path, mutant: Mutant, changed: str, stages: list[str], left_out: frozenset[str], start: float
) -> dict[str, Any]:
    """What became of a mutant: by which test it was found, if it was."""
    path = copy / mutant.file
    source = path.read_text(encoding="utf-8")
    outcome = {"outcome": "survived"}
    for stage in stages:
        _put(path, changed)
        code, failed = _tests(copy, stage, left_out, first=True)
        _put(path, source)
        if code not in (0, NOTHING):
            time_out = "time in " if code in (-signal.SIGVTALRM, -signal.SIGALRM) else ""
            outcome = {"outcome": "found", "by": f"{time_out}{failed[0] if failed else f'exit code {code}'}"}
            break
    return outcome | {"seconds": round(time.monotonic() - start, 1)}


def _put(path: Path, source: str) -> None:
    path.write_text(source, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def _output(copy: Path) -> str:
    return Path(f"{copy}.log").read_text(errors="replace")


def _tests(copy: Path, arguments: str, left_out: frozenset[str], first: bool) -> tuple[int, list[str]]:
    """Run tests in a process forked from this one, all or until the first fails.

    Returns:
        Pytest's exit code, negative where a signal ended it; and the tests that failed, or in which it ended, or files that do not import.
    """
    noted = Path(f"{copy}.failed")
    noted.write_text("")
    child = os.fork()
    if child == 0:
        try:
            _pytest(copy, arguments, left_out, first)
        finally:  # an exception: what it says is in the output
            traceback.print_exc()
            os._exit(BROKEN)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:  # what tests have started and left
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    if code in (ELSEWHERE, BROKEN):
        raise SystemExit(f"{arguments}: exit code {code}:\n{_output(copy)}")
    failed = noted.read_text().splitlines()
    return code, [*failed, *([Path(f"{copy}.runs").read_text()] if code < 0 else [])]


def _pytest(copy: Path, arguments: str, left_out: frozenset[str], first: bool) -> None:
    """Run tests in a copy of the repository, in this process; extras that the default tests do without cannot be imported."""
    os.setsid()
    os.chdir(copy)
    log = os.open(f"{copy}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[:] = [str(copy), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != ROOT]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), *paths])
    sys.dont_write_bytecode = False  # what is not changed is compiled once
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    import pytest

    _hide(ABSENT)
    _write_whole()
    noted, runs = Path(f"{copy}.failed"), Path(f"{copy}.runs")
    runs.write_text(arguments)
    seconds = SECONDS if first else 3 * SECONDS

    class Watch:
        """A plugin: says which tests fail, and leaves some out. A test that takes too long ends the process, as one does that never ends."""

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> None:
            runs.write_text(item.nodeid)
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
            signal.setitimer(signal.ITIMER_REAL, 4 * seconds)

        def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
            return str(collection_path.relative_to(copy)) in left_out or None

        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = [item for item in items if item.nodeid not in left_out]

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.note(report)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            self.note(report)

        def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
            if report.failed:
                with noted.open("a") as file:
                    file.write(f"{report.nodeid}\n")

    for which in (signal.SIGTERM, signal.SIGALRM, signal.SIGVTALRM):
        signal.signal(which, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which what runs in a shell's background ignores
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 4 * seconds)
    options = ["-x"] if first else ["--continue-on-collection-errors"]
    options += ["-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=line"]
    names, _, selected = arguments.partition(" -k ")
    code = pytest.main([*options, *names.split(), *(["-k", selected] if selected else [])], [Watch()])
    origin = getattr(sys.modules.get("kvjax"), "__file__", copy)
    os._exit(int(code) if str(origin).startswith(str(copy)) else ELSEWHERE)


def _hide(packages: Sequence[str]) -> None:
    """Have packages not be found. A `None` in `sys.modules` would do for imports, but some look there for what has been imported."""
    find = importlib.machinery.PathFinder.find_spec

    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in packages else find(name, path, target)

    importlib.machinery.PathFinder.find_spec = find_spec  # pyright: ignore[reportAttributeAccessIssue]


def _write_whole() -> None:
    """Have JAX write compiled programs whole or not at all, since other processes read them. It has no option for that."""
    from jax._src.lru_cache import LRUCache

    def put(self: Any, key: str, value: bytes) -> None:
        path = Path(self.path) / f"{key}-cache"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(value)
            part.replace(path)

    LRUCache.put = put


if __name__ == "__main__":
    main()
