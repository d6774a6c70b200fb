"""Tables of speed and memory in README.md and docs/, made from the result files.

`python -m benchmarks.tables` prints them. `--write` puts those of README.md, which are between comments with their
functions' names, where they belong.
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kvjax
from benchmarks import report
from kvjax import pallas_kernels
from kvjax.config import PRESETS
from kvjax.policies import policies

RESULTS = Path(__file__).parent / "results"

FITS_8B = "fits-v5e", "fits-v5e-2x2"
FITS_70B = "fits-llama-70b-v5p-2x2x1", "fits-llama-70b-v6e-2x4"
"""Result files with the TPU compiler's memory analysis of two model shapes."""

Row = dict[str, Any]


def rows(name: str) -> list[Row]:
    """The rows of a result file."""
    return report.read(RESULTS / name)["rows"]


def decoded(program: str) -> list[Row]:
    """The rows of a program in the decode benchmark that have a time per token."""
    return [row for row in rows("decode-h200.json") if row["program"] == program and "tpot_ms" in row]


def memory() -> str:
    """Bytes of the cache and of the decode program for few and many generated tokens."""
    lines = [
        [f"`{row['policy']}`", str(row["new_tokens"]), f"{row['cache_bytes']:,} B", f"{row['program_bytes']:,} B"]
        for row in rows("constant-memory.json")
    ]
    return report.table(["policy", "new tokens", "cache", "decode program"], lines)


def speed_of(name: str) -> str:
    """Milliseconds per token (TPOT) of a method beside the full cache, by length and batch; empty if it was not measured."""
    measured = [row for row in decoded("kvjax") if row["policy"] == name and row["batch"] in (1, 8)]
    full = {
        (row["context"], row["batch"]): row["tpot_ms"] for row in reversed(decoded("kvjax")) if row["policy"] == "full"
    }
    first = {(_name(row), row["context"], row["batch"]): row["tpot_ms"] for row in reversed(measured)}
    cases = dict.fromkeys((_name(row), row["context"], row["batch"]) for row in measured)
    lines = [
        [f"`{case[0]}`", _case(*case[1:]), f"{first[case]:.2f}", f"{full[case[1:]]:.2f}"]
        for case in cases
        if case[1:] in full
    ]
    return report.table(["policy", "context × batch", "TPOT, ms", "full cache"], lines) if lines else ""


def speed() -> str:
    """TPOT in milliseconds and its ratio to the bandwidth bound; one row per policy, one column per length and batch."""
    measured = [row for row in decoded("kvjax") if row["batch"] in (1, 8) and row["context"] <= 65536]
    cases = sorted({(row["batch"], row["context"]) for row in measured})
    lines = []
    for name in dict.fromkeys(map(_name, measured)):
        here = {(row["batch"], row["context"]): row for row in reversed(measured) if _name(row) == name}
        found = (here.get(case) for case in cases)
        lines.append(
            [f"`{name}`", *(f"{row['tpot_ms']:.2f} ({row['times_floor']:.2f})" if row else "" for row in found)]
        )
    return report.table(["policy", *(_case(context, batch) for batch, context in cases)], lines)


