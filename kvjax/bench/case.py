"""One measurement to make: a model shape, a policy, a length, a batch."""

import dataclasses
import itertools
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from kvjax.cache import Shard
from kvjax.config import PRESETS, ModelConfig
from kvjax.models import Params, abstract
from kvjax.policies import Policy, get_policy, policy_class
from kvjax.policies.families.trigonometry import MeanQueries
from kvjax.policies.profile import fingerprint
from kvjax.policies.text import naming, parse_policy, parse_settings, split
from kvjax.runtime.engine import Engine
from kvjax.runtime.mesh import policy_shard

LARGEST = "largest"

RANDOM = "random"

KINDS = "float", "int8", "int4"
"""What matrices are held in."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured; its fields open the row of the result.

    Attributes:
        policy: a policy's name, the text of one that is made of others, or what a peer's worker knows by that name.
        settings: its hyperparameters. For policies that have kinds of heads, ``share_LABEL`` is the share of heads that are of
            that kind, spread evenly, as random weights have no profile. ``profile="random"`` are random statistics of queries.
        context: tokens of prompt in each row.
        batch: rows, or "largest" for as many as fit.
        shape: name of a preset.
        new_tokens: tokens that are decoded in each row.
        prefill: whether the model reads the prompt. If not, the cache is filled without it (see `states`) and there is no
            time to first token.
        dtype: type of weights and cache.
        layers: of the model only so many; None for all.
        weights: what all matrices are held in, embedding and head among them: "float" (of `dtype`), "int8" or "int4".
        program: which worker measures it.
        mesh: the devices that it runs over, such as "model=2" (see `Engine`); "" for one. Then what a row says of bytes, and the floor, is
            of each device.
    """

    policy: str
    settings: dict[str, Any]
    context: int
    batch: int | Literal["largest"]
    shape: str
    new_tokens: int = 320
    prefill: bool = True
    dtype: str = "bfloat16"
    layers: int | None = None
    weights: str = "float"
    program: str = "kvjax"
    mesh: str = ""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        config = PRESETS[self.shape]
        return config if self.layers is None else dataclasses.replace(config, num_layers=self.layers, windows=())

    @property
    def shapes(self) -> Params:
        """The shapes of its weights.

        Raises:
            ValueError: matrices cannot be held so.
        """
        return abstract(self.config, self.dtype, weights=self.weights, embedding=self.weights)

    def engine(self, model: Params | ModelConfig, batch: int) -> Engine:
        """What runs it in so many rows, with weights of its shape or for the shape alone.

        Raises:
            PolicyError: the policy does not take these settings.
        """
        return Engine(
            model,
            self.bound_policy(),
            batch=batch,
            prompt_len=self.context,
            max_new_tokens=self.new_tokens,
            dtype=self.dtype,
            mesh=self.mesh or None,
        )

    @property
    def shard(self) -> Shard:
        """How the devices share the model.

        Raises:
            PolicyError: the policy does not take these settings, or cannot run over a mesh.
            ValueError: there are not so many devices, or the model cannot be dealt to them.
        """
        return policy_shard(self.mesh or None, self.config, self.bound_policy())

    def bound_policy(self) -> Policy:
        """The policy, for this model.

        Raises:
            PolicyError: there is none such, or it does not take these settings.
        """
        return bound_policy(self.config, self.policy, self.settings)


def bound_policy(config: ModelConfig, name: str, settings: Mapping[str, Any]) -> Policy:
    """A policy for a model of this shape; shares of kinds of heads (see `Case`) are made labels, and random statistics numbers.

    Raises:
        PolicyError: there is none such, or it does not take these settings.
    """
    if "(" in name:
        return get_policy(name).bind(config)
    kinds = getattr(policy_class(name), "labels", ())
    shares = {kind: settings[f"share_{kind}"] for kind in kinds if f"share_{kind}" in settings}
    own = {key: value for key, value in settings.items() if key.removeprefix("share_") not in shares}
    if shares:
        own["profile"] = _labels(config, kinds, shares)
    if own.get("profile") == RANDOM:
        own["profile"] = _statistics(config, name)
    return get_policy(name, **own).bind(config)


def read_policy(text: str) -> tuple[str, dict[str, Any]]:
    """A policy and its settings, as `kvjax.policies.text` has them, and shares of kinds of heads: ``catekv:2048,eta=0.7,share_adaptive=0.4``.

    What is made of other policies, such as ``recompress(snapkv:512)``, is its text, and has no settings besides.

    Raises:
        PolicyError: a setting is not written so, or does not take that value.
    """
    if "(" in text.partition(":")[0]:
        return str(parse_policy(text)), {}
    with naming(text):
        name, colon, settings = text.partition(":")
        cls = policy_class(name)
        types = typing.get_type_hints(cls)
        hints = {f"share_{kind}": float for kind in getattr(cls, "labels", ())}
        hints |= {field.name: types[field.name] for field in dataclasses.fields(cls)}
        return name, parse_settings(text, cls.about.name, hints, split(settings, ",")) if colon else {}


def _statistics(config: ModelConfig, method: str) -> MeanQueries:
    """Of queries of size one, whose means are half as large."""
    shape = config.num_layers, config.num_heads, config.head_dim // 2
    angle = np.random.default_rng(0).uniform(0, 2 * np.pi, shape)
    found = np.stack([np.cos(angle) / 2, np.sin(angle) / 2, np.ones(shape)], axis=2)
    return MeanQueries.of(found, method=method, model=fingerprint(config), data=RANDOM, settings=())


def _labels(config: ModelConfig, kinds: Sequence[str], shares: dict[str, float]) -> tuple[tuple[str, ...], ...]:
    """[layer][head]: one label's share of all KV heads, spread evenly, and the other label."""
    label, share = next(iter(shares.items()))
    other = next(kind for kind in kinds if kind != label)
    counts = [int(i * share) for i in range(config.num_layers * config.num_kv_heads + 1)]
    heads = [label if after > before else other for before, after in itertools.pairwise(counts)]
    size = config.num_kv_heads
    return tuple(tuple(heads[at : at + size]) for at in range(0, len(heads), size))
