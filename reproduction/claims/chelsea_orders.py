"""Chelsea (Hu et al. 2025), section 6: whether dividing chunks by turns, and looking at keys at all, is worth something."""

import dataclasses
from functools import partial

from kvjax.policies import Chelsea, Policy, StreamingLLM

from .bench import Bench, continued
from .claim import Claim, Measured

TITLE = "Chelsea: how chunks are divided"

ABOUT = """\
The paper proves that alternating tokens is the best way to divide a chunk into two halves: it keeps the most similarity between the halves, if similarity
falls with distance ever more slowly. It does not measure the effect. Here the effect is measured as perplexity of a book's continuation, with a fifth
of the cache and without outlier heads. Chunks are divided alternately, into first and second half, or at random; a fourth variant merges neighbours
whatever their keys are."""

PLACE = "cache of 20 %"
OTHERS = {
    "chelsea, halves": {"partition": "halves"},
    "chelsea, at random": {"partition": "random"},
    "chelsea, by positions": {"match": "positions"},
}

claim = partial(Claim, own="layers", measure="perplexity", method="chelsea", at=PLACE)

CLAIMS = (
    claim(
        "Dividing chunks alternately costs less than dividing them into halves or at random",
        "Theorem 6.1",
        "alternating division is optimal for the sum of similarities between the halves (a proof)",
        others=("chelsea, halves", "chelsea, at random"),
    ),
    claim(
        "Merging similar keys costs less than merging neighbours",
        "section 4",
        "nearby keys are similar (figures)",
        others=("chelsea, by positions",),
    ),
)


def measure(bench: Bench) -> Measured:
    """All books as one batch under each method."""
    prompt, scored, books = (176, 16, 2) if bench.small else (7680, 512, 8)
    texts = bench.pieces(books, prompt + scored, 0 if bench.small else 4096)
    ours = Chelsea(budget=0.2, outliers=False)
    if bench.small:
        ours = dataclasses.replace(ours, sinks=4, recent=16, chunk=32)
    methods: dict[str, Policy] = {
        "chelsea": ours,
        **{name: dataclasses.replace(ours, **options) for name, options in OTHERS.items()},
        "streaming_llm": StreamingLLM(budget=0.2),
    }
    settings = {"books": books, "prompt": prompt, "tokens scored": scored, "schedule": ours.schedule}
    return Measured(settings, continued(bench, methods, texts, prompt, PLACE))
