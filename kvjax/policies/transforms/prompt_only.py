"""Any method that compresses while decoding, stopped once the prompt is read: the form in which methods for prompts are compared."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token

from ..base import CacheLayer, Carry, Policy
from ..info import PolicyError, PolicyInfo
from .wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class PromptOnly(Wrapper):
    """A policy that compresses a prompt and keeps all that comes after it; made by `prompt_only`.

    Attributes:
        policy: what is kept of a prompt. Its budget is for the prompt alone.
    """

    transform: ClassVar[str] = "prompt_only"

    @property
    def info(self) -> PolicyInfo:
        stage = "none" if self.policy.info.stage == "none" else "prompt"
        return dataclasses.replace(super().info, stage=stage, budget_excludes_new_tokens=True)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        inner = self.policy.layer(spec)
        if inner.when == "never":
            return inner
        if inner.has_own_store or self.policy.info.transform == "offloaded":
            raise PolicyError(
                f"{self.info.name}: {self.policy.info.name!r} keeps its tokens in a store of its own; put prompt_only around the policy "
                "within, as in offloaded(prompt_only(tova))"
            )
        if self.policy.info.positions == "cache_rank":
            return RankedPromptOnlyLayer(self, spec, inner=inner)
        return PromptOnlyLayer(self, spec, inner=inner)


@dataclasses.dataclass(frozen=True)
class PromptOnlyLayer(CacheLayer[PromptOnly]):
    """One layer: what another one leaves of a prompt, in slots of which there are enough for all new tokens.

    Attributes:
        inner: chooses from the prompt.
    """

    inner: CacheLayer[Any] = dataclasses.field(kw_only=True)

    @property
    def max_kept(self) -> int:
        return self.inner.max_kept + max(self.spec.new_tokens, 1)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[LayerCache, Carry]:
        state, carry = self.inner.prefill(prompt, carry)
        kept = self.inner.view(state)
        return cache.extended(kept, self.capacity - kept.pos.shape[-1]), carry


@dataclasses.dataclass(frozen=True)
class RankedPromptOnlyLayer(PromptOnlyLayer):
    """One layer of a policy whose tokens stand at their places among those that are kept; slots are filled in that order."""

    def append(self, state: LayerCache, token: Token) -> LayerCache:
        return cache.insert(state, token, rotated=False)[0]

    def attend(self, state: LayerCache, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], LayerCache, Carry]:
        return cache.attend(self.spec, state, token, ranks=self._ranks(state))[0], state, carry

    @staticmethod
    def _ranks(state: LayerCache) -> tuple[Int[Array, "B K C"], Int[Array, "B K"]]:
        """Where each slot's token, and the newest one, stand."""
        places = jnp.arange(state.pos.shape[-1], dtype=jnp.int32)
        return jnp.broadcast_to(places, state.pos.shape), jnp.maximum(state.next - 1, 0)


def prompt_only(policy: Policy, budget: int | float | None = None) -> PromptOnly:
    """Compress the prompt as a policy does, and keep all that is read and written after it: `prompt_only(TOVA(budget=512))`.

    Methods that evict while they decode, TOVA, H2O, KeyDiff, StreamingLLM and TreeKV among them, then hold their budget of the prompt and
    every new token, as methods for prompts do (SnapKV, say), and as kvpress' presses do with all methods: so these can be
    compared with nothing but what is kept of the prompt between them. A question that is read after the prompt counts as new. A policy that
    does not compress while decoding is as it was.

    Prompts are read whole, as in parts a policy compresses what came before.

    Args:
        policy: what is kept of the prompt.
        budget: the policy's budget, if it is to be another.
    """
    return PromptOnly(policy if budget is None else policy.with_budget(budget))
