"""Caches filled without the model: to measure decoding at a length without the time it takes to read a prompt of it."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from kvjax._util.randomness import random_key
from kvjax.cache import LayerSpec, Prompt, host_memory
from kvjax.cache.shard import DATA, HEADS
from kvjax.policies import Policy
from kvjax.policies.base import Carry
from kvjax.policies.capabilities import prefill
from kvjax.runtime import decoding
from kvjax.runtime.decoding import Decoding, Specs
from kvjax.runtime.mesh import ALL, OWN, state_partitions
from kvjax.runtime.program import Partition, Program


def filled(policy: Policy, specs: Specs, context: int) -> Decoding:
    """A state as after prompts of `context` tokens, of random queries, keys and values that no model made.

    The policy's own prefill makes the cache, so slots, scores and metadata are as full as they would be; over a mesh each device
    makes its part. It runs once for each shape of cache: layers of one shape get copies.
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
        elif any(map(host_memory.on_host, jax.tree.leaves(made[kind]))):  # nothing copies within the host's memory
            like, given = first[kind]
            caches.append(_fill(policy, like, jnp.uint32(spec.layer), length, given)[0])
        else:
            caches.append(jax.tree.map(jnp.copy, made[kind]))
    _fill.forget()  # it holds device memory
    return _started(tuple(caches), _rows(specs), context)


def compile_filling(policy: Policy, specs: Specs) -> None:
    """Have the programs of `filled` in the compilation cache."""
    seed, context = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.int32)
    carry: Any = {}
    for spec in {_kind(policy, spec): spec for spec in reversed(specs)}.values():
        _fill.compiled(policy, spec, seed, context, carry)
        _, carry = _fill.shapes(policy, spec, seed, context, carry)


def _kind(policy: Policy, spec: LayerSpec) -> Hashable:
    """What layers have in common whose caches are alike."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(policy.layer(spec).init))
    return tree, tuple((x.shape, x.dtype) for x in leaves)


def shapes(policy: Policy, specs: Specs) -> Decoding:
    """Shapes of such a state."""
    seeds, total = (jax.ShapeDtypeStruct((_rows(specs),), dtype) for dtype in (jnp.uint32, jnp.int32))
    return decoding.begin.shapes(policy, specs, seeds, total)


def started_empty(policy: Policy, specs: Specs) -> Decoding:
    """Such a state, with nothing in its caches."""
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
    if over_mesh:  # rows and heads of a device are its own; those that share slots have the same prompt
        key = jax.random.fold_in(key, jax.lax.axis_index((DATA, HEADS)))
        carry = jax.tree.map(lambda x: x[0], carry)
    heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    q, k, v = (
        jax.random.normal(one, (spec.batch, spec.prompt_len, count, spec.head_dim), spec.dtype)
        for one, count in zip(jax.random.split(key, 3), heads, strict=True)
    )
    lengths = jnp.full((spec.batch,), context, jnp.int32)
    prompt = Prompt.of(spec.rope, q, k, v, lengths, lengths + spec.new_tokens)
    (layer,) = decoding.layers_of(policy, (spec,))
    state, carry = prefill(layer, prompt, carry)
    return state, jax.tree.map(lambda x: x[None], carry) if over_mesh else carry


def _filling(policy: Policy, spec: LayerSpec, *_: Any) -> Partition | None:
    """How it is dealt: of what travels from layer to layer each device has its own."""
    if spec.shard.mesh is None:
        return None
    (state,) = state_partitions(policy, (spec,))
    return spec.shard, (ALL, ALL, OWN), (state, OWN)


_fill = Program(_prefill, static=2, partition=_filling)
