"""What tests know of a policy: its published hyperparameters, sizes for short prompts, and how long its tests take.

Each module `oracle_*.py` has the facts of its policies in a dictionary `FACTS`, by name. `BLOCKS` has its cases of chunked prefill for
`test_blocks.py`, by name: the oracle of a row, hyperparameters, query heads, and KV heads.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Options = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts of one policy.

    Attributes:
        published: default hyperparameters by the paper, or where it is silent, by its code.
        least: the minimum of each hyperparameter.
        budgets: minimum budgets, each with the hyperparameters that it follows from.
        small: hyperparameters for prompts of up to 54 tokens, besides the usual ones (`driver.USUAL`). With large ones a method may have
            nothing to do in the tests, and they pass.
        bounds: whole numbers that may be larger than these prompts and still act on them.
        golden: hyperparameters of its golden values (`golden_values.py`).
        tier: of the tests that run for every policy: "slow" if it is built from the same parts as others, "long" if its own tests see all
            that is its own.
        whole_prompts: whether it refuses `prefill_block`.
    """

    published: Options = dataclasses.field(default_factory=dict)
    least: Options = dataclasses.field(default_factory=dict)
    budgets: tuple[tuple[Options, int], ...] = ()
    small: Options = dataclasses.field(default_factory=dict)
    bounds: tuple[str, ...] = ()
    golden: Options = dataclasses.field(default_factory=dict)
    tier: Literal["default", "slow", "long"] = "default"
    whole_prompts: bool = False


def all_facts() -> dict[str, Facts]:
    """The facts of each policy that has some, by its name."""
    return _of_oracles("FACTS")


def facts_of(name: str) -> Facts:
    """The facts of a policy; of one without any, those of a policy that has nothing to declare."""
    return all_facts().get(name, Facts())


def block_cases() -> dict[str, tuple[Callable[..., Any], Options, int, int]]:
    """The cases of chunked prefill that oracles have themselves, by name."""
    return _of_oracles("BLOCKS")


@functools.cache
def _of_oracles(variable: str) -> dict[str, Any]:
    """The entries of a dictionary that modules of oracles may have, sorted by name."""
    paths = sorted(Path(__file__).parent.glob("oracle_*.py"))
    modules = [importlib.import_module(f"policies.{path.stem}") for path in paths]
    found = {name: entry for module in modules for name, entry in getattr(module, variable, {}).items()}
    return dict(sorted(found.items()))
