"""CateKV (Jiang et al. 2025), Table 1 and Figure 7, by needles in a haystack."""

from functools import partial

from kvjax.policies import Policy, SnapKV, StreamingLLM

from . import catekv_ratios
from .bench import FULL, Bench, needles
from .catekv_ratios import RATIOS, catekv, streaming
from .claim import Claim, Measured

TITLE = "CateKV: needles by share of adaptive heads"

ABOUT = """\
A sentence with a number is inserted in a book at depths from beginning to end. The question follows the prompt. A share r of the KV heads keeps
everything, the other heads keep a sixteenth of the prompt. In every head, StreamingLLM and SnapKV keep
as many tokens as CateKV keeps on average at r = 0.4."""

PLACE = "all methods"
FIGURE_7 = "RULER at 128k tokens, Llama-3 and Llama-3.1"
SETTING = "12 tasks of RULER at 128k tokens, Llama-3-8B-1M, 41 % of the cache"

claim = partial(Claim, own="RULER", measure="needle accuracy", at=PLACE, setting=SETTING)

CLAIMS = (
    claim(
        "At r = 0.4 CateKV is comparable with full attention",
        "Table 1",
        "84.61; full 84.10; the margin is ours",
        method=catekv(0.4),
        others=(FULL,),
        margin=-0.02,
    ),
    claim(
        "It is better than StreamingLLM of the same size",
        "Table 1",
        "84.61; StreamingLLM 47.34",
        method=catekv(0.4),
        others=("streaming_llm",),
    ),
    claim(
        "It is better than SnapKV of the same size",
        "Table 1",
        "84.61; SnapKV 83.28",
        method=catekv(0.4),
        others=("snapkv",),
    ),
    *(
        claim(
            f"At r = {ratio:g} CateKV is better than streaming heads",
            "Figure 7, section 4.2.4",
            "a figure: DuoAttention falls notably below r = 0.3, CateKV does not",
            method=catekv(ratio),
            others=(streaming(ratio),),
            setting=FIGURE_7,
        )
        for ratio in RATIOS
        if ratio < 0.3
    ),
)


def measure(bench: Bench) -> Measured:
    """All examples under each method at each ratio."""
    length, depths, samples = (512, 2, 1) if bench.small else (2048, 11, 4)
    task = bench.haystack(length, depths, samples)
    budget = length // 16
    same = round(length * (0.4 + 0.6 / 16))
    ratios = catekv_ratios.methods(bench, max(budget, 64), (0.1,) if bench.small else RATIOS)
    methods: dict[str, Policy] = {**ratios, "streaming_llm": StreamingLLM(budget=same), "snapkv": SnapKV(budget=same)}
    settings = {"examples": depths * samples, "tokens": length, "budget": budget, "haystack": bench.books[0].name}
    return Measured(settings, needles(bench, methods, task, PLACE))
