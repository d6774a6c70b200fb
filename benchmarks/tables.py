"""The tables of README.md and docs/, from the result files; `python -m benchmarks.tables` prints them."""

import json
from pathlib import Path
from typing import Any

from benchmarks import block_sizes
from kvjax import pallas_kernels
from kvjax.config import PRESETS
from kvjax.policies import policies

RESULTS = Path(__file__).parent / "results"

FITS_8B = "fits-v5e", "fits-v5e-2x2"
FITS_70B = "fits-llama-70b-v5p-2x2x1", "fits-llama-70b-v6e-2x4"
"""What the TPU compiler said of two shapes."""

BLOCK_SIZE_MODELS = "smollm2-135m", "qwen2.5-coder-1.5b"
"""Models that reading in blocks has been measured with."""


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a result file."""
    return json.loads((RESULTS / name).read_text())["rows"]


def provenance(*patterns: str) -> str:
    """Of each result file its device, versions and days, one row per file.

    Args:
        patterns: of names in `benchmarks/results`, without `.json`.
    """
    lines = ["| file | device | JAX, Python | rows | measured |", "| --- | --- | --- | ---: | --- |"]
    for pattern in patterns:
        found = sorted(RESULTS.glob(f"{pattern}.json"))
        if not found:
            raise ValueError(f"no file of {RESULTS} is named {pattern}.json")
        for file in found:
            header, measured = (json.loads(file.read_text(encoding="utf-8"))[key] for key in ("header", "rows"))
            days = sorted({row.get("date", header["date"])[:10] for row in measured})
            versions = f"{header['versions']['jax']}, {header['versions']['python']}"
            when = " to ".join(dict.fromkeys((days[0], days[-1])))
            chip = header.get("settings", {}).get("chip")  # of what was compiled without one
            device = f"{chip}, by its compiler" if chip else header["device"]
            lines.append(f"| `{file.name}` | {device} | {versions} | {len(measured)} | {when} |")
    return "\n".join(lines)


def perplexity() -> str:
    """Perplexity by part of the text, one row per policy."""
    measured = rows("streaming-perplexity-h200.json")
    parts = list(measured[0]["parts"])
    lines = [
        "| policy | " + " | ".join(f"{part.replace('-', ' to ')}" for part in parts) + " | all | cache |",
        "| --- |" + " ---: |" * (len(parts) + 2),
    ]
    for row in measured:
        cells = [f"{row['parts'][part]:.1f}" for part in parts]
        lines.append(
            f"| `{row['policy']}` | {' | '.join(cells)} | {row['perplexity']:.2f} | {row['cache_bytes'] / 1e6:.0f} MB |"
        )
    return "\n".join(lines)


def memory() -> str:
    """Bytes held by cache and program for few and many decoded tokens."""
    lines = ["| policy | new tokens | cache | decode program |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| `{row['policy']}` | {row['new_tokens']} | {row['cache_bytes']:,} B | {row['program_bytes']:,} B |"
        for row in rows("constant-memory.json")
    ]
    return "\n".join(lines)


def quality(measured: list[dict[str, Any]]) -> str:
    """Perplexity and agreement with the full cache, one row per policy, one column per budget; from rows of `policy_quality`."""
    budgets = sorted({row["budget"] for row in measured if row["budget"] is not None})
    lines = [
        "| policy | " + " | ".join(f"{100 * budget:g} %" for budget in budgets) + " |",
        "| --- |" + " ---: |" * len(budgets),
    ]
    for name in dict.fromkeys(row["policy"] for row in measured):
        cells = {row["budget"]: _quality_cell(row) for row in measured if row["policy"] == name}
        line = [cells.get(budget, cells.get(None, "")) for budget in budgets]  # without a budget: the same in all
        lines.append(f"| `{name}` | {' | '.join(line)} |")
    return "\n".join(lines)


def _quality_cell(row: dict[str, Any]) -> str:
    return f"{row['perplexity']:.2f}, {100 * row['agreement']:.1f} %, {row['cache_bytes'] / 1e6:.0f} MB"


def measured_quality() -> list[dict[str, Any]]:
    """Rows of the policies' comparison, which took several runs on the same texts."""
    runs = ("", "catekv-", "baselines-1-", "baselines-2-")
    found = [row for run in runs for row in rows(f"policy-quality-{run}h200.json")]
    return list({(row["policy"], row["budget"]): row for row in found}.values())


