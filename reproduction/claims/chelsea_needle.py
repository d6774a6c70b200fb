"""Chelsea (Hu et al. 2025), Figure 8: needles in a haystack at a cache of a quarter."""

from kvjax.policies import CaM, Chelsea, Policy, SnapKV, StreamingLLM

from .bench import Bench, needles
from .claim import Claim, Measured

TITLE = "Chelsea: needles in a haystack"

ABOUT = """\
A sentence with a number is inserted in a book at depths from beginning to end. The question follows the prompt. As in the paper, all methods have a
quarter of the cache. Chelsea has neither outlier heads nor a schedule: each clustering step reduces the mergeable tokens by a quarter."""

PLACE = "cache of 25 %"

CLAIMS = (
    Claim(
        "At 25 % it finds more needles than SnapKV, StreamingLLM and CaM",
        "Figure 8, appendix D.1",
        "a figure: above all three (Llama-2-7B-32K)",
        "needle",
        "needle accuracy",
        "chelsea",
        ("snapkv", "streaming_llm", "cam"),
        PLACE,
    ),
)


def measure(bench: Bench) -> Measured:
    """All examples under each method."""
    length, depths, samples = (512, 2, 1) if bench.small else (4096, 11, 4)
    task = bench.haystack(length, depths, samples)
    methods: dict[str, Policy] = {
        "chelsea": Chelsea(budget=0.25, schedule="constant", r_init=0.25, alpha=0.0, outliers=False),
        "snapkv": SnapKV(budget=length // 4),
        "streaming_llm": StreamingLLM(budget=length // 4),
        "cam": CaM(budget=length // 4),
    }
    settings = {"examples": depths * samples, "tokens": length, "haystack": bench.books[0].name}
    return Measured(settings, needles(bench, methods, task, PLACE))
