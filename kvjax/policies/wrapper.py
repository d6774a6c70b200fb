"""Wrappers: policies around another one, whose cache they keep in another place or form."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal, Self

from kvjax.cache import LayerSpec
from kvjax.models.config import ModelConfig

from .base import Memory, Policy, Stage


@dataclasses.dataclass(frozen=True)
class Wrapper(Policy):
    """Base of wrappers: what is said of the policy is said of the wrapper, and a composition is wrapped part by part.

    Class attributes:
        verb: what is done to the policy; the wrapper's name begins with it.

    Attributes:
        policy: what is wrapped.
    """

    verb: ClassVar[str] = ""

    policy: Policy

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"{self.verb}({self.policy.name})"

    @property
    def memory(self) -> Memory:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.memory

    @property
    def stage(self) -> Stage:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.stage

    @property
    def grows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.grows

    @property
    def merges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.merges

    @property
    def adds(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.adds

    @property
    def positions(self) -> Literal["original", "cache"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.positions

    def admit(self, policy: Policy) -> None:
        """Raise `PolicyError` if a policy of one part cannot be wrapped."""

    def bind(self, config: ModelConfig) -> Policy:
        """Every part of the policy wrapped by itself, but for those that are already."""
        return self.policy.bind(config).each(self._around)

    def each(self, wrap: Callable[[Policy], Policy]) -> Policy:
        return self.policy.each(lambda policy: wrap(dataclasses.replace(self, policy=policy)))

    def check(self, tokens: int) -> None:
        self.policy.check(tokens)

    def recalls(self, spec: LayerSpec) -> bool:
        return self.policy.recalls(spec)

    def capacity(self, spec: LayerSpec) -> int:
        return self.policy.capacity(spec)

    def _around(self, policy: Policy) -> Policy | Self:
        if isinstance(policy, type(self)):
            return policy
        self.admit(policy)
        return dataclasses.replace(self, policy=policy)
