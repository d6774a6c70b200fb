"""Chelsea (Hu et al. 2025), Tables 2, 5 and 11: quality at a cache of 20 %, with and without outlier heads."""

import dataclasses
from functools import partial

from kvjax.policies import CaM, Chelsea, Policy, SnapKV, StreamingLLM

from .bench import Bench, continued
from .claim import Claim, Measured

TITLE = "Chelsea: perplexity at 20 % of the cache"

ABOUT = """\
The beginning of each book is prefilled under a policy. The rest is fed token by token through the compressed cache. All methods may keep a fifth of
all tokens, new tokens included. SnapKV also keeps new tokens, so it keeps fewer tokens of the prompt. The paper scores LongBench; here the measure is
perplexity of the rest."""

PLACE = "cache of 20 %"
WITHOUT = "chelsea without outlier heads"
BASELINES = ("snapkv", "streaming_llm", "cam")

claim = partial(Claim, own="LongBench", measure="perplexity", method="chelsea", at=PLACE)

CLAIMS = (
    claim(
        "At 20 % Chelsea is better than SnapKV, StreamingLLM and CaM",
        "Table 2",
        "average 35.12 / 37.87 / 39.94; SnapKV 29.27 / 36.38 / 38.21, StreamingLLM 27.55 / 33.90 / 32.10, CaM 27.68 / 33.91 / "
        "32.04 (14 tasks of LongBench; Llama-2-7B-32K / Llama-3.1-8B-Instruct / Qwen2-7B-Instruct)",
        others=BASELINES,
    ),
    claim(
        "It is better with outlier heads, which keep everything, than without",
        "Tables 5 and 11",
        "38.97; without 36.46 (8 tasks of LongBench, Llama-2-7B-32K)",
        others=(WITHOUT,),
    ),
)


def measure(bench: Bench) -> Measured:
    """All books as one batch under each method."""
    prompt, scored, books = (176, 16, 2) if bench.small else (7680, 512, 8)
    texts = bench.pieces(books, prompt + scored, 0 if bench.small else 4096)
    budget = (prompt + scored) // 5
    ours = Chelsea(budget=0.2, sinks=4, recent=16, chunk=32) if bench.small else Chelsea(budget=0.2)
    methods: dict[str, Policy] = {
        "chelsea": ours,
        WITHOUT: dataclasses.replace(ours, outliers=False),
        "snapkv": SnapKV(budget=budget - scored, window=min(32, budget - scored - 1)),
        "streaming_llm": StreamingLLM(budget=0.2),
        "cam": CaM(budget=0.2),
    }
    settings = {"books": books, "prompt": prompt, "tokens scored": scored, "schedule": ours.schedule}
    return Measured(settings, continued(bench, methods, texts, prompt, PLACE))