def beside_vllm() -> str:
    """A conclusion and a table: TPOT and requests per second of kvjax and vLLM, and how many times as fast as vLLM each is.

    Empty if vLLM was not measured with Llama-3.1-8B's shape. Only rows of this shape and of the machine, devices and depth that vLLM's
    latest row has, and equal requests of the size that vLLM ran last.
    """
    names = "h100", "h200"
    tokens = [row for name in names for row in rows(f"first-token-{name}.json") if "tpot_ms" in row]
    tokens = [row for row in tokens if row["shape"] == "llama-3.1-8b"]
    equal = [row for name in names for row in rows(f"throughput-{name}.json") if row["workload"].startswith("same ")]
    theirs = sorted((row for row in (*tokens, *equal) if row["program"] == "vllm"), key=lambda row: row["date"])
    if not theirs:
        return ""
    latest = theirs[-1]
    tokens, equal = (
        [
            row
            for row in group
            if all(row.get(key) == latest[key] for key in ("machine", "shape", "layers"))
            and row.get("devices", 1) == latest.get("devices", 1)
        ]
        for group in (tokens, equal)
    )
    workload = next((row["workload"] for row in reversed(equal) if row["program"] == "vllm"), "")
    rates: dict[tuple[str, str], dict[str, float]] = {}  # tokens or requests per second, by program, policy and column
    for row in tokens:
        case = f"TPOT, {_case(row['prompt'], row['rows'])}"
        rates.setdefault((row["program"], row["policy"]), {})[case] = 1e3 / row["tpot_ms"]
    for row in equal:
        if row["workload"] != workload:
            continue
        count = int(workload.split()[1].split(",")[0])
        rates.setdefault((row["program"], row["policy"]), {})["reasoning"] = count / row["seconds"]
    base = rates["vllm", latest["policy"]]
    lines = []
    for (program, policy), found in sorted(rates.items(), key=lambda each: each[0][0] != "vllm"):
        cells = []
        for case, theirs_rate in base.items():
            rate = found.get(case)
            shown = (
                "" if rate is None else f"{1e3 / rate:.2f} ms" if case.startswith("TPOT") else f"{rate:.2f} requests/s"
            )
            cells.append(shown if rate is None or program == "vllm" else f"{shown} ({rate / theirs_rate:.2f} ×)")
        lines.append([program if program == "kvjax" else f"vLLM {latest['version']}", f"`{policy}`", *cells])
    gains = [
        found[LONG] / base[LONG] for (_, policy), found in rates.items() if policy.endswith(":0.2") and LONG in found
    ]
    gain = f"{min(gains):.1f} to {max(gains):.1f} times as fast as vLLM"
    conclusion = f"**At 64k tokens and batch size 8, a 20 % cache decodes {gain} with its full cache.**"
    return f"{conclusion}\n\n{report.table(['program', 'policy', *base], lines, 'llr')}"


LONG = "TPOT, 64k × 8"
"""The column of `beside_vllm` that its conclusion is about."""


def first_token() -> str:
    """Time to first token (TTFT) in seconds, and its increase over the full cache; one row per policy, one column per length."""

    def cell(name: str, seconds: float, full: float) -> str:
        return f"{seconds:.3f}" + ("" if name == "full" else f" ({100 * (seconds / full - 1):+.1f} %)")

    return _by_length("ttft_s", cell)


def compression() -> str:
    """Milliseconds that compressing a prompt takes in all layers, and their share of the full cache's TTFT."""
    return _by_length(
        "compression_s", lambda _, taken, full: f"{1e3 * taken:.1f} ({100 * taken / full:.1f} %)" if taken else ""
    )


def _by_length(measure: str, cell: Callable[[str, float, float], str]) -> str:
    """One row per policy, one column per length of a prompt.

    Args:
        cell: what a policy's cell says, from its name, its figure, and the TTFT of the full cache.
    """
    measured = [row for row in decoded("kvjax") if row.get(measure) is not None and row["batch"] == 1]
    full = {row["context"]: row["ttft_s"] for row in measured if row["policy"] == "full"}
    contexts = sorted({row["context"] for row in measured if row["policy"] != "full"})
    lines = []
    for name in dict.fromkeys(map(_name, measured)):
        here = {row["context"]: row[measure] for row in measured if _name(row) == name}
        lines.append([f"`{name}`", *(cell(name, here[at], full[at]) if at in here else "" for at in contexts)])
    return report.table(["policy", *(f"{context // 1024}k" for context in contexts)], lines)


