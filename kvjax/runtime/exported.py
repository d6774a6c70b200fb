"""`kvjax.export`: prefill and a decode step as programs that run without kvjax.

    exported = kvjax.export(params, "treekv", 1024, prompt_len=8192)
    exported.save("programs")

Another process deserialises them with `jax.export`. It needs neither kvjax nor the policy's classes: inputs and outputs
are flat lists of arrays.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import Array

from kvjax._util.extras import optional
from kvjax.cache import LayerSpec
from kvjax.config import ModelConfig
from kvjax.models import Params
from kvjax.models.params import name_of, without_text
from kvjax.policies import Policy, PolicyError
from kvjax.runtime import decoding
from kvjax.runtime.engine import Engine
from kvjax.runtime.reading import read_prompts

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""Platforms that programs can be exported for."""


@dataclasses.dataclass(frozen=True, repr=False)
class Exported:
    """Exported programs of a model with a policy's cache. Made by `kvjax.export`.

    B rows, T places of a padded prompt, V vocabulary. The weights come first in the arguments of both programs, in the
    order of `weights`. The arrays of the policy's state come last in the results of both, and in the arguments of
    `step`.

    Attributes:
        prefill: `prefill(*weights, tokens [B, T], lengths [B])` returns the logits [B, V] of each row's last token, and
            the state.
        step: `step(*weights, token [B], position [B], *state)` returns the logits [B, V] after one more token per row,
            and the state. The position of the first token after a prompt is its length.
        weights: name of each weight.
        state: name of each array of the state.
        max_new_tokens: maximum number of steps.
    """

    prefill: jax.export.Exported
    step: jax.export.Exported
    weights: tuple[str, ...]
    state: tuple[str, ...]
    max_new_tokens: int

    def __repr__(self) -> str:
        """Sizes and platforms."""
        rows, size = self.prefill.in_avals[len(self.weights)].shape
        return (
            f"Exported(batch={rows}, prompt_len={size}, max_new_tokens={self.max_new_tokens}, {len(self.weights)} weights, "
            f"{len(self.state)} arrays of state, platforms={self.prefill.platforms})"
        )

    def save(self, folder: str | Path) -> None:
        """Write `prefill.bin`, `step.bin` and `programs.json`, which has names, shapes and types of all arrays.

        Weights are not written. Save them in the order of `weights`, which is that of `jax.tree.leaves(params)`.

        Args:
            folder: the folder, which is made if it does not exist.

        Raises:
            ImportError: the package flatbuffers is not installed, which `jax.export` writes with.
        """
        optional("flatbuffers", "writing exported programs", "export")
        folder = Path(folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        for name, program in (("prefill", self.prefill), ("step", self.step)):
            (folder / f"{name}.bin").write_bytes(program.serialize())
        count = len(self.weights)
        told = {
            "max_new_tokens": self.max_new_tokens,
            "platforms": self.prefill.platforms,
            "weights": _described(self.weights, self.prefill.in_avals[:count]),
            "prefill": _described(("tokens", "lengths"), self.prefill.in_avals[count:]),
            "step": _described(("token", "position", *self.state), self.step.in_avals[count:]),
            "results": _described(("logits", *self.state), self.prefill.out_avals),
        }
        (folder / "programs.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def export(
    model: Params | ModelConfig,
    policy: str | Policy = "full",
    budget: int | float | None = None,
    *,
    batch: int = 1,
    prompt_len: int,
    max_new_tokens: int = 128,
    dtype: Any = None,
    platforms: Sequence[str] | None = None,
) -> Exported:
    """Export prefill and a decode step with `jax.export`, with flat lists of arrays as inputs and outputs.

    The programs use XLA only, without kernels for GPUs and TPUs, so that they run on any device of a platform and with
    later versions of JAX (see `jax.export` for how long).

    Args:
        model: weights, or a model's configuration. The programs take the weights as arguments.
        policy, budget: as for `kvjax.generate`.
        batch: number of rows.
        prompt_len: maximum prompt length in tokens. It is rounded up; pad prompts to the length in `programs.json`.
        max_new_tokens: maximum number of steps. Fractional budgets are of the prompt and `max_new_tokens` tokens.
        dtype: type of the weights, for a configuration; bfloat16 by default.
        platforms: "cpu", "cuda", "rocm" or "tpu". By default that of this process.

    Returns:
        The programs.

    Raises:
        ValueError: a size is out of range, or a platform is unknown.
        PolicyError: the policy does not support these sizes, or keeps a cache in host memory.

    Example:
        >>> exported = kvjax.export(params, "snapkv:window=8", 16, prompt_len=48)
        >>> exported.weights[:2], len(exported.state)
        (('embed', 'layers.0.attn_norm'), 12)
    """
    wanted = None if platforms is None else tuple(platforms)
    if wanted is not None and (not wanted or set(wanted) - set(PLATFORMS)):
        raise ValueError(f"platforms={list(wanted)}; give some of {', '.join(PLATFORMS)}")
    sizes: dict[str, Any] = {"batch": batch, "prompt_len": prompt_len, "max_new_tokens": max_new_tokens}
    engine = Engine(model, policy, budget, **sizes, dtype=dtype)
    if engine.host_cache_bytes:
        raise PolicyError(
            f"{engine.policy.info.name}: programs with caches in host memory cannot be exported. Leave out offloaded."
        )
    bound, specs = engine.policy, engine.specs
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), without_text(engine.weights))
    named, tree = jax.tree.flatten_with_path(params)
    states, kind = jax.tree.flatten_with_path(jax.eval_shape(lambda: _init(bound, specs)))

    def prefill(*arrays: Array) -> list[Array]:
        *weights, tokens, lengths = arrays
        total = lengths + engine.max_new_tokens
        return _flat(read_prompts(bound, specs, tree.unflatten(weights), tokens, lengths, total))

    def step(*arrays: Array) -> list[Array]:
        weights, (token, position, *state) = arrays[: len(named)], arrays[len(named) :]
        return _flat(decoding.step(bound, specs, tree.unflatten(weights), kind.unflatten(state), token, position))

    weights = [leaf for _, leaf in named]
    rows, prompt = _ints(batch), _ints(batch, specs[0].prompt_len)
    export_for: Any = functools.partial(jax.export.export, platforms=wanted)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # for which operations have no kernels
        read = export_for(jax.jit(prefill))(*weights, prompt, rows)
        count = len(named) + 2
        donated = tuple(range(count, count + len(states)))
        one = jax.jit(step, donate_argnums=donated)
        stepped = export_for(one)(*weights, rows, rows, *(leaf for _, leaf in states))
    names = tuple(name_of(path) for path, _ in named), tuple(name_of(path) for path, _ in states)
    return Exported(read, stepped, *names, engine.max_new_tokens)