def quality_of(name: str) -> str:
    """What a method costs beside the full cache, one row per budget, and which others did better or worse; empty if not measured."""
    mine = [row for row in measured_quality() if row["policy"].split(",")[0] == name]
    if not mine:
        return ""
    lines = [
        "| budget | perplexity | top-1 token as the full cache's | cache |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in mine:
        budget = (
            f"{100 * row['budget']:g} %" if row["budget"] is not None else row["policy"].partition(", ")[2] or "any"
        )
        cells = f"{row['perplexity']:.2f}", f"{100 * row['agreement']:.1f} %", f"{row['cache_bytes'] / 1e6:.0f} MB"
        lines.append(f"| {budget} | {' | '.join(cells)} |")
    return "\n".join(lines)


def full_quality() -> str:
    """What the full cache has in the policies' comparison."""
    (row,) = (row for row in measured_quality() if row["policy"] == "full")
    return f"perplexity {row['perplexity']:.2f} and {row['cache_bytes'] / 1e6:.0f} MB"


def choices() -> str:
    """Agreement and bytes of every method at 25 %, and milliseconds per token of long and many rows, the nearest to the full cache first."""
    measured = [row for row in measured_quality() if row["budget"] in (0.25, None)]
    (full,) = (row for row in measured if row["policy"] == "full")
    fast = {
        row["policy"]: row["tpot_ms"]
        for row in reversed(_decoded("kvjax"))
        if (row["context"], row["batch"]) == (65536, 8) and len(row["settings"]) <= 1
    }
    lines = [
        "| policy | top-1 token as the full cache's | bytes, of the full cache's | TPOT, ms |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in sorted(measured, key=lambda row: -row["agreement"]):
        name, _, bits = row["policy"].partition(", ")
        shown, time = (
            f"`{name}`" + f", {bits}" * bool(bits),
            "" if bits else f"{fast[name]:.2f}" if name in fast else "",
        )
        share = 100 * row["cache_bytes"] / full["cache_bytes"]
        lines.append(f"| {shown} | {100 * row['agreement']:.1f} % | {share:.0f} % | {time} |")
    return "\n".join(lines)


def rivals_of(name: str, budget: float = 0.25) -> tuple[list[str], list[str]]:
    """Methods that agree more often with the full cache while they hold no more bytes, and those that agree less and hold no fewer.

    Args:
        budget: at which all that have one were measured; others count as they are.
    """
    rows = [row for row in measured_quality() if row["budget"] in (budget, None)]
    mine = [row for row in rows if row["policy"].split(",")[0] == name]
    better, worse = set[str](), set[str]()
    for row in rows:
        other = row["policy"]
        if not mine or other.split(",")[0] in (name, "full"):
            continue
        if all(row["agreement"] > me["agreement"] and row["cache_bytes"] <= me["cache_bytes"] for me in mine):
            better.add(other)
        if all(row["agreement"] < me["agreement"] and row["cache_bytes"] >= me["cache_bytes"] for me in mine):
            worse.add(other)
    return sorted(better), sorted(worse)


def needles_of(name: str) -> str:
    """What a method found in prompts that it read whole and in blocks, beside the full cache; empty if not measured."""
    found = {(row["policy"], row["block"]): row for row in rows("block-sizes-smollm2-135m-h200.json")}
    lines = ["| policy | read | unseen | seen | perplexity |", "| --- | --- | ---: | ---: | ---: |"]
    for policy in dict.fromkeys((name, "full")):
        for _, block in sorted(key for key in found if key[0] == policy and (policy == name or not key[1])):
            cells = block_sizes.cells(found[policy, block])
            lines.append(f"| `{policy}` | {f'in blocks of {block}' if block else 'whole'} | {' | '.join(cells)} |")
    return "\n".join(lines) if (name, 0) in found else ""


def speed_of(name: str) -> str:
    """A method's milliseconds per token beside the full cache's, by length and batch; empty if not measured."""
    measured = [row for row in _decoded("kvjax") if row["policy"] == name and row["batch"] in (1, 8)]
    full = {
        (row["context"], row["batch"]): row["tpot_ms"] for row in reversed(_decoded("kvjax")) if row["policy"] == "full"
    }
    lines = ["| policy | context × batch | TPOT, ms | full cache |", "| --- | ---: | ---: | ---: |"]
    for key in dict.fromkeys((_name(row), row["context"], row["batch"]) for row in measured):
        row = next(row for row in measured if (_name(row), row["context"], row["batch"]) == key)
        if key[1:] in full:
            lines.append(f"| `{key[0]}` | {key[1] // 1024}k × {key[2]} | {row['tpot_ms']:.2f} | {full[key[1:]]:.2f} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def speed() -> str:
    """Milliseconds per output token (TPOT) and how many times the floor that is; one row per policy, one column per length and batch."""
    measured = [row for row in _decoded("kvjax") if row["batch"] in (1, 8) and row["context"] <= 65536]
    cases = sorted({(row["batch"], row["context"]) for row in measured})
    lines = [
        "| policy | " + " | ".join(f"{context // 1024}k × {batch}" for batch, context in cases) + " |",
        "| --- |" + " ---: |" * len(cases),
    ]
    for name in dict.fromkeys(map(_name, measured)):
        here = {(row["batch"], row["context"]): row for row in reversed(measured) if _name(row) == name}
        cells = [
            f"{row['tpot_ms']:.2f} ({row['times_floor']:.2f})" if (row := here.get(case)) else "" for case in cases
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def first_token() -> str:
    """Time to first token (TTFT) in seconds, and what compression adds to the full cache's; one row per policy, one column per length."""
    measured = [row for row in _decoded("kvjax") if row["ttft_s"] is not None and row["batch"] == 1]
    full = {row["context"]: row["ttft_s"] for row in measured if row["policy"] == "full"}
    contexts = sorted({row["context"] for row in measured if row["policy"] != "full"})
    lines = [
        "| policy | " + " | ".join(f"{context // 1024}k" for context in contexts) + " |",
        "| --- |" + " ---: |" * len(contexts),
    ]
    for name in dict.fromkeys(map(_name, measured)):
        here = {row["context"]: row["ttft_s"] for row in measured if _name(row) == name}
        cells = []
        for context in contexts:
            seconds, plain = here.get(context), full[context]
            added = "" if seconds is None or name == "full" else f" ({100 * (seconds / plain - 1):+.1f} %)"
            cells.append("" if seconds is None else f"{seconds:.3f}{added}")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def compression() -> str:
    """Milliseconds that a policy works on a prompt in all layers, apart from the model; their share of the full cache's TTFT."""
    measured = [row for row in _decoded("kvjax") if row.get("compression_s") is not None and row["batch"] == 1]
    full = {row["context"]: row["ttft_s"] for row in measured if row["policy"] == "full"}
    contexts = sorted({row["context"] for row in measured if row["policy"] != "full"})
    lines = [
        "| policy | " + " | ".join(f"{context // 1024}k" for context in contexts) + " |",
        "| --- |" + " ---: |" * len(contexts),
    ]
    for name in dict.fromkeys(map(_name, measured)):
        here = {row["context"]: row["compression_s"] for row in measured if _name(row) == name}
        cells = [
            f"{1e3 * taken:.1f} ({100 * taken / full[context]:.1f} %)" if (taken := here.get(context)) else ""
            for context in contexts
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def published() -> str:
    """What the papers report for their methods against the full cache, beside the same ratio here."""
    measured = _decoded("kvjax")
    sparser = "catekv:eta=0.7,share_adaptive=0.3"
    lines = ["| method | ratio | paper | here |", "| --- | --- | ---: | --- |"]

    def add(
        method: str, what: str, paper: str, names: tuple[str, str], context: int, *measures: tuple[Any, str]
    ) -> None:
        cells = []
        for batch, measure in measures:
            rows_of = [row for name in names if (row := _first(measured, name, context, batch, measure))]
            if len(rows_of) == len(names):
                most = {row["batch_run"] for row in rows_of}
                ratio = rows_of[0][measure] / rows_of[1][measure]
                ratio = 1 / ratio if measure == "tokens_per_s" else ratio
                said = f"batch {' and '.join(map(str, sorted(most)))}"
                if measure == "tpot_ms":
                    said += f"; floors {rows_of[0]['floor_ms'] / rows_of[1]['floor_ms']:.2f}"
                cells.append(f"{ratio:.2f} ({said})")
        lines.append(f"| {method} | {what} | {paper} | {', '.join(cells) or 'not measured'} |")

    add("Chelsea, 20 %", "TPOT, 64k", "3.19", ("full", "chelsea:0.2"), 65536, (1, "tpot_ms"), (8, "tpot_ms"))
    add("Chelsea, 20 %", "throughput, 64k", "", ("full", "chelsea:0.2"), 65536, ("largest", "tokens_per_s"))
    add("ClusterKV, 1024", "TPOT, 32k", "2", ("full", "clusterkv:1024"), 32768, (1, "tpot_ms"), (8, "tpot_ms"))
    add("ClusterKV, 1024", "throughput, 32k", "2.5", ("full", "clusterkv:1024"), 32768, ("largest", "tokens_per_s"))
    add("CateKV, r = 0.3, η = 0.7", "memory, 500k", "2.72", ("full", sparser), 512000, (1, "peak_bytes"))
    add("CateKV, r = 0.3, η = 0.7", "TPOT, 500k", "2.18", ("full", sparser), 512000, (1, "tpot_ms"))
    add("CateKV, r = 0.3, η = 0.7", "throughput, 40k", "3.96", ("full", sparser), 40960, ("largest", "tokens_per_s"))
    for context in (32768, 65536):
        add(
            "ChunkKV, index reuse 2",
            f"compression, {context // 1024}k, without over with",
            "",
            ("chunkkv:0.2", "chunkkv:0.2,reuse=2"),
            context,
            (1, "compression_s"),
        )
    return "\n".join(lines)


def _first(rows: list[dict[str, Any]], name: str, context: int, batch: Any, measure: str) -> dict[str, Any] | None:
    """The first of the rows of a case that has this measure: not all have read a prompt."""
    case = name, context, batch
    found = (row for row in rows if (_name(row), row["context"], row["batch"]) == case and row.get(measure) is not None)
    return next(found, None)


def long_texts() -> str:
    """How fast texts are read in blocks, one row per policy, and what memory that takes."""
    lines = [
        "| policy | read | seconds | by arithmetic | tokens/s | cache | reading | most in use | full cache |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    order, c = list(policies()), PRESETS["llama-3.1-8b"]
    per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 2  # keys and values, two bytes each
    for row in sorted(
        rows("long-context-h200.json"),
        key=lambda row: (row["tokens_read"] > 2_000_000, row["settings"]["budget"], order.index(row["policy"])),
    ):
        held = "cache_bytes", "program_bytes", "peak_bytes"
        cells = [
            f"`{_name(row)}`",
            f"{row['tokens_read']:,}",
            f"{row['seconds']:.1f}",
            f"{row['ideal_seconds']:.1f}",
            f"{row['tokens_read'] / row['seconds']:,.0f}",
            *(f"{row[each] / 1e9:.1f} GB" for each in held),
            f"{per_token * row['tokens_read'] / 1e9:.1f} GB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def blocks_and_whole() -> str:
    """Seconds that prompts take in blocks and at once."""
    lines = ["| policy | tokens | block | seconds | most in use |", "| --- | ---: | ---: | ---: | ---: |"]
    for name in ("64k-full", "64k", "128k"):
        lines += [
            f"| `{_name(row)}` | {row['tokens_read']:,} | {row['block'] or 'the whole prompt'} | {row['seconds']:.2f} | "
            f"{row['peak_bytes'] / 1e9:.1f} GB |"
            for row in rows(f"long-context-{name}-h200.json")
        ]
    return "\n".join(lines)


def reading_in_blocks(model: str) -> str:
    """What was found and perplexity by size of blocks, one row per policy, and who loses by blocks of 2048.

    Args:
        model: as the names of result files have it.
    """
    return block_sizes.tables(rows(f"block-sizes-{model}-h200.json"))


def fits(*names: str) -> str:
    """What a model with 128k tokens takes of TPU chips, by weights and policy.

    Args:
        names: of result files.
    """
    lines = [
        "| chips | layers in, embedding in | policy | weights | cache | reading | decoding |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name in names:
        settings = json.loads((RESULTS / f"{name}.json").read_text())["header"]["settings"]
        for row in rows(f"{name}.json"):
            kinds = [settings["dtype"] if kind == "float" else kind for kind in (row["weights"], row["embedding"])]
            sizes = (row[f"{what}_bytes"] / 1e9 for what in ("weight", "cache", "prefill", "decode"))
            policy = f"{row['policy']}:{row['settings']['budget']}"
            cells = [settings["chip"], ", ".join(kinds), f"`{policy}`", *(f"{size:.1f} GB" for size in sizes)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def weights() -> str:
    """Prefill and decoding with weights in 8 and 4 bits, one row per kind; by calls from the fastest to the slowest."""
    lines = [
        "| weights, embedding and head among them | TTFT, s | TPOT, ms | by calls | floor, ms | peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows("decode-weights-h200.json"):
        kind = row["dtype"] if row["weights"] == "float" else row["weights"]
        calls = row["tpot_all_ms"][1:]
        lines.append(
            f"| `{kind}` | {row['ttft_s']:.2f} | {row['tpot_ms']:.1f} | {min(calls):.1f} to {max(calls):.1f} "
            f"| {row['floor_ms']:.2f} | {row['peak_bytes'] / 1e9:.1f} GB |"
        )
    return "\n".join(lines)


def several_devices() -> str:
    """Decoding over two GPUs, one row per case."""
    lines = [
        "| shape | policy | tokens × rows | mesh | TPOT, ms | tokens/s | of floor | cache per device |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows("decode-two-h200.json"):
        how = ", ".join([row["mesh"] or "one GPU", *row["program"].split(", ")[1:]])
        lines.append(
            f"| {row['shape']} | `{_name(row)}` | {row['context']:,} × {row['batch']} | {how} | {row['tpot_ms']:.2f} "
            f"| {row['tokens_per_s']:.0f} | {row['times_floor']:.2f} × | {row['cache_bytes'] / 1e9:.1f} GB |"
        )
    return "\n".join(lines)


PROFILES = {
    "a step, one GPU": "timeline-decode-one-h200.json",
    "a step, two": "timeline-decode-two-h200.json",
    "a block, one GPU": "timeline-read-one-h200.json",
    "a block, two": "timeline-read-two-h200.json",
}
"""Columns of `profiles`."""

_KINDS = {
    "matrices": ("nvjet", "projection", "fused_decode_block"),
    "attention": ("decode_attention", "body_mosaic_gpu_kernel"),
    "sums over devices": ("nccl",),
}
"""What kernels' names begin with, by what they do."""


def profiles() -> str:
    """Milliseconds of 8 layers that a GPU spends on what, by itself and as one of two."""
    columns = []
    for file in PROFILES.values():
        (row,) = rows(file)
        spent = dict.fromkeys((*_KINDS, "other kernels"), 0.0)
        for kernel in row["kernels"]:
            kind = next((kind for kind, begins in _KINDS.items() if kernel["name"].startswith(begins)), "other kernels")
            spent[kind] += kernel.get("us", kernel.get("microseconds")) / 1e3
        took = row.get("block_ms", row.get("tpot_ms"))
        columns.append([*(f"{ms:.2f}" if ms else "" for ms in spent.values()), f"{took:.2f}"])
    lines = [f"| ms | {' | '.join(PROFILES)} |", f"| --- |{' ---: |' * len(PROFILES)}"]
    names = *_KINDS, "other kernels", "time without the profiler"
    return "\n".join(
        [*lines, *(f"| {name} | {' | '.join(cells)} |" for name, *cells in zip(names, *columns, strict=True))]
    )


def offload() -> str:
    """What it costs to keep keys and values in the host's memory, one row per case."""
    lines = [
        "| policy | cache | TPOT, ms | hit rate | over the bus per step | cache on the device |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows("offload-h200.json"):
        if "tpot_ms" not in row:
            continue
        policy, mode, *rest = row["case"].split("@")
        how = ", ".join(["on the device" if mode == "plain" else "on the host", *rest])
        hits = "" if row["hit_rate"] is None else f"{100 * row['hit_rate']:.1f} %"
        bus = f"{row['bus_bytes_per_step'] / 1e6:,.0f} MB" if row["bus_bytes_per_step"] else ""
        lines.append(
            f"| `{policy}` | {how} | {row['tpot_ms']:.1f} | {hits} | {bus} | {row['device_bytes'] / 1e9:.2f} GB |"
        )
    return "\n".join(lines)


def rounds() -> str:
    """Decoding under policies that compress while a model reasons, one row per case."""
    lines = [
        "| policy | rows | TPOT, ms | floor, ms | of floor | cache |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows("decode-rounds-h200.json"):
        lines.append(
            f"| `{_name(row)}` | {row['batch']} | {row['tpot_ms']:.2f} | {row['floor_ms']:.2f} | {row['times_floor']:.2f} × | "
            f"{row['cache_bytes'] / 1e9:.2f} GB |"
        )
    return "\n".join(lines)


def quantized_products() -> str:
    """What a v5e's compiler makes of products with weights in few bits, one row per matrix and kind."""
    measured = rows("quantized-products-v5e.json")
    counts = sorted({row["rows"] for row in measured})
    lines = [
        f"| matrix | weights | rows: {' | '.join(map(str, counts))} |",
        f"| --- | --- | {' | '.join('---:' for _ in counts)} |",
    ]
    found = {(row["matrix"], row["kind"], row["rows"]): row for row in measured}
    for matrix, kind in dict.fromkeys((row["matrix"], row["kind"]) for row in measured if row["kind"] != "bfloat16"):
        cells = []
        for count in counts:
            row, plain = found[matrix, kind, count], found[matrix, "bfloat16", count]
            cells.append(f"{row['counted_bytes'] / plain['counted_bytes']:.2f}, {row['temporary_bytes'] / 1e6:.0f} MB")
            cells[-1] += ", floats first" if row["floats_first"] else ""
        lines.append(f"| {matrix} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def peers() -> str:
    """TPOT in ms and TTFT in seconds of PyTorch's programs beside kvjax, one row per length and batch."""
    theirs = [row for row in rows("decode-h200.json") if row["program"] != "kvjax" and "tpot_ms" in row]
    ours = {(_name(row), row["context"], row["batch"]): row for row in reversed(_decoded("kvjax"))}
    full_prefills = {
        (row["context"], row["batch"]): row["ttft_s"]
        for row in _decoded("kvjax")
        if row["policy"] == "full" and row["ttft_s"] is not None
    }
    lines = [
        "| program | policy | case | TPOT, ms | kvjax | ratio | TTFT, s | kvjax, full cache |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in theirs:
        case = row["context"], row["batch"]
        mine = ours["full" if row["policy"] == "full" else "chunkkv:0.2", *case]["tpot_ms"]
        lines.append(
            f"| {row['program']} | {row['policy']} | {case[0] // 1024}k × {case[1]} | {row['tpot_ms']:.1f} | {mine:.2f} | "
            f"{row['tpot_ms'] / mine:.1f} | {row['ttft_s']:.2f} | {full_prefills[case]:.2f} |"
        )
    return "\n".join(lines)


def _decoded(program: str) -> list[dict[str, Any]]:
    """Rows of a program in the decode benchmark that were measured."""
    return [row for row in rows("decode-h200.json") if row["program"] == program and "tpot_ms" in row]


def _name(row: dict[str, Any]) -> str:
    """A policy as the benchmark's command line has it."""
    return ":".join(filter(None, [row["policy"], ",".join(_setting(*item) for item in row["settings"].items())]))


def _setting(name: str, value: Any) -> str:
    return f"{value}" if name == "budget" else f"{name}={value}"


def kernels() -> str:
    """Times of every public kernel beside XLA and the best other one, and how near it is to its floor."""
    files = "kernels-h200.json", "kernels-reading-h200.json"
    measured = [row for name in files for row in rows(name) if hasattr(pallas_kernels, row["operation"])]
    lines = [
        "| operation | shape | dtype | kvjax | XLA | other | of floor |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
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
        best = f"{other['microseconds']:.0f} ({other['implementation']})" if other else ""
        times = (
            f"{ours['microseconds']:.0f} | {xla['microseconds']:.0f} | {best} | {100 * ours['fraction_of_floor']:.0f} %"
        )
        lines.append(f"| `{case[0]}` | {case[1]} | {case[2]} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(
        perplexity(),
        memory(),
        quality(measured_quality()),
        speed(),
        first_token(),
        compression(),
        published(),
        long_texts(),
        blocks_and_whole(),
        *map(reading_in_blocks, BLOCK_SIZE_MODELS),
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