def published() -> str:
    """The papers' ratios of their methods to the full cache, beside the same ratios here."""
    measured = decoded("kvjax")
    sparser = "catekv:eta=0.7,share_adaptive=0.3"
    lines = []

    def add(
        method: str, what: str, paper: str, names: tuple[str, str], context: int, *measures: tuple[Any, str]
    ) -> None:
        cells = []
        for batch, measure in measures:
            found = [row for name in names if (row := _first(measured, name, context, batch, measure))]
            if len(found) == len(names):
                most = {row["batch_run"] for row in found}
                ratio = found[0][measure] / found[1][measure]
                ratio = 1 / ratio if measure == "tokens_per_s" else ratio
                about = f"batch {' and '.join(map(str, sorted(most)))}"
                if measure == "tpot_ms":
                    about += f"; bounds {found[0]['floor_ms'] / found[1]['floor_ms']:.2f}"
                cells.append(f"{ratio:.2f} ({about})")
        lines.append([method, what, paper, ", ".join(cells) or "not measured"])

    add("Chelsea, 20 %", "TPOT, 64k", "3.19", ("full", "chelsea:0.2"), 65536, (1, "tpot_ms"), (8, "tpot_ms"))
    add("Chelsea, 20 %", "throughput, 64k", "", ("full", "chelsea:0.2"), 65536, ("largest", "tokens_per_s"))
    add("ClusterKV, 1024", "TPOT, 32k", "2", ("full", "clusterkv:1024"), 32768, (1, "tpot_ms"), (8, "tpot_ms"))
    add("ClusterKV, 1024", "throughput, 32k", "2.5", ("full", "clusterkv:1024"), 32768, ("largest", "tokens_per_s"))
    add("CateKV, r = 0.3, η = 0.7", "memory, 500k", "2.72", ("full", sparser), 512000, (1, "peak_bytes"))
    add("CateKV, r = 0.3, η = 0.7", "TPOT, 500k", "2.18", ("full", sparser), 512000, (1, "tpot_ms"))
    add("CateKV, r = 0.3, η = 0.7", "throughput, 40k", "3.96", ("full", sparser), 40960, ("largest", "tokens_per_s"))
    for context in (32768, 65536):
        what = f"compression, {context // 1024}k, without over with"
        names = "chunkkv:0.2", "chunkkv:0.2,reuse=2"
        add("ChunkKV, index reuse 2", what, "", names, context, (1, "compression_s"))
    return report.table(["method", "ratio", "paper", "here"], lines, "llrl")


def _first(rows: Sequence[Row], name: str, context: int, batch: Any, measure: str) -> Row | None:
    """The first row of a case that has this measure; rows without a prefill lack some."""
    case = name, context, batch
    found = (row for row in rows if (_name(row), row["context"], row["batch"]) == case and row.get(measure) is not None)
    return next(found, None)


def long_texts() -> str:
    """Speed and memory of chunked prefill of long texts, one row per policy."""
    heads = [
        "policy",
        "tokens",
        "seconds",
        "compute bound",
        "tokens/s",
        "cache",
        "prefill",
        "peak in use",
        "full cache",
    ]
    order, c = list(policies()), PRESETS["llama-3.1-8b"]
    per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 2  # keys and values, two bytes each
    lines = []
    for row in sorted(
        rows("long-context-h200.json"),
        key=lambda row: (row["tokens_read"] > 2_000_000, row["settings"]["budget"], order.index(row["policy"])),
    ):
        tokens, held = row["tokens_read"], [row[name] for name in ("cache_bytes", "program_bytes", "peak_bytes")]
        lines.append(
            [
                f"`{_name(row)}`",
                f"{tokens:,}",
                f"{row['seconds']:.1f}",
                f"{row['ideal_seconds']:.1f}",
                f"{tokens / row['seconds']:,.0f}",
                *(f"{each / 1e9:.1f} GB" for each in (*held, per_token * tokens)),
            ]
        )
    return report.table(heads, lines)


def blocks_and_whole() -> str:
    """Seconds that prefill takes in blocks and for the whole prompt."""
    lines = [
        [
            f"`{_name(row)}`",
            f"{row['tokens_read']:,}",
            str(row["block"] or "the whole prompt"),
            f"{row['seconds']:.2f}",
            f"{row['peak_bytes'] / 1e9:.1f} GB",
        ]
        for name in ("64k-full", "64k", "128k")
        for row in rows(f"long-context-{name}-h200.json")
    ]
    return report.table(["policy", "tokens", "block", "seconds", "peak in use"], lines)


def fits(*names: str) -> str:
    """Memory of a model with a prompt of 128k tokens on TPU chips, by weights and policy.

    Args:
        names: of result files.
    """
    lines = []
    for name in names:
        settings = report.read(RESULTS / f"{name}.json")["header"]["settings"]
        for row in rows(f"{name}.json"):
            kinds = [settings["dtype"] if kind == "float" else kind for kind in (row["weights"], row["embedding"])]
            sizes = (row[f"{what}_bytes"] / 1e9 for what in ("weight", "cache", "prefill", "decode"))
            policy = f"`{row['policy']}:{row['settings']['budget']}`"
            lines.append([settings["chip"], ", ".join(kinds), policy, *(f"{size:.1f} GB" for size in sizes)])
    heads = ["chips", "layers in, embedding in", "policy", "weights", "cache", "peak, prefill", "peak, decoding"]
    return report.table(heads, lines, "lllr")


