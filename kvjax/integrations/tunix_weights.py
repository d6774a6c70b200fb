"""Weights of tunix's models as kvjax's `Params`: names, layouts, and their exchange without a second copy in memory.

tunix stores projections for einsums: queries [D, N, H], outputs [N, H, D], MLPs [inputs, outputs]. kvjax stores all as
[outputs, inputs], so each matrix is a re-laid copy. The embedding, norms and biases have the same layout in both, and
are shared. D model dim, N heads, H head dim.
"""

import itertools
import math
import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from kvjax.cache import Shard
from kvjax.config import ModelConfig
from kvjax.conversion.tree_config import tunix_config
from kvjax.conversion.tree_layout import tree_layout
from kvjax.conversion.trees import named
from kvjax.models import Params, abstract
from kvjax.models.params import tree_map_named
from kvjax.models.sharding import moved, place

_FAMILIES = {"Llama3": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}
"""Families by the names of tunix's classes."""


def config_of(model: Any) -> ModelConfig:
    """Configuration of a tunix model: `Qwen2`, dense `Qwen3` or `Llama3`.

    Raises:
        ValueError: another model.
    """
    name, given = type(model).__name__, getattr(model, "config", None)
    if name not in _FAMILIES or given is None:
        raise ValueError(f"tunix: {name} is not supported. Use a model of tunix.models.qwen2, qwen3 or llama3.")
    return tunix_config(given, _FAMILIES[name])


def tunix_names(config: ModelConfig) -> dict[str, str]:
    """tunix's names of a model's parameters, by those of kvjax: `layers.3.attn.q` is `layers.3.attn.q_proj.w`."""
    return {tensor.holds[0]: name for name, tensor in tree_layout(config, "tunix").items()}


class Weights:
    """kvjax's weights of a tunix model.

    Args:
        config: the model's configuration.
        state: all parameters of the model, as `nnx.state(model, nnx.Param)`.
        dtype: type of kvjax's weights. Parameters of another type are converted, and then not shared.
        shard: the devices.
        device: the device, where there is no mesh.

    Raises:
        ValueError: as `update`.
    """

    def __init__(self, config: ModelConfig, state: Any, dtype: Any, shard: Shard, device: Any) -> None:
        self._shapes, self._shard, self._device = abstract(config, dtype), shard, device
        self._names = tunix_names(config)
        self._own: dict[str, Any] = {}  # arrays that the model does not share
        self.params: Params = self.update(state)

    def update(self, state: Any) -> Params:
        """Replace the weights.

        Each matrix is freed before its successor is made, so memory never holds two sets. The former `params` cannot be
        used any more.

        Raises:
            ValueError: the names or shapes are not those of the model. Nothing has changed then.
        """
        given = named(state)
        self._check(given)

        def replaced(name: str, to: jax.ShapeDtypeStruct) -> Any:
            if (old := self._own.pop(name, None)) is not None:
                old.delete()
            source = array = given[self._names[name]]
            if self._shard.mesh is None:  # not copied if it is there
                array = moved(array, SingleDeviceSharding(self._device))
            is_own = False
            if len(to.shape) == 2 and name != "embed":
                array, is_own = _relaid(array, to.shape, to.dtype), True
            elif array.dtype != to.dtype:
                array, is_own = array.astype(to.dtype), True
            if self._shard.mesh is not None:
                array = place(self._shard, name, array)
            # On a device that both have, an array that was only moved may share the trainer's buffer.
            if is_own or array.devices().isdisjoint(source.devices()):
                self._own[name] = array
            return array

        self.params = tree_map_named(replaced, self._shapes)
        return self.params

    def _check(self, given: Mapping[str, Any]) -> None:
        wanted: dict[str, tuple[str, Any]] = {}
        tree_map_named(lambda name, shape: wanted.setdefault(self._names[name], (name, shape)), self._shapes)
        if missing := sorted(wanted.keys() - given.keys()):
            raise ValueError(
                f"tunix: the parameters have no {missing[0]!r}{_more(missing)}. Pass all parameters, as of "
                "nnx.state(model, nnx.Param)."
            )
        if unknown := sorted(given.keys() - wanted.keys()):
            raise ValueError(
                f"tunix: the parameter {unknown[0]!r}{_more(unknown)} has no counterpart. LoRA is not supported: merge "
                "adapters into the weights."
            )
        for name, (own, shape) in wanted.items():
            outputs, *inputs = shape.shape
            size = given[name].shape
            fits = size == shape.shape
            if inputs and own != "embed":  # [D, N, H], [N, H, D] or [inputs, outputs]
                fits = _joined(size, inputs[0], outputs)
            if not fits:
                raise ValueError(f"tunix: {name} has the shape {size}, which is not that of the model's configuration.")


def _joined(size: tuple[int, ...], inputs: int, outputs: int) -> bool:
    """Whether leading axes are the inputs and the other axes the outputs."""
    return math.prod(size) == inputs * outputs and inputs in itertools.accumulate(size, operator.mul)


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


@partial(jax.jit, static_argnums=(1, 2))
def _relaid(array: Any, shape: tuple[int, int], dtype: Any) -> Any:
    return jnp.reshape(array, shape[::-1]).T.astype(dtype)
