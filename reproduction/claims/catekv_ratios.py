"""CateKV (Jiang et al. 2025), Figure 7: some heads whole, the others with a budget that CateKV or DuoAttention fills."""

from kvjax.calibration.catekv import Settings, adaptive_by_sample, head_scores, vote
from kvjax.calibration.recording import cut
from kvjax.policies import CateKV, DuoAttention, Policy

from .bench import Bench

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
"""r, share of the heads that keep everything; at 1 both methods are the full cache."""


def place(ratio: float) -> str:
    """What rows call a ratio."""
    return f"r = {ratio:g}"


def catekv(ratio: float) -> str:
    """What rows call CateKV at a ratio."""
    return f"catekv, {place(ratio)}"


def streaming(ratio: float) -> str:
    """What rows call DuoAttention, whose other heads stream, at a ratio."""
    return f"duoattention, {place(ratio)}"


def methods(bench: Bench, budget: int, ratios: tuple[float, ...] = RATIOS) -> dict[str, Policy]:
    """Both methods at every ratio, heads with a small budget having `budget` slots for the prompt.

    CateKV's types are voted for every ratio, on samples of the reference text. DuoAttention's whole heads are those with the
    highest scores in its profile, which comes with kvjax or is in `reproduction/profiles`.
    """
    count, length = (2, 512) if bench.small else (16, 2048)
    samples, _ = cut(bench.params, [bench.reference], count, length)
    scores = head_scores(bench.params, samples, Settings())
    found: dict[str, Policy] = {}
    for ratio in ratios:
        labels = vote(adaptive_by_sample(scores, ratio), ratio)
        found[catekv(ratio)] = CateKV(budget=budget, profile=labels)
        found[streaming(ratio)] = DuoAttention(budget=budget, sinks=budget // 16, sparsity=1 - ratio)
    return found
