"""CateKV (Jiang et al. 2025), Figure 4: how much attention goes to what four ways of choosing tokens keep."""

from functools import partial

import numpy as np

import kvjax
from kvjax.analysis import layers
from kvjax.analysis.recording import Recorded, record
from kvjax.policies import CateKV
from reproduction.analyses import heads

from .bench import Bench
from .claim import Claim, Measured, Row

TITLE = "CateKV: attention recalled"

ABOUT = """\
The share of attention that goes to selected tokens, for queries after the prompt. There are four ways to select, and all KV heads use the same one:

- *consistent*: once for all queries, as in consistent heads.
- *streaming*: the first and last tokens, as in streaming heads.
- *quest*: chunks for each query, by Quest's bounds.
- *top-k*: the tokens with the most attention for each query. This is the upper bound.

Tokens after the prompt count as kept."""

SETTING = "one text of 128k tokens, budget 2048, chunks of 8"
PLACE = "all heads"

claim = partial(Claim, own="recall", measure="attention recalled", method="consistent", at=PLACE, setting=SETTING)

CLAIMS = (
    claim(
        "The consistent pattern recalls more than the streaming one",
        "Figure 4, section 3.4",
        "a figure: above it overall",
        others=("streaming",),
    ),
    claim(
        "The consistent pattern comes near Quest's",
        "Figure 4, section 3.4",
        "a figure: closely approximates it; the margin is ours",
        others=("quest",),
        margin=-0.05,
    ),
    claim(
        "All patterns fall short of the upper bound",
        "Figure 4, section 3.4",
        "a figure: a gap to top-k for all",
        others=("top-k",),
        bounds=("top-k",),
    ),
)


def measure(bench: Bench) -> Measured:
    """One book at a time; sinks and recent tokens are those of the policies: of 2048, 64 and 256, and 128 streaming sinks."""
    prompt, steps, books, budget = (320, 8, 2, 64) if bench.small else (7936, 64, 4, 256)
    config = bench.params.config
    labels = (("consistent",) * config.num_kv_heads,) * config.num_layers
    policy = CateKV(budget=budget, profile=labels)
    streaming = np.zeros((config.num_layers, config.num_kv_heads, prompt), bool)
    streaming[..., : budget // 16] = streaming[..., budget // 16 - budget :] = True
    found: dict[str, list[float]] = {}
    for i, text in enumerate(bench.pieces(books, prompt + steps, 0 if bench.small else 4096), 1):
        recorded = record(bench.params, text)
        jobs = {
            "consistent": partial(kept, bench.params, recorded, text[:prompt], policy),
            "streaming": partial(heads.recall, recorded, streaming),
            "quest": partial(heads.page_recall, recorded, prompt, budget, budget // 32, budget // 8),
            "top-k": partial(heads.top_recall, recorded, prompt, budget),
        }
        means = {name: lambda job=job: float(np.mean(job())) for name, job in jobs.items()}
        for name, share in bench.each(means, f"book {i}: ").items():
            found.setdefault(name, []).append(share)
    settings = {"books": books, "prompt": prompt, "queries": steps, "budget": budget, "chunk": policy.chunk}
    return Measured(settings, [Row("attention recalled", name, PLACE, shares) for name, shares in found.items()])


def kept(params: kvjax.Params, recorded: list[Recorded], prompt: list[int], policy: CateKV) -> np.ndarray:
    """Recall of what the policy keeps of a prompt."""
    return heads.recall(recorded, layers.kept(params, prompt, policy))
