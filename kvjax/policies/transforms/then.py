"""`then`: a policy that evicts from a prompt, followed by one whose queries read a selection of what is left."""

import dataclasses
from typing import Any, cast

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, layer_specs
from kvjax.config import NO_ROPE, ModelConfig

from ..base import Policy
from ..families.scoring import PromptScorerLayer
from ..info import PolicyError, PolicyInfo, combined
from ..layer import CacheLayer, Carry, State


@dataclasses.dataclass(frozen=True)
class Then(Policy):
    """An evicting policy and then a selecting one, made by `then`.

    Attributes:
        first: evicts tokens of the prompt.
        second: selects what a query reads of the tokens that are left.
    """

    first: Policy
    second: Policy

    @property
    def budget(self) -> int | float | None:
        """The budget of the first policy, which is what is kept of the prompt. None if it has none."""
        return getattr(self.first, "budget", None)

    @property
    def info(self) -> PolicyInfo:
        return combined("then", (self.first.info, self.second.info))

    def __str__(self) -> str:
        return f"then({self.first}; {self.second})"

    def bind(self, config: ModelConfig) -> "Then":
        bound = Then(self.first.bind(config), self.second.bind(config))
        for spec in layer_specs(config, 1, 64, 64, jnp.float32):
            bound.layer(spec)  # raises if the policies do not go together
        return bound

    def with_budget(self, budget: Any) -> "Then":
        return dataclasses.replace(self, first=self.first.with_budget(budget))

    def validate(self, tokens: int) -> None:
        self.first.validate(tokens)
        self.second.validate(tokens)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        first = self.first.layer(spec)
        if not first.chooses_evenly:
            raise PolicyError(
                f"{self.info.name}: {first.policy.info.name!r} does not keep the same number of a prompt's tokens in each head. Begin with "
                "a policy that does, such as snapkv, pyramidkv or expected_attention."
            )
        if spec.window is not None:
            raise PolicyError(f"{self.info.name}: layers with a sliding window are not supported. Use {self.first}.")
        kept = min(first.max_kept - spec.new_tokens, spec.prompt_len)
        second = self.second.layer(dataclasses.replace(spec, prompt_len=kept, rope=NO_ROPE, block=0))
        if second.attention == "dense":
            return first
        if not second.selects_slots:
            raise PolicyError(
                f"{self.info.name}: {second.policy.info.name!r} does not select from a cache of rotated keys. End with quest."
            )
        return ThenLayer(self, spec, first=cast(PromptScorerLayer[Any], first), second=second)


@flax.struct.dataclass
class Staged:
    """The cache of the second policy, in which a token's position is its rank. B rows, K KV heads, P slots of the prompt.

    Attributes:
        inner: the second policy's state.
        pos: original positions of the prompt's kept tokens, -1 elsewhere.
        dropped: number of evicted tokens of each row.
    """

    inner: State
    pos: Int[Array, "B K P"]
    dropped: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class ThenLayer(CacheLayer[Then]):
    """One layer of `Then`.

    Attributes:
        first: chooses from the prompt.
        second: a layer for the tokens that are left, whose positions are their ranks, with keys that are rotated already.
    """

    first: PromptScorerLayer[Any] = dataclasses.field(kw_only=True)
    second: CacheLayer[Any] = dataclasses.field(kw_only=True)

    @property
    def max_kept(self) -> int:
        return self.second.max_kept

    @property
    def needs_context(self) -> bool:
        return self.first.needs_context

    @property
    def reduces_heads(self) -> bool:
        return self.first.reduces_heads

    @property
    def bytes_read(self) -> int:
        return self.second.bytes_read

    def init(self, total: Int[Array, " B"] | None = None) -> Staged:
        spec = self.second.spec
        pos = jnp.full((spec.batch, spec.num_kv_heads, spec.prompt_len), -1, jnp.int32)
        return Staged(self.second.init(total), pos, jnp.zeros(spec.batch, jnp.int32))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[Staged, Carry]:
        keep, carry = self.first.chosen(prompt, carry)
        size = self.second.spec.prompt_len
        kept, _ = cache.keep(self.spec, size, prompt, keep)
        lengths = kept.next[:, 0]  # of every head
        dropped = prompt.seen.astype(jnp.int32) - lengths
        k, v = (jnp.swapaxes(x, 1, 2) for x in (kept.k, kept.v))
        rank = jnp.arange(size, dtype=jnp.int32)
        places = jnp.where(rank < lengths[:, None], rank, -1)[:, None]
        q = prompt.q_rotated[:, :size]  # of no use without the tokens' own positions
        left = PromptKV(q, k, v, q, k, places, lengths, lengths, prompt.total.astype(jnp.int32) - dropped)
        inner, carry = self.second.prefill(left, carry)
        return Staged(inner, kept.pos, dropped), carry

    def append(self, state: Staged, token: Token) -> Staged:
        return dataclasses.replace(state, inner=self.second.append(state.inner, self._ranked(state, token)))

    def attend(self, state: Staged, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], Staged, Carry]:
        out, inner, carry = self.second.attend(state.inner, self._ranked(state, token), carry)
        return out, dataclasses.replace(state, inner=inner), carry

    def view(self, state: Staged) -> LayerCache:
        held = self.second.view(state.inner)
        places = [(0, 0), (0, 0), (0, held.pos.shape[-1] - state.pos.shape[-1])]
        own = jnp.pad(state.pos, places, constant_values=-1)
        pos = jnp.where(own >= 0, own, held.pos + state.dropped[:, None, None])
        return dataclasses.replace(held, pos=jnp.where(held.live, pos, -1), seen=held.seen + state.dropped)

    def _ranked(self, state: Staged, token: Token) -> Token:
        """The token with its rank as its position. Its query and key are rotated to its original position."""
        rank = token.position - state.dropped
        return Token(token.q_rotated, token.k_rotated, token.v, rank, NO_ROPE, token.live)


def then(first: Policy, second: Policy) -> Then:
    """Evict from the prompt, and let queries read a selection of the rest: `then(SnapKV(budget=0.25), Quest(budget=256))`.

    These are the two stages of RocketKV (Behnam et al. 2025): eviction saves memory, and selection saves bandwidth. The
    first policy chooses from the prompt. The second one forms pages of the tokens that are left, in order, and of new
    ones, separately in each head. In layers where the second policy reads everything, the first works alone.

    A budget given beside the combination is the first policy's. A fraction as the second's budget is of the tokens that
    are left, and of new ones. Prompts are prefilled whole.

    Args:
        first: keeps each head's highest scores of a prompt: snapkv, pyramidkv, expected_attention, compactor, or your own.
        second: quest, or your own policy of a `SparseLayer` that selects by rotated keys.

    Raises:
        PolicyError: (once a model is known) the policies do not go together, or a layer has a sliding window.
    """
    return Then(first, second)
