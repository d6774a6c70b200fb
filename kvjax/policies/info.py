"""The description of a policy for users, and the error that all policies raise."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

Memory = Literal["full", "freed", "sparse", "quantized"]
"""What happens to the memory of dropped tokens, see `PolicyInfo`."""

Stage = Literal["none", "prompt", "decoding", "both"]
"""When a policy compresses, see `PolicyInfo`."""

Positions = Literal["original", "cache_rank"]
"""Which positions kept tokens have, see `PolicyInfo`."""


class PolicyError(ValueError):
    """An unknown policy, an unknown or invalid hyperparameter, or a budget that the policy cannot work with."""


@dataclasses.dataclass(frozen=True)
class PolicyInfo:
    """Description of a method (`kvjax policies` prints it).

    Attributes:
        name: name of the policy in `get_policy` and on the command line.
        paper: authors, year, title.
        summary: what it keeps, in one phrase.
        memory: "freed" (dropped tokens occupy no memory), "sparse" (all tokens are kept, and queries read a selection),
            "quantized" (all tokens are kept, in fewer bits), or "full".
        stage: when it compresses: the "prompt" once after it, while "decoding", "both", or "none".
        budget_excludes_new_tokens: whether the budget is for the prompt alone, and new tokens are kept in addition.
        merges: whether a slot may store the mean of several tokens. It then has their number as its weight, and weights
            sum to all tokens seen.
        adds_dropped_values: whether values of dropped tokens are added to those of kept tokens.
        refits_values: whether weights and values of kept tokens are fitted to represent the whole prompt.
        positions: "original" (a token keeps its position in the text) or "cache_rank" (a token's position is its rank
            among the kept tokens, which keeps any sequence inside the trained window).
        takes_budget: whether a budget affects what the policy keeps or reads. A policy without one accepts any budget,
            which has no effect.
        heads_coupled: whether a layer's KV heads share slots or have caches of unequal sizes. Every device of a mesh
            then has all heads, with a shard of their slots where these can be sharded.
        keeps_by_threshold: whether the text determines how much each head keeps, within the budget. Statistics of a
            generation then have that share (`GenerationStats.kept_shares`).
        trained: whether it needs weights that were trained for a model. They do not come with kvjax.
        transform: name of the transform around the whole policy, such as "offloaded".

    Example:
        >>> info = kvjax.SnapKV().info
        >>> info.stage, info.memory, info.budget_excludes_new_tokens
        ('prompt', 'freed', True)
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
    keeps_by_threshold: bool = False
    trained: bool = False
    transform: str = ""


def combined(name: str, parts: Iterable[PolicyInfo]) -> PolicyInfo:
    """Description of a combination of policies.

    Memory and stage are what all parts agree on, otherwise "freed" and "both". Positions are "cache_rank" only if they
    are in every part.
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
        keeps_by_threshold=any(info.keeps_by_threshold for info in infos),
        trained=any(info.trained for info in infos),
        positions="cache_rank" if all(info.positions == "cache_rank" for info in infos) else "original",
    )


def not_bound(info: PolicyInfo) -> PolicyError:
    """Return the error of a policy whose layers exist only for a model, see `Policy.bind`."""
    return PolicyError(f"{info.name}: the policy is not bound to a model. Use the result of bind(config).")
