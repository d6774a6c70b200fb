"""Identifies which model, policy and sizes a decoding state belongs to, so that engines can refuse others."""

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np

from kvjax._util.arguments import short
from kvjax.cache import LayerSpec, Shard
from kvjax.config import ModelConfig
from kvjax.models import Params
from kvjax.policies import Policy

SAMPLED = 8
"""Numbers of the embedding's first row in a sample of the weights."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of a decoding state.

    Attributes:
        policy: the policy, bound to the model.
        specs: static description of each layer's cache, unsharded and without the size of prefill blocks.
        config: the model's configuration.
        shard: how devices share the state; None for a saved state.
        weights: hash of a few of the model's weights, see `sample_of`.
    """

    policy: Policy
    specs: tuple[LayerSpec, ...]
    config: ModelConfig
    shard: Shard | None
    weights: str | None

    def __repr__(self) -> str:
        """Short, as JAX prints it with the structure of a state."""
        return f"Origin({self.config.family}, {short(str(self.policy))})"


def check_same_origin(given: Origin, own: Origin) -> None:
    """Raise `ValueError` unless a state with origin `given` can continue in an engine with origin `own`."""
    if given == own:
        return
    unknown = given.weights is None or own.weights is None
    other = given.specs[0], own.specs[0]
    differences = [
        (given.config != own.config, f"of a {given.config.family} model of another shape"),
        (not unknown and given.weights != own.weights, "of a model with other weights"),
        (given.policy != own.policy, f"of the policy {short(str(given.policy))}, not {short(str(own.policy))}"),
        (other[0].batch != other[1].batch, f"of {other[0].batch} rows, not {other[1].batch}"),
        (
            (other[0].prompt_len, other[0].new_tokens) != (other[1].prompt_len, other[1].new_tokens),
            f"for prompts of {other[0].prompt_len} and {other[0].new_tokens} new tokens, not {other[1].prompt_len} and {other[1].new_tokens}",
        ),
        (other[0].dtype != other[1].dtype, f"in {other[0].dtype.name}, not {other[1].dtype.name}"),
        (given.shard != own.shard, "of other devices, which need `save` and `resume`"),
    ]
    told = [text for differs, text in differences if differs]
    if not told and (given.specs == own.specs):
        return
    raise ValueError(
        f"this state is {', and '.join(told or ['of other sizes, or of another rotation'])}; give it to the engine that made it, or to "
        "one of the same model, policy, budget and sizes"
    )


def sample_of(weights: Params) -> str | None:
    """Hash of the last norm and the start of the embedding, which differs between models of the same shape.

    None for shapes, and if another process holds these weights.
    """
    digest = hashlib.sha256()
    for leaf in (weights.norm, jax.tree.leaves(weights.embed)[0]):
        part = _beginning(leaf)
        if part is None:
            return None
        digest.update(part.tobytes())
    return digest.hexdigest()[:16]


def _beginning(x: Any) -> np.ndarray | None:
    """First numbers of an array's first row, if this process holds them."""
    if isinstance(x, np.ndarray):
        return x.reshape(-1, x.shape[-1])[0, :SAMPLED]
    if not isinstance(x, jax.Array):
        return None
    for shard in x.addressable_shards:
        if not any(index.start for index in shard.index):
            data = shard.data
            if next(iter(data.devices())).platform != "cpu":  # only memory of a CPU is read without a copy
                data = data[(*(slice(1),) * (data.ndim - 1), slice(SAMPLED))]
            found = np.asarray(data)
            return found.reshape(-1, found.shape[-1])[0, :SAMPLED]
    return None
