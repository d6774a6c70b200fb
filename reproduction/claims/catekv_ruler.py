"""CateKV (Jiang et al. 2025), Tables 1 and 6: RULER, beside StreamingLLM, SnapKV, Quest and ShadowKV."""

from functools import partial

from kvjax.calibration.catekv import Settings, adaptive_by_sample, head_scores, vote
from kvjax.policies import CateKV, Policy, Quest, ShadowKV, SnapKV, StreamingLLM

from . import papers_tasks
from .bench import FULL, Bench, scored
from .claim import Claim, Measured, Row

TITLE = "CateKV: RULER"

ABOUT = """\
RULER's retrieval, tracking and counting at three lengths, question-aware. A share of 0.4 of the KV heads keeps everything, the others keep a sixteenth
of the prompt. In every head, StreamingLLM and SnapKV keep as many tokens as CateKV keeps on average. Quest and ShadowKV attend to a sixteenth;
their combinations with CateKV do so in the adaptive heads only. Head types
are calibrated as in the paper: on RULER's variable tracking at the tested length, with other examples."""

LENGTHS = (8192, 16384, 32768)
SETTING = "12 tasks of RULER at 128k tokens, Llama-3-8B-1M, 41 % of the cache"
TABLE_6 = "12 tasks of RULER at 128k tokens, Llama-3-8B-1M; each query attends to 1.6 % of the tokens"


def place(length: int) -> str:
    """What rows call a length."""
    return f"{length} tokens"


claim = partial(Claim, own="RULER", measure="RULER score", setting=SETTING)

CLAIMS = tuple(
    each
    for length in LENGTHS
    for each in (
        claim(
            f"At {length} tokens CateKV is comparable with full attention",
            "Table 1",
            "84.61; full 84.10; the margin is ours",
            method="catekv",
            others=(FULL,),
            at=place(length),
            margin=-0.02,
        ),
        claim(
            f"At {length} tokens it is better than StreamingLLM and SnapKV of the same size",
            "Table 1",
            "84.61; StreamingLLM 47.34, SnapKV 83.28",
            method="catekv",
            others=("streaming_llm", "snapkv"),
            at=place(length),
        ),
        *(
            claim(
                f"At {length} tokens CateKV with {title} comes near {title} alone",
                "Table 6",
                f"{paper}; the margin is ours",
                method=f"catekv with {other}",
                others=(other,),
                at=place(length),
                margin=-0.02,
                setting=TABLE_6,
            )
            for other, title, paper in (
                ("quest", "Quest", "81.21; Quest 81.31"),
                ("shadowkv", "ShadowKV", "81.86; ShadowKV 82.18"),
            )
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
            "catekv with quest": CateKV(budget=budget, profile=labels, adaptive=Quest(budget=budget)),
            "catekv with shadowkv": CateKV(budget=budget, profile=labels, adaptive=ShadowKV(budget=budget)),
        }
        rows += scored(bench, methods, papers_tasks.tracking(bench, length), "RULER score", place(length))
    return Measured({"samples of each task": 2 if bench.small else 20, "r": 0.4}, rows)
