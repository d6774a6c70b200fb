"""TreeKV (He et al. 2025), Table 1: perplexity of long texts read through a small cache."""

from functools import partial

import numpy as np

import kvjax
from kvjax.evals import Perplexity, windowed
from kvjax.evals.perplexity import read
from kvjax.policies import H2O, TOVA, Policy, StreamingLLM

from .bench import FULL, Bench
from .claim import Claim, Measured, Row

TITLE = "TreeKV: long texts through a small cache"

ABOUT = """\
Each book is fed token by token into a cache that starts empty. The perplexity covers the first tokens of each book, as many as the column's head has.
The paper's model was trained on 4k tokens, so 8k and 16k exceed its trained window. TreeKV and StreamingLLM assign positions inside the cache.
H2O, TOVA and the full cache keep the original positions, as in the authors' code. Beyond the trained window their results are extrapolation."""

SETTING = "PG19, Llama-2-7B, cache 1024 = 4 sinks + 512 + 508 recent"

BEYOND = "beyond the trained window"
"""The longest text, where it is longer than what the model was trained on."""

LEFT = "treekv, left kept"

claim = partial(Claim, own="perplexity", measure="perplexity", setting=SETTING)

CLAIMS = (
    claim(
        "At 4k tokens TreeKV is better than StreamingLLM and H2O",
        "Table 1",
        "7.02; StreamingLLM 7.19, H2O 7.06",
        method="treekv",
        others=("streaming_llm", "h2o"),
        at="4096 tokens",
    ),
    claim(
        "At 4k tokens TreeKV comes within 0.02 of TOVA",
        "Table 1, section 5.2",
        "7.02; TOVA 7.00",
        method="treekv",
        others=("tova",),
        at="4096 tokens",
        margin=-0.02,
    ),
    claim(
        "At 8k tokens TreeKV is better than all three",
        "Table 1",
        "6.88; StreamingLLM 7.19, H2O 7.08, TOVA 7.06",
        method="treekv",
        others=("streaming_llm", "h2o", "tova"),
        at="8192 tokens",
    ),
    claim(
        "At 16k tokens TreeKV is better than all three",
        "Table 1",
        "6.91; StreamingLLM 7.19, H2O 7.25, TOVA 7.15",
        method="treekv",
        others=("streaming_llm", "h2o", "tova"),
        at="16384 tokens",
    ),
    claim(
        "Beyond the trained window the full cache fails",
        "Table 1",
        "at 8k 6.88; full attention more than 1000",
        method="treekv",
        others=(FULL,),
        at=BEYOND,
    ),
    claim(
        "Always keeping the older of two neighbours, not the more attended one, costs little",
        "Figure 5, section 5.4",
        "minor variations (a figure; one book of 65k tokens); the margin is ours",
        method=LEFT,
        others=("treekv",),
        at="16384 tokens",
        margin=-0.1,
    ),
    claim(
        "Always keeping the older of two neighbours is still better than H2O",
        "Figure 5, section 5.4",
        "below it (a figure; one book of 65k tokens)",
        method=LEFT,
        others=("h2o",),
        at="16384 tokens",
    ),
)


def measure(bench: Bench) -> Measured:
    """One stream a method, all books as one batch; shorter texts are the beginnings of the longest."""
    lengths, budget = ((96, 192), 64) if bench.small else ((4096, 8192, 16384), 1024)
    books, skip = (2, 0) if bench.small else (8, 4096)
    texts = bench.pieces(books, max(lengths), skip)
    recent = budget // 2 - 4
    methods: dict[str, Policy] = {
        "treekv": kvjax.TreeKV(budget=budget),
        LEFT: kvjax.TreeKV(budget=budget, keep="left"),
        "tova": TOVA(budget=budget),
        "h2o": H2O(budget=budget, recent=recent),
        "streaming_llm": StreamingLLM(budget=budget),
    }
    jobs = {
        name: lambda policy=policy: parts(streamed(bench, policy, texts), lengths) for name, policy in methods.items()
    }
    found = bench.each(
        {**jobs, FULL: lambda: parts([windowed(bench.params, text, len(text)) for text in texts], lengths)}
    )
    rows = [
        Row("perplexity", name, f"{length} tokens", scores)
        for name, of_lengths in found.items()
        for length, scores in zip(lengths, of_lengths, strict=True)
    ]
    if max(lengths) > bench.params.config.context_length:
        rows += [
            Row("perplexity", row.method, BEYOND, row.samples) for row in rows if row.at == f"{max(lengths)} tokens"
        ]
    settings = {"books": books, "skipped tokens": skip, "slots": budget, "recent": recent}
    return Measured(settings | {"trained window": bench.params.config.context_length}, rows)


def parts(scores: list[Perplexity], lengths: tuple[int, ...]) -> list[list[float]]:
    """Perplexity of the first tokens of every text, for each number of them."""
    return [[score.part(0, length - 1).perplexity for score in scores] for length in lengths]


def streamed(bench: Bench, policy: Policy, texts: list[list[int]]) -> list[Perplexity]:
    """`kvjax.evals.streaming` of texts of one length, as one batch."""
    params, tokens = bench.params, np.asarray(texts, np.int32)
    engine = kvjax.Engine(params, policy, batch=len(texts), prompt_len=0, max_new_tokens=tokens.shape[1])
    return [Perplexity(row) for row in read(engine, engine.begin().caches, tokens, 0)[0]]
