"""What only some methods can do: small protocols that a layer declares by its `Traits`, and what is done for layers that do not.

Nothing here looks at what class a policy or a state is of.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax._util.any_rank import any_rank
from kvjax.cache import LayerCache, Prompt, TokenBlock, attend_prompt, in_rows, kept_and_block

from .base import Carry, Layer, State
from .info import PolicyError
from .replay import without_model

Queries = Callable[[], Float[Array, "B N H"]]
"""Gives the unrotated queries that a layer would have for the attention input of the one before it; computed if it is called."""


class LooksAhead(Protocol):
    """A layer that prepares for its queries while the layer before it is computed (`Traits.looks_ahead`)."""

    def look_ahead(self, queries: Queries, position: Int[Array, " B"], carry: Carry) -> Carry:
        """What it tells itself, called between the layer before it and itself."""
        ...


class ReadsBlocks(Protocol):
    """A layer that reads a text in blocks (`Traits.reading` is "blocks")."""

    def read_block(self, state: State, block: TokenBlock, carry: Carry) -> tuple[Float[Array, "B S N H"], State, Carry]:
        """The attention of a block's tokens, over what is kept and, causally, over the block; and the state after it.

        From both together the method's own rule chooses what stays. One block that holds a whole prompt is `prefill`; of a method
        that compresses while it decodes, one token is `append`, `attend` and `compress`. Rows without a token are as they were.
        """
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


class InParts(Protocol):
    """A layer made of others, each of which has some of the KV heads and a state of its own (`Traits.in_parts`)."""

    def map_parts(self, change: Callable[[Layer[Any]], Layer[Any]]) -> Layer[Any]:
        """The same with every one of these changed."""
        ...


def read_block(
    layer: Layer[Any], state: State, block: TokenBlock, carry: Carry
) -> tuple[Float[Array, "B S N H"], State, Carry]:
    """Read a block of a text, see `ReadsBlocks`; token by token in a layer that reads it so.

    Raises:
        PolicyError: the layer chooses from a whole prompt.
    """
    check_reads_blocks(layer)
    if layer.traits.reading == "blocks":
        return cast(ReadsBlocks, layer).read_block(state, block, carry)

    def one(state: State, given: Any) -> tuple[State, Array]:
        token, there = given
        out, new, _ = layer.attend(layer.append(state, token), token, {})
        return in_rows(there, layer.compress(new), state), out

    state, out = jax.lax.scan(one, state, (block.by_token(), jnp.swapaxes(block.mask, 0, 1)))
    return jnp.swapaxes(out, 0, 1), state, carry


def read_as_prompt(
    layer: Layer[Any], state: State, block: TokenBlock, carry: Carry, *, rotated: bool = True
) -> tuple[Float[Array, "B S N H"], State, Carry]:
    """`ReadsBlocks.read_block` of layers whose `prefill` chooses from what is kept and a block as it does from a prompt.

    Args:
        rotated: see `kept_and_block`.
    """
    prompt = kept_and_block(as_cache(layer, state), block, rotated=rotated)
    new, carry = layer.prefill(prompt, carry)
    return attend_prompt(layer.spec, prompt), in_rows(block.count > 0, new, state), carry


def check_reads_blocks(layer: Layer[Any]) -> None:
    """Raise `PolicyError` unless a layer can read a text in blocks."""
    if layer.traits.reading == "whole":
        raise PolicyError(
            f"{layer.policy.info.name} chooses from the prompt as a whole, which therefore cannot be read in blocks; leave prefill_block "
            "out, or take another policy, such as snapkv, treekv or chelsea"
        )


@any_rank
def prefill(layer: Layer[Any], prompt: Prompt, carry: Carry) -> tuple[State, Carry]:
    """`Layer.prefill` of a layer alone, also of one that wants parts of its prompt read again (`Traits.replays`).

    Of those it is given what it had when it read them first, as there is no model that could (`replay.without_model`), nor one
    around it (`surroundings.Surroundings`).
    """
    for replay in layer.traits.replays:
        carry = replay.told(layer.spec.layer, without_model(replay, layer.spec, prompt), carry, layer.key)
    return layer.prefill(prompt, carry)


def look_ahead(layer: Layer[Any], queries: Queries, position: Int[Array, " B"], carry: Carry) -> Carry:
    """`LooksAhead.look_ahead` of layers that have it."""
    return cast(LooksAhead, layer).look_ahead(queries, position, carry) if layer.traits.looks_ahead else carry


def needs_compression(layer: Layer[Any], state: State) -> Bool[Array, " B"]:
    """Of a layer that compresses when it is full: in which rows that is so now."""
    return cast(WhenFull, layer).needs_compression(state)


@any_rank
def as_cache(layer: Layer[Any], state: State) -> LayerCache:
    """One layer's slots in all its KV heads, for looking at what is kept."""
    return cast(HasOwnStore, layer).as_cache(state) if layer.traits.has_own_store else state.cache
