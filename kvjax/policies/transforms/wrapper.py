"""Policies around another one, whose cache they keep in another place or form."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from kvjax.config import ModelConfig

from ..base import Policy, changed_fields
from ..info import PolicyInfo


@dataclasses.dataclass(frozen=True)
class Wrapper(Policy):
    """Base of wrappers, which have the info and the budget of the policy within. A combination is wrapped part by part.

    Class attributes:
        transform: what is done to the policy; the wrapper's name begins with it.

    Attributes:
        policy: what is wrapped.
    """

    transform: ClassVar[str] = ""

    policy: Policy

    @property
    def budget(self) -> int | float | None:
        """The budget of the policy within, None if it has none."""
        return getattr(self.policy, "budget", None)

    def with_budget(self, budget: Any) -> Policy:
        return dataclasses.replace(self, policy=self.policy.with_budget(budget))

    @property
    def info(self) -> PolicyInfo:
        inner = self.policy.info
        return dataclasses.replace(inner, name=f"{self.transform}({inner.name})", transform=self.transform)

    def __str__(self) -> str:
        settings = changed_fields(self, dataclasses.fields(self)[1:])
        return f"{self.transform}({'; '.join([str(self.policy), *settings])})"

    def bind(self, config: ModelConfig) -> Policy:
        """Every part of the policy wrapped by itself, but for those that are already."""

        def around(policy: Policy) -> Policy:
            done = policy.info.transform == self.transform
            return policy if done else dataclasses.replace(self, policy=policy)

        return self.policy.bind(config).map(around)

    def map(self, wrap: Callable[[Policy], Policy]) -> Policy:
        return self.policy.map(lambda policy: wrap(dataclasses.replace(self, policy=policy)))

    def validate(self, tokens: int) -> None:
        self.policy.validate(tokens)
