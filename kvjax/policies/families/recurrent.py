"""`RecurrentLayer`: the state of a layer that has no keys and values to cache."""

import dataclasses
from typing import NoReturn

from jaxtyping import Array, Int

from kvjax import cache
from kvjax.cache import LayerCache, PromptKV, Token, TokenBlock

from ..info import PolicyError
from ..layer import CacheLayer, Carry, P, Reads, State


@dataclasses.dataclass(frozen=True)
class RecurrentLayer(CacheLayer[P]):
    """The state of a recurrent layer, which the model computes. No policy changes it.

    A state is a `kvjax.cache.RecurrentState`. It keeps no tokens, and takes part in everything that states of cached
    layers do: rows of a batch, chunked prefill, sessions, saving, and meshes.
    """

    @property
    def reads(self) -> Reads:
        return "blocks"

    @property
    def has_own_store(self) -> bool:
        return True

    @property
    def shards_slots(self) -> bool:
        return False

    @property
    def max_kept(self) -> int:
        return 0

    def init(self, total: Int[Array, " B"] | None = None) -> State:
        return cache.empty_recurrent(self.spec)

    def view(self, state: State) -> LayerCache:
        """A cache without slots."""
        return cache.empty(self.spec, 0)

    def prefill(self, prompt: PromptKV, carry: Carry) -> NoReturn:
        self._refuse()

    def read_block(self, state: State, block: TokenBlock, carry: Carry) -> NoReturn:
        self._refuse()

    def append(self, state: State, token: Token) -> NoReturn:
        self._refuse()

    def attend(self, state: State, token: Token, carry: Carry) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise PolicyError(
            f"{self.policy.info.name}: layer {self.spec.layer} is recurrent and has no keys and values. Use the layers of "
            "`config.cached`."
        )
