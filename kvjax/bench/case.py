"""`Case`: one benchmark measurement, of a model shape, a policy, a context length and a batch size."""

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

KINDS = "float", "int8", "int4", "mxfp4"
"""Kinds of weight matrices."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement. Its fields are the first fields of the result row.

    Attributes:
        policy: a policy's name, the text of a combined policy, or a name that another library's worker knows.
        settings: the policy's hyperparameters. For policies with kinds of heads, ``share_LABEL`` is the fraction of
            heads of that kind, spread evenly, as random weights have no profile. ``profile="random"`` uses random query
            statistics.
        context: prompt tokens per sequence.
        batch: number of sequences, or "largest" for the maximum that fits.
        shape: name of a preset.
        new_tokens: tokens decoded per sequence.
        prefill: whether the model prefills the prompt. If not, the cache is filled without the model (see `states`),
            and there is no time to first token.
        dtype: type of weights and cache.
        layers: number of layers to use; None for all.
        weights: kind of all matrices, including embedding and head: "float" (of `dtype`), "int8" or "int4".
            "mxfp4" is for experts alone, beside floats.
        program: the worker that measures the case.
        mesh: mesh to run on, such as "model=2" (see `Engine`); "" for one device. Bytes and bandwidth bound of the row
            are then per device.
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
        """The model's configuration."""
        config = PRESETS[self.shape]
        return config if self.layers is None else config.with_depth(self.layers)

    @property
    def shapes(self) -> Params:
        """Shapes of the model's weights.

        Raises:
            ValueError: matrices cannot be of the requested kind.
        """
        return abstract(self.config, self.dtype, weights=self.weights, embedding=self.weights)

    def engine(self, model: Params | ModelConfig, batch: int) -> Engine:
        """Engine for `batch` sequences, with weights of the case's shape or for the configuration only.

        Raises:
            PolicyError: the policy does not accept these settings.
        """
        return Engine(
            model,
            self.bound_policy(),
            batch=batch,
            prompt_len=self.context,
            max_new_tokens=self.new_tokens,
            mixed=False,
            dtype=self.dtype,
            mesh=self.mesh or None,
        )

    @property
    def shard(self) -> Shard:
        """How the devices share the model.

        Raises:
            PolicyError: the policy does not accept these settings, or does not support a mesh.
            ValueError: there are too few devices, or the model cannot be sharded over them.
        """
        return policy_shard(self.mesh or None, self.config, self.bound_policy())

    def bound_policy(self) -> Policy:
        """The policy, bound to this model.

        Raises:
            PolicyError: the policy is unknown, or does not accept these settings.
        """
        return bound_policy(self.config, self.policy, self.settings)


def bound_policy(config: ModelConfig, name: str, settings: Mapping[str, Any]) -> Policy:
    """Bind a policy to a model. Fractions of kinds of heads (see `Case`) become labels, and random statistics become numbers.

    Raises:
        PolicyError: the policy is unknown, or does not accept these settings.
    """
    if "(" in name:
        return get_policy(name).for_model(config)
    kinds = getattr(policy_class(name), "labels", ())
    shares = {kind: settings[f"share_{kind}"] for kind in kinds if f"share_{kind}" in settings}
    own = {key: value for key, value in settings.items() if key.removeprefix("share_") not in shares}
    if shares:
        own["profile"] = _labels(config, kinds, shares)
    if own.get("profile") == RANDOM:
        own["profile"] = _statistics(config, name)
    return get_policy(name, **own).for_model(config)


def read_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a policy with settings, as `kvjax.policies.text`, plus fractions of kinds of heads: ``catekv:2048,share_adaptive=0.4``.

    A combined policy, such as ``recompress(snapkv:512)``, is returned as text without settings.

    Raises:
        PolicyError: a setting is malformed or does not accept the value.
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
    """Random query statistics: unit magnitudes, and means half as large."""
    shape = len(config.compressed), config.for_policy.num_heads, config.for_policy.head_dim // 2
    angle = np.random.default_rng(0).uniform(0, 2 * np.pi, shape)
    found = np.stack([np.cos(angle) / 2, np.sin(angle) / 2, np.ones(shape)], axis=2)
    return MeanQueries.of(found, method=method, model=fingerprint(config), data=RANDOM, settings=())


def _labels(config: ModelConfig, kinds: Sequence[str], shares: dict[str, float]) -> tuple[tuple[str, ...], ...]:
    """Labels [layer][head]: one label's fraction of all KV heads, spread evenly; the other heads get the other label."""
    label, share = next(iter(shares.items()))
    other = next(kind for kind in kinds if kind != label)
    config = config.for_policy
    counts = [int(i * share) for i in range(config.num_layers * config.num_kv_heads + 1)]
    heads = [label if after > before else other for before, after in itertools.pairwise(counts)]
    size = config.num_kv_heads
    return tuple(tuple(heads[at : at + size]) for at in range(0, len(heads), size))
