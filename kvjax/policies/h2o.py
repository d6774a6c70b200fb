"""H2O: the heavy hitters, which have got the most attention of all queries so far, and the most recent tokens."""

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

    A token's score is the sum of the softmax probabilities that all queries since it have given it, those of the prompt
    included, averaged over the query group. While decoding, one token per step is evicted, and its score is forgotten; a text that is
    read in blocks is brought back to the budget after each.

    Attributes:
        budget: slots in all: a number of tokens, or a fraction of prompt + new tokens.
        recent: latest tokens, which are kept whatever their score; by default half of the budget, as in the paper.
        observers: whose attention counts in the prompt: that of "all" queries, or of the "last" `window` alone, which is
            cheaper on long prompts.
        window: queries that count where `observers="last"`.
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
        needs = f"but {recent} recent tokens and at least one heavy hitter need {least}; raise budget or lower recent"
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
