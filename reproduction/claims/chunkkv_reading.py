"""ChunkKV (Liu et al. 2025), Tables 6, 9, 10 and 14: chunk size and index reuse, by what texts read through the cache lose."""

from functools import partial

from . import chunkkv_methods
from .bench import Bench, continued
from .chunkkv_methods import CHUNK, SIZES, chunks, reusing
from .claim import Claim, Measured

TITLE = "ChunkKV: chunk size and index reuse"

ABOUT = """\
The beginning of each book is prefilled, and a policy keeps a tenth of it. The rest is fed token by token through the compressed cache. ChunkKV and SnapKV
keep all of it; H2O and StreamingLLM evict, so their caches are smaller. The paper scores LongBench."""

PLACE = "10 % of the prompt"
SETTING = "LongBench, LLaMA-3-8B-Instruct"

claim = partial(Claim, own="LongBench", measure="agreement", at=PLACE, setting=SETTING)

CLAIMS = (
    claim(
        "It is better than SnapKV and H2O",
        "Table 6",
        "better than both",
        method="chunkkv",
        others=("snapkv", "h2o"),
    ),
    *(
        claim(
            f"Chunks of {size} cost no more than 1 % against chunks of 10",
            "Figure 18, appendix B.4",
            "scores change by less than 1 %",
            method=chunks(size),
            others=("chunkkv",),
            margin=-0.01,
        )
        for size in SIZES
        if size != CHUNK
    ),
    claim(
        "Sharing indices between two layers costs less than 0.6 %",
        "Table 9, section 4.3",
        "less than 0.6 %",
        method=reusing(2),
        others=("chunkkv",),
        margin=-0.006,
    ),
    claim(
        "The more layers share indices, the more it costs",
        "Figure 5, Table 14, appendix B.1.2",
        "GSM8K falls markedly beyond two layers, LongBench less",
        method=reusing(2),
        others=(reusing(4),),
    ),
)


def measure(bench: Bench) -> Measured:
    """All books as one batch under each method."""
    prompt, scored, books, window = (320, 16, 2, 8) if bench.small else (3840, 256, 8, 32)
    texts = bench.pieces(books, prompt + scored, 0 if bench.small else 4096)
    budget = prompt // 10
    methods = chunkkv_methods.variants(budget, window) | chunkkv_methods.others(budget, window)
    if bench.small:
        methods = {name: methods[name] for name in ("chunkkv", chunks(5))}
    settings = {"books": books, "prompt": prompt, "tokens scored": scored, "slots": budget, "window": window}
    return Measured(settings, continued(bench, methods, texts, prompt, PLACE))
