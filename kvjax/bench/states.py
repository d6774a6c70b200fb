"""Fills caches without the model, to measure decoding at a context length without the time of a prefill."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from kvjax._util.randomness import random_key
from kvjax.cache import LayerSpec, PromptKV, host_memory
from kvjax.cache.shard import DATA, HEADS
from kvjax.policies import Policy, prefill_alone
from kvjax.policies.layer import Carry
from kvjax.runtime import decoding
from kvjax.runtime.decoding import Decoding, Specs
from kvjax.runtime.mesh import ALL, OWN, state_partitions
from kvjax.runtime.program import Partition, Program


def filled(policy: Policy, specs: Specs, context: int) -> Decoding:
    """State as after prompts of `context` tokens, from random queries, keys and values.

    The policy's own prefill makes the cache, so slots, scores and metadata are as full as in a real run. Over a mesh,
    each device makes its part. The prefill runs once per shape of cache, and layers of the same shape get copies.
    """
    made, first, caches = {}, {}, []
    carry: Carry = {}
    length = jnp.int32(context)
    for spec in specs:
        kind = _kind(policy, spec)
        if kind not in made:
            first[kind] = spec, carry
            made[kind], carry = _fill(policy, spec, jnp.uint32(spec.layer), length, carry)
            caches.append(made[kind])
        elif any(map(host_memory.on_host, jax.tree.leaves(made[kind]))):  # arrays in host memory cannot be copied there
            like, given = first[kind]
            caches.append(_fill(policy, like, jnp.uint32(spec.layer), length, given)[0])
        else:
            caches.append(jax.tree.map(jnp.copy, made[kind]))
    _fill.forget()  # frees its device memory
    return _started(tuple(caches), _rows(specs), context)


def compile_filling(policy: Policy, specs: Specs) -> None:
    """Compile the programs of `filled` into the compilation cache."""
    seed, context = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.int32)
    carry: Any = {}
    for spec in {_kind(policy, spec): spec for spec in reversed(specs)}.values():
        _fill.compiled(policy, spec, seed, context, carry)
        _, carry = _fill.shapes(policy, spec, seed, context, carry)


def _kind(policy: Policy, spec: LayerSpec) -> Hashable:
    """Key that is equal for layers with caches of the same shapes."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(policy.layer(spec).init))
    return tree, tuple((x.shape, x.dtype) for x in leaves)


def shapes(policy: Policy, specs: Specs) -> Decoding:
    """Shapes of the state that `filled` returns."""
    seeds, total = (jax.ShapeDtypeStruct((_rows(specs),), dtype) for dtype in (jnp.uint32, jnp.int32))
    return decoding.begin.shapes(policy, specs, seeds, total)


def started_empty(policy: Policy, specs: Specs) -> Decoding:
    """The same state with empty caches."""
    return _started(tuple(policy.layer(spec).init() for spec in specs), _rows(specs), 0)


def _rows(specs: Specs) -> int:
    return specs[0].batch * specs[0].shard.data


def _started(caches: tuple[object, ...], batch: int, context: int) -> Decoding:
    return Decoding(
        caches=caches,
        token=jnp.zeros((batch,), jnp.int32),
        pos=jnp.full((batch,), context, jnp.int32),
        steps=jnp.zeros((), jnp.int32),
        done=jnp.zeros((batch,), bool),
        seed=jnp.zeros((batch,), jnp.uint32),
    )


def _prefill(
    policy: Policy, spec: LayerSpec, seed: UInt32[Array, ""], context: Int[Array, ""], carry: Carry
) -> tuple[object, Carry]:
    key, over_mesh = random_key(seed), spec.shard.mesh is not None
    if over_mesh:  # each device makes its own rows and heads; devices that share slots make the same prompt
        key = jax.random.fold_in(key, jax.lax.axis_index((DATA, HEADS)))
        carry = jax.tree.map(lambda x: x[0], carry)
    heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    q, k, v = (
        jax.random.normal(one, (spec.batch, spec.prompt_len, count, spec.head_dim), spec.dtype)
        for one, count in zip(jax.random.split(key, 3), heads, strict=True)
    )
    lengths = jnp.full((spec.batch,), context, jnp.int32)
    prompt = PromptKV.of(spec.rope, q, k, v, lengths, lengths + spec.new_tokens)
    (layer,) = decoding.layers_of(policy, (spec,))
    state, carry = prefill_alone(layer, prompt, carry)
    return state, jax.tree.map(lambda x: x[None], carry) if over_mesh else carry


def _filling(policy: Policy, spec: LayerSpec, *_: Any) -> Partition | None:
    """Partitions of `_fill`. Each device has its own carry."""
    if spec.shard.mesh is None:
        return None
    (state,) = state_partitions(policy, (spec,))
    return spec.shard, (ALL, ALL, OWN), (state, OWN)


_fill = Program(_prefill, static=2, partition=_filling)
