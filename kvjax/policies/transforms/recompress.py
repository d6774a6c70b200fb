"""Any method that cuts a prompt by its scores, applied again and again while decoding."""

import dataclasses
from typing import Any, ClassVar, Literal, cast

from kvjax.cache import LayerSpec

from ..base import CacheLayer, Policy
from ..families.rounds import RoundsLayer
from ..families.scoring import PromptScorer, PromptScorerLayer
from ..fields import check_fields
from ..info import PolicyError, PolicyInfo
from .wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class Recompress(Wrapper):
    """A scorer of prompts that compresses what is held again every so many tokens; made by `recompress`.

    Attributes:
        policy: how a prompt is scored, and what is kept of it.
        every: tokens from round to round.
        prompt: whether a prompt is cut at once, or kept until so many new tokens have come.
    """

    transform: ClassVar[str] = "recompress"

    every: int = 512
    prompt: Literal["compress", "keep"] = "compress"

    def __post_init__(self) -> None:
        if hasattr(self.policy, "every"):
            raise PolicyError(
                f"recompress: {self.policy.info.name!r} has rounds of its own; give it every={self.every}"
            )
        if getattr(self.policy, "query_window", None) is None:
            raise PolicyError(
                f"recompress: {self.policy.info.name!r} does not score what is held by the latest queries alone, without which it cannot "
                "be scored again while decoding; give a policy that does, such as snapkv, pyramidkv, chunkkv, knorm, keydiff, tova or "
                "h2o:observers='last'"
            )
        check_fields(self, every=1)
        scorer = cast(PromptScorer, self.policy)
        window, (_, last) = scorer.query_window or 0, scorer.always_kept(0)
        if window > self.every + last:
            raise PolicyError(
                f"{self.info.name}: the last {window} queries score, but only the last {self.every + last} tokens are held in any case; "
                f"raise every to {window - last}, or lower the policy's window"
            )

    @property
    def info(self) -> PolicyInfo:
        return dataclasses.replace(super().info, stage="both", budget_excludes_new_tokens=False)

    @property
    def window(self) -> int:
        """Tokens of a budget that every layer has, for `pyramid`."""
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
    """Compress by a prompt's scores again and again while decoding: `recompress(SnapKV(budget=512), every=128)`.

    Whenever `every` tokens have come, all that a head holds is scored as a prompt is, and the budget is left of it, new tokens among
    it; so a head never holds more than the budget and `every` tokens. The prompt's tokens count, so that one of `every` tokens or more is
    cut when it has been read. Scores are those of the policy: what its window's queries, which are kept, rotated to their positions,
    attend to of what is left; or keys alone. A policy that evicts while decoding by itself does so in rounds instead, and by
    scores of the moment.

    As kvpress's `DecodingPress` (interval 512) with a press for the prompt; it decodes with the window's queries at their own positions,
    where `DecodingPress` has them all at the current one.

    Args:
        policy: scores by the last queries or keys alone: snapkv, pyramidkv, chunkkv, knorm, keydiff, random, tova, or h2o with
            `observers="last"`.
        every: tokens from round to round. As many as the policy's window at least, but for those it always keeps.
        budget: the policy's budget, if it is to be another.
        prompt: "compress" or "keep": whether a prompt is cut at once, or, as `DecodingPress` alone does, kept until `every` new tokens
            have come, in as much memory. Then it is not read in blocks.

    Raises:
        PolicyError: a number is out of range, or the policy does not score by the latest queries alone.
    """
    return Recompress(policy if budget is None else policy.with_budget(budget), every, prompt)
