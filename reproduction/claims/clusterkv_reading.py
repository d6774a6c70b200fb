"""ClusterKV (Liu et al. 2024), Figure 10: perplexity where each query reads 1024 tokens."""

from functools import partial

from kvjax.policies import ClusterKV, InfiniGen, Policy, Quest, StreamingLLM

from .bench import FULL, Bench, continued
from .claim import Claim, Measured

TITLE = "ClusterKV: perplexity at a budget of 1024"

ABOUT = """\
The beginning of each book is prefilled. The rest is fed token by token, and each query attends only to the tokens that it selects. All methods keep the
whole cache, and attend to all tokens in the first two layers."""

PLACE = "budget 1024"
SETTING = "PG19 up to 32000 tokens, GLM4-9B-Chat, budget 1024"

claim = partial(Claim, own="perplexity", measure="perplexity", method="clusterkv", at=PLACE, setting=SETTING)

CLAIMS = (
    claim(
        "Its perplexity is within 0.5 of the full cache's",
        "Figure 10, section V-B",
        "deviation up to 0.5",
        others=(FULL,),
        margin=-0.5,
    ),
    claim(
        "It is better than Quest and InfiniGen",
        "Figure 10, section V-B",
        "deviation up to 0.5; Quest about 4, InfiniGen about 2",
        others=("quest", "infinigen"),
    ),
)


def measure(bench: Bench) -> Measured:
    """All books as one batch under each method."""
    prompt, scored, books, budget = (176, 16, 2, 64) if bench.small else (7680, 512, 8, 1024)
    texts = bench.pieces(books, prompt + scored, 0 if bench.small else 4096)
    methods: dict[str, Policy] = {
        "clusterkv": ClusterKV(budget=budget),
        "quest": Quest(budget=budget),
        "infinigen": InfiniGen(budget=budget),
        "streaming_llm": StreamingLLM(budget=budget),
    }
    settings = {"books": books, "prompt": prompt, "tokens scored": scored, "InfiniGen's alpha": InfiniGen().alpha}
    return Measured(settings, continued(bench, methods, texts, prompt, f"budget {budget}"))
