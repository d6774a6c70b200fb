"""CateKV (Jiang et al. 2025), Figure 7, by agreement with the full cache."""

from functools import partial

from . import catekv_ratios
from .bench import FULL, Bench, continued
from .catekv_ratios import RATIOS, catekv, streaming
from .claim import Claim, Measured

TITLE = "CateKV: fewer whole heads, by agreement"

ABOUT = """\
The beginning of each book is prefilled, the rest read token by token through what was kept. A share r of the KV
heads keeps everything; the others keep a small budget of the prompt: chunks chosen once (CateKV) or the first and
last tokens (streaming heads, as in DuoAttention). Consistent heads keep all new tokens besides; streaming heads stay
at their budget. CateKV's head types are found on WikiText-2 for every ratio, DuoAttention's are learned."""

PLACE = "all ratios"
SETTING = "accuracy on RULER at 128k tokens, Llama-3 and Llama-3.1; a figure"

claim = partial(Claim, own="RULER", measure="agreement", at=PLACE)

CLAIMS = (
    *(
        claim(
            f"At r = {ratio:g} CateKV is better than streaming heads",
            "Figure 7, section 4.2.4",
            f"DuoAttention falls notably below r = 0.3, CateKV does not ({SETTING})",
            method=catekv(ratio),
            others=(streaming(ratio),),
        )
        for ratio in RATIOS
        if ratio < 0.4
    ),
    claim(
        "Down to r = 0.1 CateKV stays near full attention",
        "Figure 7, section 4.2.4",
        f"close to full attention ({SETTING}); the margin is this page's",
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
