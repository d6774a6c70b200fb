"""CateKV (Jiang et al. 2025), Tables 1 and 6: RULER, beside StreamingLLM, SnapKV, Quest and ShadowKV."""

from functools import partial

from kvjax.calibration.catekv import Settings, adaptive_by_sample, head_scores, vote
from kvjax.policies import CateKV, Policy, Quest, ShadowKV, SnapKV, StreamingLLM

from . import papers_tasks
from .bench import FULL, Bench, scored
from .claim import Claim, Measured, Row

TITLE = "CateKV: RULER"

ABOUT = """\
RULER's retrieval, tracking and counting at three lengths. A share of 0.4 of the KV heads keeps everything, the others a
sixteenth of the prompt; StreamingLLM and SnapKV keep as much in all heads as CateKV does on average; Quest and
ShadowKV keep everything and read a sixteenth. Policies see the question. Heads are told apart as in the paper: on RULER's
variable tracking at the length that is tested, other examples than those."""

LENGTHS = (8192, 16384, 32768)
SETTING = "12 tasks of RULER at 128k tokens, Llama-3-8B-1M, 41 % of the cache"


def place(length: int) -> str:
    """What rows call a length."""
    return f"RULER at {length}"


claim = partial(Claim, own="RULER", measure="RULER score", method="catekv")

CLAIMS = tuple(
    each
    for length in LENGTHS
    for each in (
        claim(
            f"At {length} tokens CateKV is comparable with full attention",
            "Table 1",
            f"84.61; full 84.10 ({SETTING}); the margin is this page's",
            others=(FULL,),
            at=place(length),
            margin=-0.02,
        ),
        claim(
            f"At {length} tokens it is better than StreamingLLM and SnapKV of the same size",
            "Table 1",
            f"84.61; StreamingLLM 47.34, SnapKV 83.28 ({SETTING})",
            others=("streaming_llm", "snapkv"),
            at=place(length),
        ),
        claim(
            f"At {length} tokens it comes near Quest and ShadowKV",
            "Table 6",
            "comparable (RULER; the table itself was not at hand); the margin is this page's",
            others=("quest", "shadowkv"),
            at=place(length),
            margin=-0.02,
        ),
    )
)


def measure(bench: Bench) -> Measured:
    """Five tasks under each method at each length."""
    rows = list[Row]()
    for length in (2048,) if bench.small else LENGTHS:
        scores = head_scores(bench.params, papers_tasks.calibration(bench, length), Settings())
        labels = vote(adaptive_by_sample(scores, 0.4), 0.4)
        budget, same = max(length // 16, 64), round(length * (0.4 + 0.6 / 16))
        methods: dict[str, Policy] = {
            "catekv": CateKV(budget=budget, profile=labels),
            "streaming_llm": StreamingLLM(budget=same),
            "snapkv": SnapKV(budget=same),
            "quest": Quest(budget=budget),
            "shadowkv": ShadowKV(budget=budget),
        }
        rows += scored(bench, methods, papers_tasks.tracking(bench, length), "RULER score", place(length))
    return Measured({"samples of each task": 2 if bench.small else 20, "r": 0.4}, rows)