def planned() -> str:
    """What `kvjax plan` finds for a 32B model with 64k tokens on an H100, one row per kind of weights. Nothing is measured."""
    lines = []
    for way in kvjax.plan("qwen3-32b", device="h100", context=65536):
        sizes = way.weight_bytes, way.cache_bytes, way.workspace_bytes, way.peak_bytes
        cells = (f"{size / 1e9:.1f} GB" for size in sizes)
        lines.append([f"`{way.weights}`", *cells, "yes" if way.fits else "no", f"{way.floor_ms:.1f} ms"])
    heads = ["weights in", "weights", "cache", "workspace", "peak", "fits", "bound per token"]
    return report.table(heads, lines)


def weights() -> str:
    """Prefill and decoding with 8-bit and 4-bit weights, one row per kind; of TPOT also the fastest and the slowest call."""
    lines = []
    for row in rows("decode-weights-h200.json"):
        calls = row["tpot_all_ms"][1:]
        lines.append(
            [
                f"`{row['dtype'] if row['weights'] == 'float' else row['weights']}`",
                f"{row['ttft_s']:.2f}",
                f"{row['tpot_ms']:.1f}",
                f"{min(calls):.1f} to {max(calls):.1f}",
                f"{row['floor_ms']:.2f}",
                f"{row['peak_bytes'] / 1e9:.1f} GB",
            ]
        )
    heads = ["weights, embedding and head included", "TTFT, s", "TPOT, ms", "by calls", "bound, ms", "peak"]
    return report.table(heads, lines)


def several_devices() -> str:
    """Decoding over two GPUs, one row per case."""
    heads = [
        "shape",
        "policy",
        "tokens × sequences",
        "mesh",
        "TPOT, ms",
        "tokens/s",
        "TPOT / bound",
        "cache per device",
    ]
    lines = [
        [
            row["shape"],
            f"`{_name(row)}`",
            f"{row['context']:,} × {row['batch']}",
            ", ".join([row["mesh"] or "one GPU", *row["program"].split(", ")[1:]]),
            f"{row['tpot_ms']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['times_floor']:.2f} ×",
            f"{row['cache_bytes'] / 1e9:.1f} GB",
        ]
        for row in rows("decode-two-h200.json")
    ]
    return report.table(heads, lines, "llrlr")


PROFILES = {
    "a step, one GPU": "timeline-decode-one-h200.json",
    "a step, two": "timeline-decode-two-h200.json",
    "a block, one GPU": "timeline-read-one-h200.json",
    "a block, two": "timeline-read-two-h200.json",
}
"""Columns of `profiles`."""

_KINDS = {
    "matmuls": ("nvjet", "projection", "fused_decode_block"),
    "attention": ("decode_attention", "body_mosaic_gpu_kernel"),
    "all-reduces": ("nccl",),
}
"""Beginnings of kernels' names, by what the kernels do."""


def profiles() -> str:
    """Milliseconds of 8 layers by kind of kernel, on one GPU and on one of two."""
    columns = []
    for file in PROFILES.values():
        (row,) = rows(file)
        spent = dict.fromkeys((*_KINDS, "other kernels"), 0.0)
        for kernel in row["kernels"]:
            kind = next((kind for kind, begins in _KINDS.items() if kernel["name"].startswith(begins)), "other kernels")
            spent[kind] += kernel.get("us", kernel.get("microseconds")) / 1e3
        took = row.get("block_ms", row.get("tpot_ms"))
        columns.append([*(f"{ms:.2f}" if ms else "" for ms in spent.values()), f"{took:.2f}"])
    names = *_KINDS, "other kernels", "time without the profiler"
    return report.table(["ms", *PROFILES], list(zip(names, *columns, strict=True)))


