"""CateKV (Jiang et al. 2025), Figure 7, by agreement with the full cache."""

from functools import partial

from . import catekv_ratios
from .bench import FULL, Bench, continued
from .catekv_ratios import RATIOS, catekv, streaming
from .claim import Claim, Measured

TITLE = "CateKV: agreement by share of adaptive heads"

ABOUT = """\
The beginning of each book is prefilled. The rest is fed token by token through the compressed cache. A share r of the KV heads keeps everything. The other
heads keep a small budget of the prompt: chunks selected once (CateKV), or the first and last tokens (streaming heads, as in DuoAttention). Consistent heads
also keep all new tokens; streaming heads stay at their budget. CateKV's head types are calibrated on WikiText-2 for each ratio, DuoAttention's are learned."""

PLACE = "all ratios"
SETTING = "accuracy on RULER at 128k tokens, Llama-3 and Llama-3.1; a figure"

claim = partial(Claim, own="RULER", measure="agreement", at=PLACE, setting=SETTING)

CLAIMS = (
    *(
        claim(
            f"At r = {ratio:g} CateKV is better than streaming heads",
            "Figure 7, section 4.2.4",
            "DuoAttention falls notably below r = 0.3, CateKV does not",
            method=catekv(ratio),
            others=(streaming(ratio),),
        )
        for ratio in RATIOS
        if ratio < 0.4
    ),
    claim(
        "Down to r = 0.1 CateKV stays near full attention",
        "Figure 7, section 4.2.4",
        "close to full attention; the margin is ours",
        method=catekv(0.1),
        others=(FULL,),
        margin=-0.05,
    ),
)


def measure(bench: Bench) -> Measured:
    """All books as one batch under each method at each ratio."""
    prompt, scored, books, budget = (320, 16, 2, 64) if bench.small else (7680, 512, 8, 256)
    texts = bench.pieces(books, prompt + scored, 0 if bench.small else 4096)
    methods = catekv_ratios.methods(bench, budget, (0.1,) if bench.small else RATIOS)
    settings = {"books": books, "prompt": prompt, "tokens scored": scored, "budget": budget}
    return Measured(settings, continued(bench, methods, texts, prompt, PLACE))
