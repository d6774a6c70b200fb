"""CateKV (Jiang et al. 2025), Figure 8b: how much of a prompt adaptive heads have to keep."""

from functools import partial

from kvjax.calibration.catekv import Settings, adaptive_by_sample, head_scores, vote
from kvjax.policies import CateKV, Policy, StreamingLLM

from . import papers_tasks
from .bench import Bench, scored
from .claim import Claim, Measured

TITLE = "CateKV: adaptive heads that keep part of the prompt"

ABOUT = """\
RULER's retrieval, tracking and counting, question-aware. A share of 0.4 of the KV heads is adaptive and keeps a share η of the prompt's chunks. The other
heads keep a sixteenth of the prompt. Head types are calibrated on RULER's variable tracking at this length."""

LENGTH = 16384
ETAS = (0.8, 0.6, 0.4, 0.2)
PLACE = f"{LENGTH} tokens"
SETTING = "RULER at 128k tokens, Llama-3-8B-1M; a figure"


def kept(eta: float) -> str:
    """What rows call CateKV whose adaptive heads keep this share."""
    return f"catekv, η = {eta:g}"


claim = partial(Claim, own="RULER", measure="RULER score", at=PLACE, setting=SETTING)

CLAIMS = (
    *(
        claim(
            f"If adaptive heads keep a share η = {eta:g} of the prompt, CateKV scores about as well as with the whole prompt",
            "Figure 8b, section 4.4.2",
            "the performance of the full cache is maintained down to about 0.6; the margin is ours",
            method=kept(eta),
            others=(kept(1),),
            margin=-0.02,
        )
        for eta in (0.8, 0.6)
    ),
    *(
        claim(
            f"With η = {eta:g} CateKV scores lower than with 0.6",
            "Figure 8b, section 4.4.2",
            "below about 0.6 a significant decline",
            method=kept(0.6),
            others=(kept(eta),),
        )
        for eta in (0.4, 0.2)
    ),
)


def measure(bench: Bench) -> Measured:
    """Five tasks at each share."""
    length = 2048 if bench.small else LENGTH
    scores = head_scores(bench.params, papers_tasks.calibration(bench, length), Settings())
    labels = vote(adaptive_by_sample(scores, 0.4), 0.4)
    budget = max(length // 16, 64)
    shares = (1, 0.6) if bench.small else (1, *ETAS)
    methods: dict[str, Policy] = {
        **{kept(eta): CateKV(budget=budget, eta=float(eta), profile=labels) for eta in shares},
        "streaming_llm": StreamingLLM(budget=round(length * (0.4 + 0.6 / 16))),
    }
    settings = {"samples of each task": 2 if bench.small else 20, "r": 0.4, "budget": budget}
    return Measured(settings, scored(bench, methods, papers_tasks.tracking(bench, length), "RULER score", PLACE))