def offload() -> str:
    """Decoding with keys and values in the host's memory, one row per case."""
    lines = []
    for row in rows("offload-h200.json"):
        if "tpot_ms" not in row:
            continue
        policy, mode, *rest = row["case"].split("@")
        lines.append(
            [
                f"`{policy}`",
                ", ".join(["on the device" if mode == "plain" else "on the host", *rest]),
                f"{row['tpot_ms']:.1f}",
                "" if row["hit_rate"] is None else f"{100 * row['hit_rate']:.1f} %",
                f"{row['bus_bytes_per_step'] / 1e6:,.0f} MB" if row["bus_bytes_per_step"] else "",
                f"{row['device_bytes'] / 1e9:.2f} GB",
            ]
        )
    heads = ["policy", "cache", "TPOT, ms", "hit rate", "over the bus per step", "cache on the device"]
    return report.table(heads, lines, "llr")


def _of_gpus(name: str) -> list[Row]:
    """Rows of a benchmark's files of both GPUs, with the GPU's name."""
    return [row | {"gpu": gpu.upper()} for gpu in ("h100", "h200") for row in rows(f"{name}-{gpu}.json")]


def public_calls() -> str:
    """TTFT, and TPOT where it was measured beside its bound, of public calls on one GPU, one row per program and case."""

    def bound(row: dict[str, Any]) -> str:
        found = row.get("bound_experts_read_ms") or row.get("bound_ms")
        return f"{found:.2f} ({row['tpot_ms'] / found:.2f} ×)" if found else ""

    measured = _of_gpus("first-token")
    lines = [
        [
            row["gpu"],
            row["program"],
            f"`{row['shape']}`" + ", experts in MXFP4" * (row.get("weights") == "mxfp4"),
            f"`{row['policy']}`",
            _case(row["prompt"], row["rows"]),
            f"{row['ttft_s']:.3f}",
            f"{row['tpot_ms']:.2f}" if "tpot_ms" in row else "",
            bound(row),
            str(len(row["calls_1"])),
        ]
        for row in measured
        if row.get("devices", 1) == 1
    ]
    return report.table(
        ["GPU", "program", "shape", "policy", "prompt × rows", "TTFT, s", "TPOT, ms", "bound, ms", "calls"],
        lines,
        "lllllr",
    )


def requests() -> str:
    """Many requests through a running batch: the latest measurement of each workload, GPU and policy."""
    measured = _of_gpus("throughput")
    latest = {(row["gpu"], row["workload"], row["program"], row["policy"]): row for row in measured}
    lines = [
        [
            row["gpu"],
            _workload(row),
            row["program"],
            f"`{row['policy']}`",
            str(row.get("rows", "")),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['seconds']:.1f}",
            f"{row['compile_s']:.0f}" if "compile_s" in row else "",
            f"{row['rows'] * row['row_bytes'] / 1e9:.1f} GB" if "row_bytes" in row else "",
        ]
        for row in (latest[case] for case in sorted(latest))
    ]
    heads = ["GPU", "requests", "program", "policy", "rows", "tokens/s", "time, s", "compilation, s", "caches"]
    return report.table(heads, lines, "llllr")


def serving() -> str:
    """A conclusion and a table: servers that got the same requests at the same times, on one machine."""
    measured = rows("serving-h200.json")

    def name(row: Row) -> str:
        return row["program"].partition(" ")[0]

    machines = {row["machine"] for row in measured}
    assert len(machines) == 1, f"servers of {len(machines)} machines are not compared"
    load = "prompt", "answer", "rate", "requests", "even", "seed"
    found = {(name(row), *(row[key] for key in load)): row["requests_per_second"] for row in measured}
    most = {case[1:3]: case[1:] for case in sorted(found, key=lambda case: case[3])}  # the highest rate of each size
    ratios = [
        f"{found['kvjax', *case] / found['vllm', *case]:.2f} times with {prompt:,} + {answer:,} tokens"
        for (prompt, answer), case in sorted(most.items())
    ]
    conclusion = f"**Requests per second beside vLLM's: {'; '.join(ratios)}.**"
    lines = [
        [
            f"{row['prompt']:,} + {row['answer']:,} tokens, {row['rate']:g}/s",
            f"`{row['program']}`",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['requests_per_second']:.2f}",
            f"{row['ttft_p50']:.3f}",
            f"{row['ttft_p99']:.3f}",
        ]
        for row in sorted(measured, key=lambda row: (row["prompt"], -row["rate"], name(row)))
    ]
    heads = ["requests", "server", "tokens/s", "requests/s", "TTFT, median, s", "TTFT, 99 %, s"]
    return f"{conclusion}\n\n{report.table(heads, lines, 'llr')}"


