"""The support matrix of policies, generated from their layers and from what a TPU's compiler has compiled."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from docutils.parsers.rst import Directive
from jax.sharding import AbstractDevice, AbstractMesh
from sphinx.application import Sphinx

from benchmarks import report
from kvjax.cache import LayerSpec, Token
from kvjax.cache.spec import layer_specs
from kvjax.config import PRESETS, ModelConfig
from kvjax.policies import CacheLayer, Policy, PolicyError, get_policy, offloaded, policies, quantized, recompress

from .methods import parsed

CONFIG, LARGE = PRESETS["smollm2-135m"], PRESETS["llama-3.1-8b"]
"""A model that kvjax has the profiles of, and one whose shape kernels are made for."""

GPU, TPU = AbstractDevice("NVIDIA H200", 132, "gpu"), AbstractDevice("TPU v5 lite", 1, "tpu")

HEADS = [
    "policy",
    "chunked prefill",
    "while decoding",
    "`quantized`",
    "`offloaded`",
    "mesh `model`",
    "mesh `sequence`",
    "GPU kernel",
    "TPU kernel",
    "compiles for TPU",
]

BLOCKS = {"whole": "no", "tokens": "token by token", "blocks": "yes"}
"""Kinds of chunked prefill, the weakest first."""


def table() -> str:
    """A row for each policy that needs no published weights."""
    names = [name for name, cls in policies().items() if not cls.about.trained]
    rows = [row(name) for name in sorted(names, key=lambda name: (name != "full", name))]
    return report.table(HEADS, rows, "l" * len(HEADS))


def row(name: str) -> list[str]:
    """The cells of one policy."""
    about = policies()[name].about
    policy = get_policy(name, budget=1024) if about.takes_budget else get_policy(name)
    bound = policy.bind(CONFIG)
    layers = [bound.layer(spec) for spec in specs(CONFIG)]
    return [
        f"[`{name}`](/methods/{name}.md)",
        chunked(layers),
        decoding(policy),
        "itself" if about.memory == "quantized" else yes(lambda: quantise(policy)),
        yes(lambda: offload(policy)),
        "slots" if bound.info.heads_coupled else "heads",
        slots(layers),
        kernel(policy, GPU),
        kernel(policy, TPU),
        ", ".join(step["generation"] for step in steps() if step["policy"] == name) or "no",
    ]


@functools.cache
def steps() -> list[dict[str, Any]]:
    """Decode steps that a TPU's compiler has compiled, of policies and chips. A test writes them."""
    return report.read(Path(report.__file__).parent / "results/tpu-steps.json")["rows"]


def specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Layers for a prompt of 4096 tokens in bfloat16."""
    return layer_specs(config, 1, 4096, 512, jnp.bfloat16)


def chunked(layers: list[CacheLayer[Any]]) -> str:
    """How a policy supports chunked prefill: as the weakest of its layers."""
    kinds = [layer.reads for layer in layers]
    return next(text for kind, text in BLOCKS.items() if kind in kinds)


def decoding(policy: Policy) -> str:
    """Whether a policy compresses while it decodes, by itself or with `recompress`."""
    if policy.info.memory != "freed":
        return "keeps all"
    if policy.info.stage in ("decoding", "both"):
        return "yes"
    return "with `recompress`" if yes(lambda: recompress(policy)) == "yes" else "no"


def quantise(policy: Policy) -> None:
    """Make the layers of a policy with a quantised cache.

    Raises:
        PolicyError: the policy's cache cannot be quantised.
    """
    bound = quantized(policy).bind(CONFIG)
    for spec in specs(CONFIG):
        bound.layer(spec)


def offload(policy: Policy) -> None:
    """Make the layers of a policy with its cache in host memory, whether or not this device has any.

    Raises:
        PolicyError: the policy's store cannot be offloaded.
    """
    wrapped = offloaded(policy)
    bound = super(type(wrapped), wrapped).bind(CONFIG)
    for spec in specs(CONFIG):
        bound.layer(spec)


def yes(make: Callable[[], Any]) -> str:
    """Whether something can be made."""
    try:
        make()
    except PolicyError:
        return "no"
    return "yes"


def slots(layers: list[CacheLayer[Any]]) -> str:
    """Whether devices along `sequence` share the slots of a policy's layers."""
    parts: list[CacheLayer[Any]] = []
    for layer in layers:
        layer.map_parts(lambda part: parts.append(part) or part)
    shared = {part.shards_slots for part in parts}
    return "sharded" if shared == {True} else "partly" if True in shared else "replicated"


def kernel(policy: Policy, device: AbstractDevice) -> str:
    """Whether the attention of a decode step, traced for a device that need not be there, calls a kernel."""
    try:
        bound, config = policy.bind(LARGE), LARGE
    except PolicyError:  # kvjax has no profile of its heads
        bound, config = policy.bind(CONFIG), CONFIG
    spec = specs(config)[config.num_layers // 2]
    layer = bound.layer(spec)
    counts = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    heads = [jax.ShapeDtypeStruct((1, count, spec.head_dim), spec.dtype) for count in counts]
    position = jax.ShapeDtypeStruct((1,), jnp.int32)

    def attended(state: Any, q: Any, k: Any, v: Any, position: Any) -> Any:
        token = Token(q, k, v, position, spec.rope)
        carry = layer.look_ahead(lambda: q, position, {})
        return layer.attend(layer.append(state, token), token, carry)[0]

    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = str(jax.make_jaxpr(attended)(jax.eval_shape(layer.init), *heads, position))
    return "yes" if "pallas_call" in traced else "no"


class Support(Directive):
    """The table."""

    def run(self) -> list[Any]:
        return parsed(self, table())


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("support", Support)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
