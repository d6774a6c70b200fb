"""TreeKV (He et al. 2025), Table 3: LongBench, whose prompts go through the tree in blocks of tokens."""

from functools import partial

from kvjax.policies import H2O, Policy, SnapKV, StreamingLLM, TreeKV

from . import papers_tasks
from .bench import FULL, Bench, scored
from .claim import Claim, Measured, Row

TITLE = "TreeKV: LongBench"

ABOUT = """\
Three tasks of LongBench, scored by its own metrics, question-aware. TreeKV passes a prompt through its tree in blocks of tokens (section 4.2).
All methods have the same number of slots; SnapKV also keeps new tokens. H2O sums the attention of all queries of the prompt."""

SIZES = (1024, 2048)
SETTING = "16 tasks of LongBench up to 32k tokens, Llama-3.2-1B-Instruct, caches of 2048 and 8192"


def place(size: int) -> str:
    """What rows call a size of the cache."""
    return f"cache of {size}"


claim = partial(Claim, own="LongBench", measure="LongBench score", setting=SETTING)

CLAIMS = tuple(
    each
    for size in SIZES
    for each in (
        claim(
            f"With {size} slots TreeKV is better than H2O and SnapKV",
            "Table 3",
            "on average by 0.74 over H2O and 0.48 over SnapKV",
            method="treekv",
            others=("h2o", "snapkv"),
            at=place(size),
        ),
        claim(
            f"With {size} slots it falls short of full attention",
            "Table 3",
            "it did not surpass it",
            method=FULL,
            others=("treekv",),
            at=place(size),
        ),
    )
)


def measure(bench: Bench) -> Measured:
    """All tasks under each method at each size."""
    tasks, rows = papers_tasks.longbench(bench), list[Row]()
    for size in (128,) if bench.small else SIZES:
        methods: dict[str, Policy] = {
            "treekv": TreeKV(budget=size),
            "h2o": H2O(budget=size),
            "snapkv": SnapKV(budget=size),
            "streaming_llm": StreamingLLM(budget=size),
        }
        rows += scored(bench, methods, tasks, "LongBench score", place(size))
    return Measured({"tasks": ", ".join(tasks), "tokens": "up to 8192"}, rows)