def grammars() -> str:
    """A conclusion and a table: tokens per second of the rows beside one with a grammar."""
    measured = rows("grammar-h200.json")
    lost = sorted(100 * row["lost"] for row in measured)
    conclusion = (
        f"**A row with a grammar costs the other rows {lost[0]:.1f} to {lost[-1]:.1f} % of their tokens per second.**"
    )
    lines = [
        [
            f"`{row['policy']}`",
            str(row["rows"] - row["grammars"]),
            f"{row['free_tokens_s']:,.0f}",
            f"{row['held_tokens_s']:,.0f}",
            f"{100 * row['lost']:.1f} %",
        ]
        for row in measured
    ]
    heads = ["policy", "other rows", "tokens per second", "beside a row with a grammar", "lost"]
    return f"{conclusion}\n\n{report.table(heads, lines, 'lr')}"


def prefixes() -> str:
    """A conclusion and a table: TTFT of a server's first request with a prefix, and the median once it is stored."""
    measured = sorted(rows("serving-prefix-h200.json"), key=lambda row: (row["shared"], row["seed"]))
    ratios: dict[int, list[float]] = {}
    for row in measured:
        ratios.setdefault(row["shared"], []).append(row["ttft_p50"] / row["ttft_first"])
    told = [f"{min(each):.2f} to {max(each):.2f} times with {shared:,} tokens" for shared, each in ratios.items()]
    conclusion = (
        f"**Time to the first token with a stored prefix beside that of the first request: {'; '.join(told)}.**"
    )
    lines = [
        [
            f"{row['shared']:,}",
            f"{row['ttft_first']:.3f}",
            f"{row['ttft_p50']:.3f}",
            f"{row['ttft_p50'] / row['ttft_first']:.2f}",
        ]
        for row in measured
    ]
    table = report.table(["shared tokens", "TTFT, first request, s", "TTFT, median, s", "ratio"], lines, "r")
    return f"{conclusion}\n\n{table}"


def soak() -> str:
    """What a server under load did, by check."""
    (row,) = rows("soak-cpu.json")
    counts = dict(row["requests"])
    forms = counts.pop("answered with JSON")
    told = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda each: -each[1]))
    lines = [
        ["requests", told],
        ["answers in JSON of a schema", f"{forms:,}"],
        ["answers other than an idle server's", str(len(row["wrong"]))],
        ["programs compiled once it was ready", f"{row['compiled']:.0f}"],
        ["memory of the process, first ten minutes", f"{row['memory_warm'] / 1e6:.1f} MB"],
        ["memory ten minutes later", f"{row['memory_end'] / 1e6:.1f} MB"],
        ["99 % of the calls of `/health`, at most", f"{1e3 * row['health_p99']:.0f} ms"],
        ["states taken back from host memory", f"{row['prefix_states_restored_total']:,.0f}"],
    ]
    return report.table([f"{row['seconds'] / 60:.0f} minutes", "found"], lines, "ll")


def _workload(row: Row) -> str:
    kind, size = row["workload"].split(maxsplit=1)
    if kind == "trace":
        return f"{size} of different lengths"
    count, prompt, answer = map(int, size.split(","))
    return f"{count} × ({prompt:,} + {answer:,}) tokens"


def rounds() -> str:
    """Decoding under policies that compress during decoding, one row per case."""
    lines = [
        [
            f"`{_name(row)}`",
            str(row["batch"]),
            f"{row['tpot_ms']:.2f}",
            f"{row['floor_ms']:.2f}",
            f"{row['times_floor']:.2f} ×",
            f"{row['cache_bytes'] / 1e9:.2f} GB",
        ]
        for row in rows("decode-rounds-h200.json")
    ]
    return report.table(["policy", "rows", "TPOT, ms", "bound, ms", "of bound", "cache"], lines)


def quantized_products() -> str:
    """How a v5e's compiler multiplies by low-bit weights, one row per matrix and kind."""
    measured = rows("quantized-products-v5e.json")
    first, *others = (str(count) for count in sorted({row["rows"] for row in measured}))
    found = {(row["matrix"], row["kind"], str(row["rows"])): row for row in measured}
    lines = []
    for matrix, kind in dict.fromkeys((row["matrix"], row["kind"]) for row in measured if row["kind"] != "bfloat16"):
        cells = []
        for count in (first, *others):
            row, plain = found[matrix, kind, count], found[matrix, "bfloat16", count]
            cells.append(f"{row['counted_bytes'] / plain['counted_bytes']:.2f}, {row['temporary_bytes'] / 1e6:.0f} MB")
            cells[-1] += ", floats first" if row["floats_first"] else ""
        lines.append([matrix, kind, *cells])
    return report.table(["matrix", "weights", f"rows: {first}", *others], lines, "llr")


