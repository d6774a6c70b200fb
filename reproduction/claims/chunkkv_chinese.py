"""ChunkKV (Liu et al. 2025), Tables 6 and 10: LongBench's Chinese tasks."""

from functools import partial

from . import chunkkv_methods, papers_tasks
from .bench import Bench, scored
from .chunkkv_methods import chunks
from .claim import Claim, Measured

TITLE = "ChunkKV: Chinese tasks"

ABOUT = """\
Two Chinese tasks of LongBench. 768 tokens of the prompt, about a tenth, are kept, question-aware."""

PLACE = "Chinese tasks, 10 % of the prompt"

claim = partial(Claim, own="LongBench", measure="LongBench score", at=PLACE)

CLAIMS = (
    claim(
        "It is better than SnapKV and H2O in Chinese",
        "appendix B",
        "better than both (Qwen2-7B-Instruct)",
        method="chunkkv",
        others=("snapkv", "h2o"),
    ),
    *(
        claim(
            f"Chunks of {size} do about as well as chunks of 10",
            "Tables 10 and 19, section 4.4",
            "stable from 5 to 20; the margin is ours",
            method=chunks(size),
            others=("chunkkv",),
            margin=-0.02,
        )
        for size in (5, 20)
    ),
)


def measure(bench: Bench) -> Measured:
    """Both tasks under each method, with a budget in tokens."""
    budget, window = 768, 32
    methods = chunkkv_methods.variants(budget, window) | chunkkv_methods.others(budget, window)
    names = ("chunkkv", "snapkv") if bench.small else ("chunkkv", "snapkv", "h2o", "streaming_llm")
    asked = {name: methods[name] for name in (*names, chunks(5), chunks(20))}
    tasks = papers_tasks.longbench(bench, papers_tasks.LONGBENCH[:2])
    return Measured({"slots": budget, "window": window}, scored(bench, asked, tasks, "LongBench score", PLACE))
