"""`prompt_only`: any policy without its compression during decoding, to compare what policies keep of a prompt."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token

from ..base import Policy
from ..info import PolicyError, PolicyInfo
from ..layer import CacheLayer, Carry
from .wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class PromptOnly(Wrapper):
    """A policy that compresses a prompt and keeps all new tokens, made by `prompt_only`.

    Attributes:
        policy: compresses the prompt. Its budget is for the prompt alone.

    Example:
        >>> policy = kvjax.policies.PromptOnly(kvjax.TreeKV(budget=64))
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('prompt_only(treekv:budget=64)', 0.43)
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
                f"{self.info.name}: the store of {self.policy.info.name!r} is not a LayerCache. Put prompt_only around the policy within, "
                "as in offloaded(prompt_only(tova))."
            )
        if self.policy.info.positions == "cache_rank":
            return RankedPromptOnlyLayer(self, spec, inner=inner)
        return PromptOnlyLayer(self, spec, inner=inner)


@dataclasses.dataclass(frozen=True)
class PromptOnlyLayer(CacheLayer[PromptOnly]):
    """A layer that keeps what another one keeps of a prompt, with slots for all new tokens.

    Attributes:
        inner: chooses from the prompt.
    """

    inner: CacheLayer[Any] = dataclasses.field(kw_only=True)

    @property
    def max_kept(self) -> int:
        return self.inner.max_kept + max(self.spec.new_tokens, 1)

    @property
    def needs_context(self) -> bool:
        return self.inner.needs_context

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[LayerCache, Carry]:
        state, carry = self.inner.prefill(prompt, carry)
        kept = self.inner.view(state)
        return cache.extended(kept, self.capacity - kept.pos.shape[-1]), carry


@dataclasses.dataclass(frozen=True)
class RankedPromptOnlyLayer(PromptOnlyLayer):
    """One layer of a policy whose tokens have their ranks as positions. Slots are filled in that order."""

    def append(self, state: LayerCache, token: Token) -> LayerCache:
        return cache.insert(state, token, rotated=False)[0]

    def attend(self, state: LayerCache, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], LayerCache, Carry]:
        return cache.attend(self.spec, state, token, ranks=self._ranks(state))[0], state, carry

    @staticmethod
    def _ranks(state: LayerCache) -> tuple[Int[Array, "B K C"], Int[Array, "B K"]]:
        """Rank of each slot's token, and of the newest token."""
        places = jnp.arange(state.pos.shape[-1], dtype=jnp.int32)
        return jnp.broadcast_to(places, state.pos.shape), jnp.maximum(state.next - 1, 0)


def prompt_only(policy: Policy, budget: int | float | None = None) -> PromptOnly:
    """Compress the prompt as a policy does, and keep all later tokens: `prompt_only(TOVA(budget=512))`.

    Methods that evict while they decode, such as TOVA, H2O, KeyDiff, StreamingLLM and TreeKV, then keep their budget of
    the prompt and every new token, as SnapKV does. kvpress' presses do the same for all methods. The methods then
    differ only in what they keep of the prompt. A question after the prompt counts as new tokens. A policy that does
    not compress while decoding stays as it is.

    Chunked prefill is not supported, because policies compress earlier blocks during it.

    Args:
        policy: compresses the prompt.
        budget: replaces the policy's budget if given.

    Example:
        >>> str(kvjax.prompt_only(kvjax.TOVA(budget=512)))
        'prompt_only(tova:budget=512)'
    """
    return PromptOnly(policy if budget is None else policy.with_budget(budget))