def peers() -> str:
    """TPOT in milliseconds and TTFT in seconds of PyTorch programs beside kvjax, one row per length and batch."""
    theirs = [row for row in rows("decode-h200.json") if row["program"] != "kvjax" and "tpot_ms" in row]
    ours = {(_name(row), row["context"], row["batch"]): row for row in reversed(decoded("kvjax"))}
    prefills = {
        (row["context"], row["batch"]): row["ttft_s"]
        for row in decoded("kvjax")
        if row["policy"] == "full" and row["ttft_s"] is not None
    }
    lines = []
    for row in theirs:
        case = row["context"], row["batch"]
        mine = ours["full" if row["policy"] == "full" else "chunkkv:0.2", *case]["tpot_ms"]
        figures = f"{row['tpot_ms']:.1f}", f"{mine:.2f}", f"{row['tpot_ms'] / mine:.1f}", f"{row['ttft_s']:.2f}"
        lines.append([row["program"], row["policy"], _case(*case), *figures, f"{prefills[case]:.2f}"])
    heads = ["program", "policy", "case", "TPOT, ms", "kvjax", "ratio", "TTFT, s", "kvjax, full cache"]
    return report.table(heads, lines, "llr")


def kernels() -> str:
    """Time of every public kernel beside XLA and the best alternative, and as a fraction of the bandwidth bound."""
    files = "kernels-h200.json", "kernels-reading-h200.json", "kernels-groups-h200.json"
    measured = [row for name in files for row in rows(name) if hasattr(pallas_kernels, row["operation"])]
    operations = list(dict.fromkeys(row["operation"] for row in measured))
    measured.sort(key=lambda row: operations.index(row["operation"]))
    lines = []
    for case in dict.fromkeys((row["operation"], row["shape"], row["dtype"]) for row in measured):
        here = {
            row["implementation"]: row
            for row in measured
            if (row["operation"], row["shape"], row["dtype"]) == case
            and "microseconds" in row
            and not row["implementation"].startswith("gpu ")
        }
        ours, xla = here.pop("auto"), here.pop("xla")
        other = min(here.values(), key=lambda row: row["microseconds"], default=None)
        lines.append(
            [
                f"`{case[0]}`",
                *case[1:],
                f"{ours['microseconds']:.0f}",
                f"{xla['microseconds']:.0f}",
                f"{other['microseconds']:.0f} ({other['implementation']})" if other else "",
                f"{100 * ours['fraction_of_floor']:.0f} %",
            ]
        )
    return report.table(["operation", "shape", "dtype", "kvjax", "XLA", "other", "of bound"], lines, "lllr")


def _case(context: int, batch: int) -> str:
    return f"{context // 1024}k × {batch}"


def _name(row: Row) -> str:
    """A policy as it is given on the command line."""
    settings = (f"{value}" if name == "budget" else f"{name}={value}" for name, value in row["settings"].items())
    return ":".join(filter(None, [row["policy"], ",".join(settings)]))


def written(page: str) -> str:
    """A page whose generated parts are made again. Each follows a comment with its function's name, up to the next comment."""
    return re.sub(
        r"(<!-- (\w+): .*? -->\n).*?(?=<!--)",
        lambda found: f"{found[1]}\n{made}\n\n" if (made := globals()[found[2]]()) else found[1],
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        readme = RESULTS.parents[1] / "README.md"
        readme.write_text(written(readme.read_text(encoding="utf-8")), encoding="utf-8")
        sys.exit()
    print(
        memory(),
        speed(),
        first_token(),
        compression(),
        published(),
        long_texts(),
        blocks_and_whole(),
        fits(*FITS_8B),
        fits(*FITS_70B),
        weights(),
        several_devices(),
        profiles(),
        rounds(),
        offload(),
        quantized_products(),
        peers(),
        kernels(),
        sep="\n\n",
    )
