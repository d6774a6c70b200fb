"""H2O: the most recent tokens, and heavy hitters, which have received the most attention so far."""

import dataclasses
from typing import Any, ClassVar, Literal

from jaxtyping import Array, Float

from kvjax.cache import LayerCache, LayerSpec, PromptKV

from .budget import check_least
from .families.scoring import ScoreEviction, all_queries, last_queries
from .fields import check_fields
from .info import PolicyInfo
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class H2O(ScoreEviction):
    """Keep the tokens with the most accumulated attention, and the most recent ones (Zhang et al. 2023, Algorithm 1).

    A token's score is the sum of softmax probabilities from all queries since, including the prompt's, averaged over
    the query group. While decoding, each step evicts one token with its score. Chunked prefill cuts to the budget after
    each block.

    Attributes:
        budget: slots in total: a number of tokens, or a fraction of prompt + new tokens.
        recent: latest tokens, kept whatever their score. Defaults to half of the budget, as in the paper.
        observers: which of the prompt's queries count: "all", or the "last" `window` only, which is cheaper on long
            prompts.
        window: number of queries that count with `observers="last"`.

    Example:
        >>> policy = kvjax.H2O(budget=64, recent=16)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('h2o:budget=64,recent=16', 0.45)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="h2o",
        paper="Zhang et al. 2023, H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
        summary="recent tokens, and those with the most attention from all queries so far",
        memory="freed",
        stage="both",
    )

    budget: int | float = 2048
    recent: int | None = None
    observers: Literal["all", "last"] = "all"
    window: int = 32

    def __post_init__(self) -> None:
        check_fields(self, recent=0, window=1)

    def validate(self, tokens: int) -> None:
        recent, least = self.recent or 0, self.least_slots
        needs = f"but {recent} recent tokens and at least one heavy hitter need {least}. Raise budget or lower recent."
        check_least(self.info.name, self.budget, tokens, least, needs)

    @property
    def least_slots(self) -> int:
        return (self.recent or 0) + 1

    @property
    def query_window(self) -> int | None:
        return self.window if self.observers == "last" else None

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0, budget // 2 if self.recent is None else budget * 0 + self.recent

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        if self.observers == "all":
            return all_queries(prompt, spec)
        mean = last_queries(prompt, self.window, spec)
        return mean * (prompt.lengths - prompt.before).clip(max=self.window).astype(mean.dtype)[:, None, None]

    def block_scores(self, spec: LayerSpec, prompt: PromptKV, score: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
        return score + self.scores(spec, prompt)

    def update_score(
        self, spec: LayerSpec, score: Float[Array, "B K C"], probs: Float[Array, "B K C"], held: LayerCache
    ) -> Float[Array, "B K C"]:
        return score + probs