def register_for_export(state: Any) -> None:
    """Register the classes of a policy's state, so that `jax.export` can write functions that take or return them.

    Call it before `Exported.serialize`, and in another process before `jax.export.deserialize`. Registering a class
    again changes nothing.

    Args:
        state: a state, or its shapes: `jax.eval_shape(layer.init)`.

    Example:
        >>> policy = kvjax.TreeKV(budget=16)
        >>> kvjax.register_for_export(jax.eval_shape(policy.layer(spec).init))
    """
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        for part in state if isinstance(state, tuple | list) else ():
            register_for_export(part)
        return
    cls = type(state)
    for field in dataclasses.fields(state):
        if field.metadata.get("pytree_node", True):
            register_for_export(getattr(state, field.name))
    if cls not in _registered:
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=f"{cls.__module__}.{cls.__qualname__}",
            serialize_auxdata=lambda static: json.dumps(static).encode(),
            deserialize_auxdata=lambda static: _tuples(json.loads(static)),
        )
        _registered.add(cls)


_registered: set[type] = set()


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _init(policy: Policy, specs: Sequence[LayerSpec]) -> tuple[Any, ...]:
    return tuple(policy.layer(spec).init() for spec in specs)


def _flat(result: tuple[Array, tuple[Any, ...]]) -> list[Array]:
    return jax.tree.leaves(result)


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _described(names: Sequence[str], avals: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(aval.shape), "dtype": str(aval.dtype)}
        for name, aval in zip(names, avals, strict=True)
    ]
