"""ChunkKV (Liu et al. 2025), Tables 2, 13 and 16: what the caches of whole layers lose, and how alike layers choose."""

from functools import partial

import numpy as np

import kvjax
from kvjax.analysis import layers
from kvjax.analysis.recording import Recorded, record
from kvjax.policies import H2O, ChunkKV, Policy, SnapKV
from reproduction.analyses import layer_loss

from .bench import Bench
from .claim import Claim, Measured, Row

TITLE = "ChunkKV: what layers keep"

ABOUT = """\
The beginning of a book is the prompt, and each policy keeps a tenth of it. Three measures cover all layers. *L1 loss*: mean absolute difference
of the cached keys and values from the full cache, where evicted tokens count as zero. *Attention cosine*: cosine similarity of attention over all tokens and
attention over the kept tokens, for the queries that follow. *Jaccard*: similarity of the tokens that adjacent layers keep, averaged over KV heads (the paper
logs only the first head). These measures describe caches, not quality, so they give no verdict. The paper does not say how its L1 loss compares caches
of different sizes."""

PLACE = "10 % of the prompt"
SETTING = "LLaMA-3-8B-Instruct, LongBench, 10 %"

claim = partial(Claim, own="layers", method="chunkkv", at=PLACE)

CLAIMS = (
    claim(
        "It has the smallest L1 loss of the cache",
        "Table 13, appendix A.1",
        f"about 2 % below SnapKV and H2O ({SETTING})",
        measure="L1 loss of the cache",
        others=("snapkv", "h2o"),
    ),
    claim(
        "It has the largest cosine similarity of attention",
        "Table 13, appendix A.1",
        f"about 1.5 % above SnapKV and H2O ({SETTING})",
        measure="attention cosine",
        others=("snapkv", "h2o"),
    ),
    claim(
        "Adjacent layers keep more similar tokens than with SnapKV and H2O",
        "Tables 2 and 16, section 3.3",
        "higher for all models (LLaMA-3-8B, Mistral-7B, Qwen2-7B)",
        measure="Jaccard of adjacent layers",
        others=("snapkv", "h2o"),
    ),
)


def measure(bench: Bench) -> Measured:
    """One book at a time."""
    prompt, steps, books = (192, 8, 2) if bench.small else (4096, 64, 8)
    budget = prompt // 10
    window = min(32, budget // 2)
    policies: dict[str, Policy] = {
        "chunkkv": ChunkKV(budget=budget, window=window, chunk=5 if bench.small else 10),
        "snapkv": SnapKV(budget=budget, window=window),
        "h2o": H2O(budget=budget),
    }
    found: dict[tuple[str, str], list[float]] = {}
    for i, text in enumerate(bench.pieces(books, prompt + steps, 0 if bench.small else 4096), 1):
        recorded = record(bench.params, text)
        jobs = {
            name: partial(losses, bench.params, recorded, text[:prompt], policy) for name, policy in policies.items()
        }
        for name, values in bench.each(jobs, f"book {i}: ").items():
            for measured, value in values.items():
                found.setdefault((measured, name), []).append(value)
    settings = {"books": books, "prompt": prompt, "queries": steps, "slots": budget, "window": window}
    return Measured(settings, [Row(measured, name, PLACE, values) for (measured, name), values in found.items()])


def losses(params: kvjax.Params, recorded: list[Recorded], prompt: list[int], policy: Policy) -> dict[str, float]:
    """The three measures of one prompt under one policy, averaged over layers."""
    kept = layers.kept(params, prompt, policy)
    return {
        "L1 loss of the cache": float(np.mean(layer_loss.cache_loss(recorded, kept))),
        "attention cosine": float(np.mean(layer_loss.attention_similarity(recorded, kept))),
        "Jaccard of adjacent layers": layers.neighbours(layers.jaccard(kept)),
    }
