"""Chelsea (Hu et al. 2025), section 6: whether dividing chunks by turns, and looking at keys at all, is worth something."""

import dataclasses
from functools import partial

from kvjax.policies import Chelsea, Policy, StreamingLLM

from .bench import Bench, continued
from .claim import Claim, Measured

TITLE = "Chelsea: how chunks are divided"

ABOUT = """\
The paper proves that of all ways to divide a chunk into two halves that by turns keeps the most similarity between them, where
similarity falls with distance, ever more slowly; it does not measure what that is worth. Here it is the perplexity of a
book's continuation, at a fifth of the cache and with no outlier heads: with chunks divided by turns, into
first and second half, and at random; and with neighbours merged whatever their keys are."""

PLACE = "cache of 20 %"
OTHERS = {
    "chelsea, halves": {"partition": "halves"},
    "chelsea, at random": {"partition": "random"},
    "chelsea, by positions": {"match": "positions"},
}

claim = partial(Claim, own="layers", measure="perplexity", method="chelsea", at=PLACE)

CLAIMS = (
    claim(
        "Chunks divided by turns cost less than chunks divided otherwise",
        "Theorem 6.1",
        "by turns is optimal for the sum of similarities between the halves (a proof)",
        others=("chelsea, halves", "chelsea, at random"),
    ),
    claim(
        "Merging similar keys costs less than merging neighbours",
        "section 4",
        "keys are alike, more so the nearer they are (figures)",
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
