"""What README.md and docs/ show: their code runs and prints what they say, their tables are those of the result files."""

import contextlib
import io
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from policies.facts import facts_of

import kvjax
from benchmarks import long_file, tables
from kvjax.policies import registry
from reproduction import tables as quality_tables
from reproduction.analyses import kvzip_needles
from reproduction.equal_bytes import merged

ROOT = Path(__file__).parents[1]
README, OWN_POLICY, QUALITY, SPEED, KERNELS, WEIGHTS, SEVERAL_DEVICES = (
    (ROOT / page).read_text(encoding="utf-8")
    for page in (
        "README.md",
        "docs/howto/own_policy.md",
        "docs/quality.md",
        "docs/speed.md",
        "docs/kernels.md",
        "docs/howto/weights.md",
        "docs/howto/several_devices.md",
    )
)
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
SCORER, EVICTION, POLICY, _ = re.findall(r"```python\n(.*?)```", OWN_POLICY, flags=re.DOTALL)
PRINTED = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
def test_example_prints_what_the_readme_says(smollm2, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(kvjax, "load", lambda: smollm2)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(EXAMPLE, {})
    assert out.getvalue() == PRINTED[0]


def test_own_policy_of_the_docs_works(tiny):
    namespace = {"__name__": "methods"}
    exec(POLICY, namespace)
    try:
        assert POLICY.count("\n") <= 40
        prompts = [[5, 9, 2] * 20, [3, 1, 4]]
        options = {"policy": "low_norm", "max_new_tokens": 12, "ignore_eos": True}
        for got, want in zip(
            kvjax.generate(tiny, prompts, **options, budget=200),
            kvjax.generate(tiny, prompts, **options | {"policy": "full"}),
            strict=True,
        ):
            assert got.tokens == want.tokens
        tight = kvjax.generate(tiny, prompts, **options, budget=16)
        alone = kvjax.generate(tiny, prompts[1], **options, budget=16)
        assert alone.tokens == tight[1].tokens
        policy = kvjax.get_policy("low_norm", budget=16)
        assert tight[0].stats.cache_bytes == policy.nbytes(tiny.config, 2, 60, 12, jnp.float32)
    finally:
        registry._POLICIES.pop("low_norm", None)


def test_a_scorer_keeps_its_first_and_last_tokens(tiny):
    """As many as its `always_kept` says in plain numbers."""

    class Ends(kvjax.policies.SnapKV):
        def always_kept(self, budget):
            return 2, 5

    engine = kvjax.Engine(tiny, Ends(budget=12), batch=2, prompt_len=40, max_new_tokens=4)
    state, _ = engine.prefill([[5, 9, 2, 7] * 10, [3, 1, 4] * 7])
    for slots in engine.slots(state):
        for row, size in enumerate((40, 21)):
            for head in range(2):
                kept = set(np.asarray(slots.pos[row, head])[np.asarray(slots.live[row, head])].tolist())
                assert len(kept) == 12
                assert kept > {0, 1, *range(size - 5, size)}


def test_the_scorer_that_the_docs_write_keeps_what_knorm_keeps(tiny):
    namespace = {"__name__": "my_policy"}
    exec(SCORER, namespace)
    try:
        options, prompts = {"max_new_tokens": 12, "ignore_eos": True}, [[5, 9, 2] * 20, [3, 1, 4]]
        info = kvjax.get_policy("small_keys").info
        assert (info.stage, info.budget_excludes_new_tokens) == ("prompt", True)  # as the tests of invariants need
        both = "small_keys:16", "prompt_only(knorm:16,dense_layers=0)"
        own, ours = (kvjax.generate(tiny, prompts, policy=policy, **options) for policy in both)
        assert [row.tokens for row in own] == [row.tokens for row in ours]
        assert [row.logprobs for row in own] == [row.logprobs for row in ours]
    finally:
        registry._POLICIES.pop("small_keys", None)


def test_the_eviction_that_the_docs_write_is_h2o_in_rounds(tiny):
    namespace = {"__name__": "my_policy"}
    exec(EVICTION, namespace)
    try:
        prompts, options = [[5, 9, 2] * 20, [3, 1, 4]], {"max_new_tokens": 12, "ignore_eos": True}
        own = kvjax.generate(tiny, prompts, policy="most_attended:16,every=1", **options)
        ours = kvjax.generate(tiny, prompts, policy="h2o:16,recent=0", **options)
        assert [row.tokens for row in own] == [row.tokens for row in ours]
        policy = kvjax.get_policy("most_attended:16")
        rounds = kvjax.generate(tiny, prompts, policy=policy, **options)
        assert rounds[0].stats.cache_bytes == policy.nbytes(tiny.config, 2, 60, 12, jnp.float32)
    finally:
        registry._POLICIES.pop("most_attended", None)


def test_every_policy_has_a_page():
    """The site makes its tables of these pages (docs/extensions/methods.py)."""
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/methods").glob("*.md")}
    assert sorted(pages) == sorted(registry.policies())
    for name, cls in registry.policies().items():
        start, facts, text = pages[name].split("---\n", 2)
        written = yaml.safe_load(facts)
        assert start == ""
        assert text.startswith("\n# ")
        assert ("paper" in written) == (name not in ("full", "random"))
        assert ("blocks" in written) != facts_of(name).whole_prompts
        assert set(written) <= {"paper", "blocks", "budget"}
        assert cls.about.summary
        picture = ROOT / f"docs/pictures/{name}.png"  # python docs/draw_methods.py draws it
        assert picture.is_file() != cls.about.trained


def test_policies_that_the_readme_names_are_there():
    (table,) = re.findall(r"^\| approach \| policies \|.*?\n\n", README, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", table)) <= set(registry.policies())


def test_needles_of_kvzip_are_those_of_the_result_file():
    rows = quality_tables.rows("kvzip-needles-cpu.json")
    assert kvzip_needles.table(rows) in (ROOT / "docs/methods/kvzip.md").read_text(encoding="utf-8")


def test_tables_are_those_of_the_result_files():
    assert tables.beside_vllm() in README
    assert tables.written(README) == README
    for table in (
        quality_tables.perplexity(),
        tables.memory(),
        quality_tables.quality(quality_tables.measured_quality()),
        *map(quality_tables.reading_in_blocks, quality_tables.BLOCK_SIZE_MODELS),
    ):
        assert table in QUALITY
    for table in (tables.first_token(), tables.compression(), tables.published(), tables.long_texts(), tables.peers()):
        assert table in SPEED
    assert tables.kernels() in KERNELS
    assert tables.quantized_products() in KERNELS
    assert tables.fits(*tables.FITS_8B) in WEIGHTS
    assert tables.fits(*tables.FITS_70B) in SEVERAL_DEVICES
    assert tables.weights() in WEIGHTS
    assert tables.several_devices() in SEVERAL_DEVICES
    assert tables.profiles() in SEVERAL_DEVICES
    assert tables.rounds() in SPEED
    assert tables.offload() in SPEED


def test_what_two_gpus_gain():
    told = re.search(
        r"Over `model=2`, eight sequences of 65,536 tokens decode (\S+) times as fast as on one GPU. "
        r"Over `data=2`, they give (\S+) times the tokens per second of four sequences on one GPU",
        SEVERAL_DEVICES,
    )
    assert told is not None
    rate = {
        (row["context"], row["batch"], row["mesh"]): row["tokens_per_s"]
        for row in tables.rows("decode-two-h200.json")
        if row["program"] == "kvjax"
    }
    of = 65536, 8
    assert told[1] == f"{rate[*of, 'model=2'] / rate[*of, '']:.2f}"
    assert told[2] == f"{rate[*of, 'data=2'] / rate[65536, 4, '']:.2f}"


def test_how_fast_two_gpus_read():
    told = re.search(
        r"of 16,384 in (\S+) seconds over `model=2`, and in (\S+) on one GPU: (\S+) times as fast. In blocks of 4,096 "
        r"\(1,003,520 tokens\) it is (\S+) and (\S+) seconds",
        SEVERAL_DEVICES,
    )
    assert told is not None
    seconds = {(row["block"], row["mesh"]): row["seconds"] for row in tables.rows("long-context-two-h200.json")}
    two, one = (seconds[16384, mesh] for mesh in ("model=2", ""))
    assert told.groups() == (
        f"{two:.1f}", f"{one:.1f}", f"{one / two:.2f}", f"{seconds[4096, 'model=2']:.1f}", f"{seconds[4096, '']:.1f}"
    )  # fmt: skip


def test_what_kernels_of_a_step_over_data_take():
    told = re.search(r"(\S+) ms for 8 layers and 65,536 × 8 tokens, (\S+) on one", SEVERAL_DEVICES)
    assert told is not None
    spent = [
        sum(kernel["microseconds"] for kernel in tables.rows(f"timeline-data-{gpus}-h200.json")[0]["kernels"]) / 1e3
        for gpus in ("two", "one")
    ]
    assert told.groups() == tuple(f"{ms:.2f}" for ms in spent)


def test_a_methods_page_has_the_needles_of_the_table():
    for name in ("snapkv", "rkv", "full"):
        cells = [line.strip("| ").split(" | ") for line in quality_tables.needles_of(name).splitlines()[2:]]
        told = {row[1]: ", ".join(row[2:]) for row in cells if row[0] == f"`{name}`"}
        assert f"| `{name}` | {told['whole']} | {told['in blocks of 512']} | {told['in blocks of 2048']} |" in QUALITY
        assert cells[-1][0] == "`full`" or name == "full"
    assert not quality_tables.needles_of("lagkv")


def test_the_headline_is_that_of_the_speed_table():
    """The range of speed-ups at 64k × 8 of methods with a cache of a fifth: over vLLM in README.md, over the full cache in speed.md."""
    (told, conclusion) = re.findall(r"a 20 % cache decodes (\S+) to (\S+) times as fast as\s+vLLM", README)
    assert told == conclusion
    rows = {row["policy"]: row["tpot_ms"] for row in reversed(_at_64k_by_8())}
    gains = [rows["full"] / rows[name] for name in ("treekv", "chunkkv", "chelsea")]
    assert f"a 20 % cache decodes {min(gains):.1f} to {max(gains):.1f} times as fast" in SPEED
    assert f"{len(set(registry.policies()) - {'full', 'random'})} published compression methods" in README


def _at_64k_by_8():
    fifth = ("full", None), ("treekv", 0.2), ("chunkkv", 0.2), ("chelsea", 0.2)
    found = (row for row in tables.decoded("kvjax") if (row["context"], row["batch"]) == (65536, 8))
    return [row for row in found if (row["policy"], row["settings"].get("budget")) in fifth]


def test_how_fast_a_million_tokens_are_read():
    told = re.search(
        r"takes seven policies (\d+) to (\d+) s with a budget of 4,096 tokens, and (\d+) to (\d+) s with 16,384. H2O takes (\d+) s and (\d+) s. "
        r"TreeKV prefills ten million tokens with a budget of 4,096 in (\d+) s. Peak memory is at most (\S+) GB",
        README,
    )
    assert told is not None
    rows = tables.rows("long-context-h200.json")
    assert all(row["tokens"] - row["tokens_read"] < row["block"] for row in rows)
    seconds = {(row["policy"], row["settings"]["budget"], row["tokens"] > 5_000_000): row["seconds"] for row in rows}
    expected = []
    for budget in (4096, 16384):
        others = [each for (name, held, long), each in seconds.items() if held == budget and name != "h2o" and not long]
        assert len(others) == 7
        expected += [min(others), max(others)]
    expected += [seconds["h2o", 4096, False], seconds["h2o", 16384, False], seconds["treekv", 4096, True]]
    assert [f"{each:.0f}" for each in expected] == list(told.groups()[:7])
    assert f"{max(row['peak_bytes'] for row in rows) / 1e9:.1f}" == told[8]


def test_conclusions_above_the_tables_of_speed():
    """The bold sentences have the tables' own extremes."""
    overheads = [float(found) for found in re.findall(r"\(([+-][\d.]+) %\)", tables.first_token())]
    assert f"adds at most {max(overheads):.0f} % to the time to first token" in SPEED
    case = "kvjax", "llama-3.1-8b", "full", 16384, 1
    (first,) = (
        r
        for r in tables.rows("first-token-h100.json")
        if (r["program"], r["shape"], r["policy"], r["prompt"], r["rows"]) == case
    )
    assert f"after 16,384 tokens takes {first['ttft_s']:.3f} s with Llama-3.1-8B's shape." in SPEED
    slowdowns = {f"{r['times_floor']:.1f}" for r in tables.rows("decode-rounds-h200.json") if r["policy"] != "full"}
    assert slowdowns == {"1.3"}
    assert "other eviction: 1.3 times the bandwidth bound" in SPEED
    seconds = [r["seconds"] for r in tables.rows("long-context-h200.json") if r["tokens"] < 5_000_000]
    assert f"one million tokens takes {min(seconds):.0f} to {max(seconds):.0f} s" in SPEED
    losses = re.findall(
        r"question-aware \| (\d+) ±", quality_tables.reading_in_blocks(quality_tables.BLOCK_SIZE_MODELS[0])
    )
    losses = sorted(map(int, losses))
    assert (
        f"in blocks of 2,048 costs methods that score by the last queries {losses[0]} to {losses[-1]} points" in QUALITY
    )


def test_conclusions_above_other_tables():
    shares = [float(found) for found in re.findall(r"\((\S+) %\)", tables.compression())]
    assert f"Compression alone takes at most {max(shares):.0f} % of" in SPEED
    offloaded = {row["case"]: row["tpot_ms"] for row in tables.rows("offload-h200.json") if "tpot_ms" in row}
    once = [ms for case, ms in offloaded.items() if "gqa=" in case and case.endswith("@selected")]
    assert len(once) == 2
    assert max(once) < 10
    assert f"The full cache takes {offloaded['full@selected']:.0f} ms" in SPEED
    compiled = re.findall(r"transformers-compiled \|(?:[^|]*\|){4} (\S+)", tables.peers())
    assert len(compiled) == 3
    assert f"{min(compiled)} to {max(compiled)} times as fast as transformers with a static cache" in SPEED
    quality = quality_tables.quality(quality_tables.measured_quality())
    perplexities = {name: float(cell) for name, cell in re.findall(r"^\| `(.*?)` \| (\S+),", quality, re.MULTILINE)}
    near = {name for name, value in perplexities.items() if value < 1.02 * perplexities["full"]}
    assert near == {"full", "clusterkv", "catekv", "duoattention", "shadowkv", "kivi, 4 bits", "kivi, 8 bits"}
    for name in ("knorm", "random"):
        (line,) = re.findall(rf"^\| `{name}` .*MB \|.*$", QUALITY, re.MULTILINE)
        assert min(map(float, re.findall(r"(\S+), \S+ %", line))) > 2 * perplexities["full"]
    lost = dict(re.findall(r"^\| `(.*?)` \| \S+ ± \S+ \| (\S+) ±", QUALITY, re.MULTILINE))
    assert lost["rkv"] == lost["triattention"] == "-0.8"
    assert [f"{-float(lost[name]):.0f}" for name in ("treekv", "h2o")] == ["7", "12"]
    assert "lose 7 to 12 points" in QUALITY


def test_memory_does_not_grow_with_what_is_read():
    """What is in use after a tenth of a text is in use at its end."""
    marks = [row["marks"] for row in tables.rows("long-context-h200.json") if "in_use_bytes" in row["marks"][0]]
    assert len(marks) >= 15
    assert all(len({mark["in_use_bytes"] for mark in row}) == 1 for row in marks)


def test_a_long_file_took_what_the_page_says():
    page = " ".join((ROOT / "docs/howto/long_prompts.md").read_text(encoding="utf-8").split())
    (row,) = tables.rows("long-file-cpu.json")
    words, limit = long_file.options()
    assert f"kvjax {' '.join(words)}" in page.replace("(ulimit", "")
    assert row["data_limit_bytes"] == limit
    assert row["process_peak_bytes"] < limit
    assert f"{row['tokens']:,} tokens takes {row['cpu_s'] / 60:.0f} minutes of CPU time" in page
    assert f"{row['process_peak_bytes'] / 1e9:.1f} GB at its peak" in page


def test_result_files_say_what_the_docs_claim():
    """Within the trained window TreeKV is near the full cache; beyond it stays where it was while the full cache fails."""
    rows = {row["policy"]: row["parts"] for row in quality_tables.rows("streaming-perplexity-h200.json")}
    inside, beyond = "6144-8192", "14336-16384"
    assert rows["treekv"][inside] < 1.05 * rows["full"][inside]
    assert rows["treekv"][beyond] < 1.5 * rows["treekv"][inside]
    assert rows["full"][beyond] > 10 * rows["treekv"][beyond]
    held = {
        (r["policy"], r["new_tokens"]): (r["cache_bytes"], r["program_bytes"])
        for r in tables.rows("constant-memory.json")
    }
    assert held["treekv", 1024] == held["treekv", 32768]
    assert np.all(np.asarray(held["full", 32768]) > 5 * np.asarray(held["full", 1024]))


def test_recommended_policies_are_the_best_measured():
    """`choose.md` names first the two policies that its tables of results have first."""
    page = (ROOT / "docs/start/choose.md").read_text(encoding="utf-8")
    (start,) = re.findall(r"\| your task \| use \|.*?\n\n", page, flags=re.DOTALL)
    for table, anchor in (
        (quality_tables.question_aware(), "#the-question-is-in-the-prompt"),
        (quality_tables.question_agnostic(), "#the-question-comes-later"),
    ):
        (line,) = (line for line in start.splitlines() if anchor in line)
        ranked = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
        assert ranked[0] == "full"
        named = [re.sub(r"0\.25,?", "", text).rstrip(":") for text in re.findall(r"\[`([^`]+)`\]", line)]
        assert len(named) == 2
        assert all(text.startswith(best) for text, best in zip(named, ranked[1:3], strict=True)), (named, ranked)
    best = {
        row["held"] / row["full"]
        for row in merged.comparable(quality_tables.rows("leaderboard-h200.json"))
        if row["policy"] == "kivi" and row["settings"]["bits"] == 4
    }
    assert f"With 4 bits it takes {100 * max(best):.0f} % of the bytes" in page
    scores = (ROOT / "docs/leaderboard.md").read_text(encoding="utf-8").split("### ruler-4096, equal bytes\n")[1]
    (near,) = re.findall(r"Not significantly below the full cache, .*", scores.split("\n### ")[0])
    assert f"`kivi` ({100 * max(best):.1f} %)" in near
    # Its budget is not a share of the prompt.
    (settings,) = {
        row["settings"]["policy"]
        for row in merged.comparable(quality_tables.rows("leaderboard-h200.json"), "prompt", seen=True)
        if (row["policy"], row["target"]) == ("rocketkv", 0.25)
    }
    assert f"With `{settings.replace('budget=', '')}` it keeps about a quarter" in page


def test_the_best_policies_have_the_scores_of_the_leaderboard():
    page = (ROOT / "docs/leaderboard.md").read_text(encoding="utf-8")
    for table, heading in (
        (quality_tables.question_agnostic(), "### ruler-4096, equal bytes\n"),
        (quality_tables.question_aware(), "### ruler-4096, equal shares of the prompt\n"),
    ):
        (part,) = re.findall(rf"^{heading}(.*?)^### ", page, flags=re.MULTILINE | re.DOTALL)
        found = re.findall(r"^\| `(.+?)` \| (\S+ ± \S+) \|", table, re.MULTILINE)
        assert len(found) == 6
        for name, score in found:
            (line,) = re.findall(rf"^\| `{re.escape(name)}` .*\|$", part, flags=re.MULTILINE)
            assert score in line


def test_vllm_is_shown_beside_what_its_machine_measured(monkeypatch):
    """Rows of other machines, such as the result file's own, are not shown. Without a row of vLLM, nothing is."""

    def row(program: str, policy: str, machine: str | None, **more: object) -> dict[str, object]:
        about = {
            "program": program,
            "policy": policy,
            "machine": machine,
            "version": "1",
            "device": "a GPU",
            "shape": "llama-3.1-8b",
            "layers": 32,
        }
        return about | {"date": f"2026-01-0{len(machine or '')}", "prompt": 16384, "rows": 1} | more

    made = {
        "first-token-h200.json": [],
        "throughput-h200.json": [],
        "first-token-h100.json": [
            row("kvjax", "full", "aa", tpot_ms=6.0),
            row("kvjax", "treekv:0.2", "aa", tpot_ms=5.0, prompt=65536, rows=8),
            row("kvjax", "treekv:0.2", "b", tpot_ms=4.0),
            row("kvjax", "treekv:0.2", None, tpot_ms=3.0),
            row("kvjax", "treekv:0.2", "aa", tpot_ms=2.0, shape="70b"),
        ],
        "throughput-h100.json": [
            row("kvjax", "rkv:1024", "aa", workload="same 256,400,4096", seconds=64.0),
            row("kvjax", "full", "aa", workload="trace 128", seconds=1.0),
            row("kvjax", "rkv:1024", "aa", workload="same 320,400,6144", seconds=1.0),
        ],
    }
    monkeypatch.setattr(tables, "rows", lambda name: made[name])
    assert tables.beside_vllm() == ""
    made["first-token-h100.json"] += [row("vllm", "full", "b", tpot_ms=9.0), row("vllm", "full", "aa", tpot_ms=7.0)]
    made["first-token-h200.json"] += [row("vllm", "full", "aa", tpot_ms=20.0, prompt=65536, rows=8)]
    made["throughput-h200.json"] += [row("vllm", "full", "aa", workload="same 256,400,4096", seconds=128.0)]
    conclusion, _, *table = tables.beside_vllm().splitlines()
    assert "a 20 % cache decodes 4.0 to 4.0 times as fast as vLLM" in conclusion
    assert table == [
        "| program | policy | TPOT, 16k × 1 | TPOT, 64k × 8 | reasoning |",
        "| --- | --- | ---: | ---: | ---: |",
        "| vLLM 1 | `full` | 7.00 ms | 20.00 ms | 2.00 requests/s |",
        "| kvjax | `full` | 6.00 ms (1.17 ×) |  |  |",
        "| kvjax | `treekv:0.2` |  | 5.00 ms (4.00 ×) |  |",
        "| kvjax | `rkv:1024` |  |  | 4.00 requests/s (2.00 ×) |",
    ]


def test_how_much_faster_than_vllm_requests_are_answered():
    rows = [row for row in tables.rows("throughput-h200.json") if row["workload"] == "same 256,400,4096"]
    rates = {row["policy"]: row["tokens_per_second"] for row in rows}
    first, second = (f"{rates[policy] / rates['full']:.2f}" for policy in ("rkv:1024", "rkv:512"))
    assert f"{first} times as fast as vLLM with a budget of 1,024, and {second} times with 512" in SPEED


def test_what_fits_an_h100_is_what_a_plan_finds():
    page = (ROOT / "docs/howto/devices.md").read_text(encoding="utf-8")
    assert "kvjax plan --model qwen3-32b --device h100 --context 65536\n" in page
    fits = dict(re.findall(r"^\| `(\w+)` .* \| (yes|no) \|", tables.planned(), flags=re.MULTILINE))
    assert fits == {"int4": "yes", "int8": "yes", "bfloat16": "no"}
    assert "fits one H100 in `int8` and `int4`, and not in `bfloat16`" in page


def test_how_much_longer_than_the_bound_steps_take():
    page = (ROOT / "docs/howto/devices.md").read_text(encoding="utf-8")
    told = re.search(
        r"took (\S+) to (\S+) times as long with bfloat16 weights .*?, (\S+) times with `int8` and (\S+) times with",
        page,
    )
    assert told is not None
    grid = [float(found) for found in re.findall(r"\((\d\.\d+)\)", tables.speed())]
    low_bit = {row["weights"]: row["tpot_ms"] / row["floor_ms"] for row in tables.rows("decode-weights-h200.json")}
    assert [f"{each:.1f}" for each in (min(grid), max(grid), low_bit["int8"], low_bit["int4"])] == list(told.groups())
