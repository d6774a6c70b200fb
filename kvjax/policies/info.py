"""What is said of a policy to people, and the error that all policies raise."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

Memory = Literal["full", "freed", "sparse", "quantized"]
"""What becomes of the memory of what is dropped, see `PolicyInfo`."""

Stage = Literal["none", "prompt", "decoding", "both"]
"""When a policy compresses, see `PolicyInfo`."""

Positions = Literal["original", "cache_rank"]
"""What positions kept tokens have, see `PolicyInfo`."""


class PolicyError(ValueError):
    """An unknown policy, a hyperparameter it does not have or cannot take, or a budget it cannot work with."""


@dataclasses.dataclass(frozen=True)
class PolicyInfo:
    """A method in a few words (`kvjax policies` prints them).

    Attributes:
        name: how it is asked for.
        paper: authors, year, title.
        summary: what it keeps, in one phrase.
        memory: "freed" (dropped slots hold no memory), "sparse" (sparse attention: all is kept, a part is read), "quantized" (all is
            kept, in fewer bits), or "full".
        stage: when it compresses: the "prompt" once it is read, while "decoding", "both", or "none".
        budget_excludes_new_tokens: whether the budget is for the prompt alone, and new tokens are kept in addition to it.
        merges: whether a slot may hold the mean of several tokens (it then counts as often, and weights sum to all tokens seen).
        adds_dropped_values: whether values of tokens that go are added to those of tokens that stay.
        refits_values: whether weights and values of kept tokens are fitted to stand for the whole prompt, and are no longer their own.
        positions: "original" (a token stays where it stood in the text) or "cache_rank" (its place among the kept ones, which
            keeps any sequence inside the trained window).
        takes_budget: whether a budget bears on what the policy holds or reads. (Without one it takes any, which has no effect.)
        heads_coupled: whether a layer's KV heads share slots or have caches of unequal sizes; then all of them are on every device of a mesh,
            with some of their slots, where these can be sharded.
        trained: whether it works with weights that were trained for a model, and do not come with kvjax.
        transform: what is done to the policy as a whole, such as "offloaded".
    """

    name: str
    paper: str = ""
    summary: str = ""
    memory: Memory = "full"
    stage: Stage = "none"
    budget_excludes_new_tokens: bool = False
    merges: bool = False
    adds_dropped_values: bool = False
    refits_values: bool = False
    positions: Positions = "original"
    takes_budget: bool = True
    heads_coupled: bool = False
    trained: bool = False
    transform: str = ""


def combined(name: str, parts: Iterable[PolicyInfo]) -> PolicyInfo:
    """What is said of a combination: of memory and stage what all parts agree on, or "freed" and "both" if they do not.

    Positions stay within the cache only if they do so in every part.
    """
    infos = list(parts)
    memories, stages = ({getattr(info, field) for info in infos} for field in ("memory", "stage"))
    return PolicyInfo(
        name=f"{name}({', '.join(dict.fromkeys(info.name for info in infos))})",
        summary="; ".join(dict.fromkeys(info.summary for info in infos)),
        memory=memories.pop() if len(memories) == 1 else "freed",
        stage=stages.pop() if len(stages) == 1 else "both",
        budget_excludes_new_tokens=any(info.budget_excludes_new_tokens for info in infos),
        merges=any(info.merges for info in infos),
        adds_dropped_values=any(info.adds_dropped_values for info in infos),
        refits_values=any(info.refits_values for info in infos),
        takes_budget=any(info.takes_budget for info in infos),
        heads_coupled=any(info.heads_coupled for info in infos),
        trained=any(info.trained for info in infos),
        positions="cache_rank" if all(info.positions == "cache_rank" for info in infos) else "original",
    )
