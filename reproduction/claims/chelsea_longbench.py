"""Chelsea (Hu et al. 2025), Table 2, Figure 4 and Table 4: LongBench at caches of 12.5 to 80 %, and by chunk size."""

from functools import partial

from kvjax.policies import CaM, Chelsea, Policy, SnapKV, StreamingLLM

from . import papers_tasks
from .bench import Bench, scored
from .claim import Claim, Measured, Row

TITLE = "Chelsea: LongBench"

ABOUT = """\
Three tasks of LongBench, scored by its own metrics, question-aware. All methods may keep the same share of all tokens."""

SHARES = (0.125, 0.2, 0.5, 0.8)
SIZES = (16, 64)
BASELINES = ("snapkv", "streaming_llm", "cam")


def place(share: float) -> str:
    """What rows call a share of the cache."""
    return f"cache of {100 * share:g} %"


PAPER = (
    ("Figure 4", "a figure: above all three at every share (LongBench, Llama-2-7B-32K)"),
    ("Table 2", "39.94; SnapKV 38.21, StreamingLLM 32.10, CaM 32.04 (14 tasks of LongBench, Qwen2-7B-Instruct)"),
)
"""What the paper reports at other shares than 20 %, and at 20 %."""

claim = partial(Claim, own="LongBench", measure="LongBench score")

CLAIMS = (
    *(
        claim(
            f"At {100 * share:g} % Chelsea is better than SnapKV, StreamingLLM and CaM",
            *PAPER[share == 0.2],
            method="chelsea",
            others=BASELINES,
            at=place(share),
        )
        for share in SHARES
    ),
    *(
        claim(
            f"Chunks of {size} do about as well as chunks of 256",
            "Table 4",
            "41.83 with 16, 42.68 with 64, 42.54 with 256 (LongBench, 20 %); the margin is ours",
            method=f"chelsea, chunks of {size}",
            others=("chelsea",),
            at=place(0.2),
            margin=-0.02,
        )
        for size in SIZES
    ),
    claim(
        "It is better with outlier heads, which keep everything, than without",
        "Tables 5 and 11",
        "38.97; without 36.46 (8 tasks of LongBench, Llama-2-7B-32K)",
        method="chelsea",
        others=("chelsea without outlier heads",),
        at=place(0.2),
    ),
)


def measure(bench: Bench) -> Measured:
    """All tasks under each method at each share."""
    tasks, rows = papers_tasks.longbench(bench), list[Row]()
    for share in SHARES[1:2] if bench.small else SHARES:
        methods: dict[str, Policy] = {
            "chelsea": Chelsea(budget=share),
            "snapkv": SnapKV(budget=share),
            "streaming_llm": StreamingLLM(budget=share),
            "cam": CaM(budget=share),
        }
        if share == 0.2:
            methods |= {f"chelsea, chunks of {size}": Chelsea(budget=share, chunk=size) for size in SIZES}
            methods["chelsea without outlier heads"] = Chelsea(budget=share, outliers=False)
        rows += scored(bench, methods, tasks, "LongBench score", place(share))
    return Measured({"tasks": ", ".join(tasks), "tokens": "up to 8192"}, rows)
