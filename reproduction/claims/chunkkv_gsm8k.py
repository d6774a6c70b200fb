"""ChunkKV (Liu et al. 2025), Tables 5 and 14: GSM8K."""

from functools import partial

from . import chunkkv_methods, papers_tasks
from .bench import Bench, scored
from .chunkkv_methods import reusing
from .claim import Claim, Measured

TITLE = "ChunkKV: GSM8K"

ABOUT = """\
Problems of GSM8K after eight solved examples. 128 tokens of the prompt, about a tenth, are kept, question-aware."""

PLACE = "10 % of the prompt"

claim = partial(Claim, own="GSM8K", measure="GSM8K accuracy", at=PLACE)

CLAIMS = (
    claim(
        "It solves more problems than SnapKV, H2O and StreamingLLM",
        "section 4.1",
        "better than all three (LLaMA-3-8B-Instruct and others)",
        method="chunkkv",
        others=("snapkv", "h2o", "streaming_llm"),
    ),
    claim(
        "Sharing indices between two layers costs nothing",
        "Table 14, section 4.3",
        "no loss on GSM8K; the margin is ours",
        method=reusing(2),
        others=("chunkkv",),
        margin=-0.02,
    ),
)


def measure(bench: Bench) -> Measured:
    """All problems under each method, with a budget in tokens."""
    budget, window = 128, 32
    methods = chunkkv_methods.variants(budget, window) | chunkkv_methods.others(budget, window)
    names = ("chunkkv", "snapkv") if bench.small else ("chunkkv", "snapkv", "h2o", "streaming_llm")
    asked = {name: methods[name] for name in (*names, reusing(2))}
    rows = scored(bench, asked, papers_tasks.gsm8k(bench), "GSM8K accuracy", PLACE, batch=16)
    return Measured({"slots": budget, "window": window}, rows)
