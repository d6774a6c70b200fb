"""Policies around another one, whose cache they keep in another place or form."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import ClassVar

from kvjax.config import ModelConfig

from ..base import Policy, changed_fields
from ..info import PolicyInfo


@dataclasses.dataclass(frozen=True)
class Wrapper(Policy):
    """Base of wrappers: what is said of the policy is said of the wrapper, and a combination is wrapped part by part.

    Class attributes:
        transform: what is done to the policy; the wrapper's name begins with it.

    Attributes:
        policy: what is wrapped.
    """

    transform: ClassVar[str] = ""

    policy: Policy

    @property
    def info(self) -> PolicyInfo:
        inner = self.policy.info
        return dataclasses.replace(inner, name=f"{self.transform}({inner.name})", transform=self.transform)

    def __str__(self) -> str:
        return transform_text(self.transform, self.policy, self)

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


def transform_text(transform: str, policy: Policy, settings: Policy, without: Iterable[str] = ()) -> str:
    """A transform of a policy as `get_policy` reads it; the settings are all fields but the first, and those `without` which it is."""
    fields = [field for field in dataclasses.fields(settings)[1:] if field.name not in without]
    return f"{transform}({'; '.join([str(policy), *changed_fields(settings, fields)])})"
