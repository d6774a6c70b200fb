"""ChunkKV (Liu et al. 2025), Tables 5, 6 and 14: GSM8K, and LongBench's Chinese tasks."""

from functools import partial

from . import chunkkv_methods, papers_tasks
from .bench import Bench, scored
from .chunkkv_methods import chunks, reusing
from .claim import Claim, Measured

TITLE = "ChunkKV: GSM8K and Chinese tasks"

ABOUT = """\
Problems of GSM8K after eight solved examples, and two Chinese tasks of LongBench. A tenth of the prompt is kept, question-aware."""

GSM, CHINESE = "10 % of the prompt", "Chinese tasks, 10 % of the prompt"

gsm8k = partial(Claim, own="GSM8K", measure="GSM8K accuracy", at=GSM)
longbench = partial(Claim, own="LongBench", measure="LongBench score", at=CHINESE)

CLAIMS = (
    gsm8k(
        "It solves more problems than SnapKV, H2O and StreamingLLM",
        "section 4.1",
        "better than all three (LLaMA-3-8B-Instruct and others)",
        method="chunkkv",
        others=("snapkv", "h2o", "streaming_llm"),
    ),
    gsm8k(
        "Sharing indices between two layers costs nothing",
        "Table 14, section 4.3",
        "no loss on GSM8K; the margin is ours",
        method=reusing(2),
        others=("chunkkv",),
        margin=-0.02,
    ),
    longbench(
        "It is better than SnapKV and H2O in Chinese",
        "appendix B",
        "better than both (Qwen2-7B-Instruct)",
        method="chunkkv",
        others=("snapkv", "h2o"),
    ),
    *(
        longbench(
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
    """GSM8K and the Chinese tasks, with budgets in tokens: a tenth of their prompts."""
    gsm, chinese = papers_tasks.gsm8k(bench), papers_tasks.longbench(bench, papers_tasks.LONGBENCH[:2])
    window = 32
    few = chunkkv_methods.variants(128, window) | chunkkv_methods.others(128, window)
    some = chunkkv_methods.variants(768, window) | chunkkv_methods.others(768, window)
    names = ("chunkkv", "snapkv", "h2o", "streaming_llm")
    if bench.small:
        names = names[:2]
    reused = {name: few[name] for name in (*names, reusing(2))}
    sized = {name: some[name] for name in (*names, chunks(5), chunks(20))}
    settings = {"slots": "128 and 768", "window": window}
    return Measured(
        settings,
        [
            *scored(bench, reused, gsm, "GSM8K accuracy", GSM, batch=16),
            *scored(bench, sized, chinese, "LongBench score", CHINESE),
        ],
    )
