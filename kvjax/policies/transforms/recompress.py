"""`recompress`: any method that cuts a prompt by scores, applied repeatedly while decoding."""

import dataclasses
from typing import Any, ClassVar, Literal, cast

from kvjax.cache import LayerSpec

from ..base import Policy
from ..families.rounds import RoundsLayer
from ..families.scoring import PromptScorer, PromptScorerLayer
from ..fields import check_fields
from ..info import PolicyError, PolicyInfo
from ..layer import CacheLayer
from .wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class Recompress(Wrapper):
    """A prompt scorer that compresses the cache again in rounds, made by `recompress`.

    Attributes:
        policy: scores the tokens, and has the budget.
        every: tokens from round to round.
        prompt: whether to "compress" a prompt at once, or "keep" it until `every` new tokens have come.

    Example:
        >>> policy = kvjax.policies.Recompress(kvjax.SnapKV(budget=64), every=32)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('recompress(snapkv:budget=64; every=32)', 0.56)
    """

    transform: ClassVar[str] = "recompress"

    every: int = 512
    prompt: Literal["compress", "keep"] = "compress"

    def __post_init__(self) -> None:
        if hasattr(self.policy, "every"):
            raise PolicyError(
                f"recompress: {self.policy.info.name!r} has its own rounds. Give it every={self.every} instead."
            )
        if getattr(self.policy, "query_window", None) is None:
            raise PolicyError(
                f"recompress: {self.policy.info.name!r} scores need more than keys, values and the latest queries, so they cannot be "
                "computed again while decoding. Use a policy such as snapkv, pyramidkv, chunkkv, knorm, keydiff, tova or "
                "h2o:observers='last'."
            )
        check_fields(self, every=1)
        scorer = cast(PromptScorer, self.policy)
        window, (_, last) = scorer.query_window or 0, scorer.always_kept(0)
        if window > self.every + last:
            raise PolicyError(
                f"{self.info.name}: the last {window} queries score, but only the last {self.every + last} tokens are always kept. "
                f"Raise every to {window - last}, or lower the policy's window."
            )

    @property
    def info(self) -> PolicyInfo:
        return dataclasses.replace(super().info, stage="both", budget_excludes_new_tokens=False)

    @property
    def window(self) -> int:
        """Tokens of a budget that every layer has in addition, for `pyramid`."""
        return getattr(self.policy, "window", 0)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        scorer = self.policy.layer(spec)
        if scorer.attention == "dense":
            return scorer
        return RoundsLayer(
            self,
            spec,
            scorer=cast(PromptScorerLayer[Any], scorer),
            every=self.every,
            keeps_prompt=self.prompt == "keep",
        )


def recompress(
    policy: Policy,
    every: int = 512,
    budget: int | float | None = None,
    prompt: Literal["compress", "keep"] = "compress",
) -> Recompress:
    """Compress by a prompt's scores repeatedly while decoding: `recompress(SnapKV(budget=512), every=128)`.

    Whenever `every` tokens have come, a round scores all cached tokens of a head as a prompt is scored, and cuts them
    to the budget. A head never has more than the budget plus `every` tokens. The prompt's tokens count, so a prompt of
    `every` tokens or more is cut after prefill. Scores are the policy's: attention from the queries of its window,
    which are kept with their original rotation, or scores from keys alone. A policy that evicts while decoding then
    does so in rounds, by its current scores.

    This resembles kvpress' `DecodingPress` (interval 512) with a press for the prompt. kvjax uses the window's queries
    at their own positions, and `DecodingPress` uses all of them at the current position.

    Args:
        policy: scores by the last queries or by keys alone: snapkv, pyramidkv, chunkkv, knorm, keydiff, random, tova,
            or h2o with `observers="last"`.
        every: tokens from round to round: at least the policy's window minus the last tokens that it always keeps.
        budget: replaces the policy's budget if given.
        prompt: "compress" cuts a prompt at once. "keep" waits for `every` new tokens, as `DecodingPress` alone does,
            and needs memory for the whole prompt. Chunked prefill is then not supported.

    Raises:
        PolicyError: a number is out of range, or the policy needs more than the latest queries.

    Example:
        >>> str(kvjax.recompress(kvjax.SnapKV(budget=512), every=64))
        'recompress(snapkv:budget=512; every=64)'
    """
    return Recompress(policy if budget is None else policy.with_budget(budget), every, prompt)
