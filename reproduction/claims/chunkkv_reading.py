"""ChunkKV (Liu et al. 2025), Tables 6, 9, 10 and 14: chunk size and index reuse, by what texts read through the cache lose."""

from functools import partial

from . import chunkkv_methods
from .bench import Bench, continued
from .chunkkv_methods import CHUNK, SIZES, chunks, reusing
from .claim import Claim, Measured

TITLE = "ChunkKV: chunk size and index reuse"

ABOUT = """\
The beginning of each book is prefilled, of which a policy keeps a tenth; the rest is read token by token through
what it kept, and kept besides. The paper scores LongBench's tasks."""

PLACE = "10 % of the prompt"
UNSEEN = "LongBench, LLaMA-3-8B-Instruct; the table itself was not at hand"

claim = partial(Claim, own="LongBench", measure="agreement", at=PLACE)

CLAIMS = (
    claim(
        "It is better than SnapKV and H2O",
        "Table 6",
        f"better than both ({UNSEEN})",
        method="chunkkv",
        others=("snapkv", "h2o"),
    ),
    *(
        claim(
            f"Chunks of {size} cost no more than 1 % against chunks of 10",
            "Figure 18, appendix B.4",
            f"scores change by less than 1 % ({UNSEEN})",
            method=chunks(size),
            others=("chunkkv",),
            margin=-0.01,
        )
        for size in SIZES
        if size != CHUNK
    ),
    claim(
        "One choice for two layers costs less than 0.6 %",
        "Table 9, section 4.3",
        "less than 0.6 % on LongBench (LLaMA-3-8B-Instruct)",
        method=reusing(2),
        others=("chunkkv",),
        margin=-0.006,
    ),
    claim(
        "The more layers share a choice, the more it costs",
        "Figure 5, Table 14, appendix B.1.2",
        "GSM8K falls markedly beyond two layers, LongBench less (LLaMA-3-8B-Instruct; the table itself was not at "
        "hand)",
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
