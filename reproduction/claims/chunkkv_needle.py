"""ChunkKV (Liu et al. 2025), Tables 7 and 10, Figure 16: needles in a haystack, by method, chunk size and index reuse."""

from functools import partial

from . import chunkkv_methods
from .bench import Bench, needles
from .chunkkv_methods import chunks, reusing
from .claim import Claim, Measured

TITLE = "ChunkKV: needles in a haystack"

ABOUT = """\
A sentence with a number is inserted in a book at depths from beginning to end. The question follows the prompt, so the observation window of the policies
sees it, as in the paper. Prompts are shorter than the paper's because small models find needles only in shorter texts."""

PLACE = "128 slots"
SETTING = "LLaMA-3-8B-Instruct, 8k tokens, 128 slots"

claim = partial(Claim, measure="needle accuracy", at=PLACE)

CLAIMS = (
    claim(
        "It finds more needles than SnapKV, H2O and StreamingLLM",
        "Figure 16, Table 7",
        f"73.8 %; SnapKV 58.9 %, H2O 47.9 %, StreamingLLM 23.7 % ({SETTING})",
        "needle",
        method="chunkkv",
        others=("snapkv", "h2o", "streaming_llm"),
    ),
    claim(
        "Chunks of 10 find more than chunks of 3 and of 30",
        "Tables 10 and 20, section 4.4",
        "best at 10, worse at 3 and 30",
        "needle",
        method="chunkkv",
        others=(chunks(3), chunks(30)),
    ),
    *(
        claim(
            f"Chunks of {size} do about as well as chunks of 10",
            "Table 10, section 4.4",
            "stable from 5 to 20; the margin is ours",
            "needle",
            method=chunks(size),
            others=("chunkkv",),
            margin=-0.05,
        )
        for size in (5, 20)
    ),
    claim(
        "Sharing indices between two layers costs less than 0.6 %",
        "Table 9, section 4.3",
        "less than 0.6 % on LongBench, no loss on GSM8K (LLaMA-3-8B-Instruct)",
        "LongBench",
        method=reusing(2),
        others=("chunkkv",),
        margin=-0.006,
    ),
)


def measure(bench: Bench) -> Measured:
    """All examples under each method."""
    length, depths, samples = (512, 2, 1) if bench.small else (2048, 11, 4)
    task = bench.haystack(length, depths, samples)
    methods = chunkkv_methods.variants(128, 32) | chunkkv_methods.others(128, 32)
    if bench.small:
        methods = {name: methods[name] for name in ("chunkkv", reusing(2))}
    settings = {"examples": depths * samples, "tokens": length, "depths": depths, "haystack": bench.books[0].name}
    return Measured(settings, needles(bench, methods, task, PLACE))
