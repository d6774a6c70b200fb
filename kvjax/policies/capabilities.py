"""What only some methods can do: small protocols that a layer declares by its `Traits`, and what is done for layers that do not.

Nothing here looks at what class a policy or a state is of.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerCache, TokenBlock

from .base import Carry, Layer, State

Queries = Callable[[], Float[Array, "B N H"]]
"""Gives the unrotated queries that a layer would have for the attention input of the one before it; computed if it is called."""


class LooksAhead(Protocol):
    """A layer that prepares for its queries while the layer before it is computed (`Traits.looks_ahead`)."""

    def look_ahead(self, queries: Queries, position: Int[Array, " B"], carry: Carry) -> Carry:
        """What it tells itself, called between the layer before it and itself."""
        ...


class ReadsBlocks(Protocol):
    """A layer that reads several tokens sooner than one after the other (`Traits.reads_blocks`)."""

    def read_block(self, state: State, block: TokenBlock, carry: Carry) -> tuple[Float[Array, "B S N H"], State, Carry]:
        """What `append`, `attend` and `compress` come to for one token after the other; `carry` has every token's, stacked in front."""
        ...


class WhenFull(Protocol):
    """A layer that compresses only now and then (`Traits.compression` is "when_full")."""

    def needs_compression(self, state: State) -> Bool[Array, " B"]:
        """In which rows `compress` has something to do now."""
        ...


class HasOwnStore(Protocol):
    """A layer whose state has keys and values in another form than a `LayerCache` (`Traits.has_own_store`)."""

    def as_cache(self, state: State) -> LayerCache:
        """What is kept, in slots of all the layer's KV heads, for looking at it."""
        ...


def read_block(
    layer: Layer[Any], state: State, block: TokenBlock, carry: Carry
) -> tuple[Float[Array, "B S N H"], State, Carry]:
    """Read S tokens per row: what a piece of a long prompt goes through. See `ReadsBlocks`."""
    if layer.traits.reads_blocks:
        return cast(ReadsBlocks, layer).read_block(state, block, carry)

    def one(state: State, given: Any) -> tuple[State, Any]:
        token, carry = given
        out, state, carry = layer.attend(layer.append(state, token), token, carry)
        return layer.compress(state), (out, carry)

    state, (out, carry) = jax.lax.scan(one, state, (block.by_token(), carry))
    return jnp.swapaxes(out, 0, 1), state, carry


def look_ahead(layer: Layer[Any], queries: Queries, position: Int[Array, " B"], carry: Carry) -> Carry:
    """`LooksAhead.look_ahead` of layers that have it."""
    return cast(LooksAhead, layer).look_ahead(queries, position, carry) if layer.traits.looks_ahead else carry


def needs_compression(layer: Layer[Any], state: State) -> Bool[Array, " B"]:
    """Of a layer that compresses when it is full: in which rows that is so now."""
    return cast(WhenFull, layer).needs_compression(state)


def as_cache(layer: Layer[Any], state: State) -> LayerCache:
    """One layer's slots in all its KV heads, for looking at what is kept."""
    return cast(HasOwnStore, layer).as_cache(state) if layer.traits.has_own_store else state.cache
