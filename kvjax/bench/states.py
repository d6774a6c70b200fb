"""Caches filled without the model: to measure decoding at a length without the time it takes to read a prompt of it."""

from collections.abc import Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache import LayerSpec, Prompt, host_memory
from kvjax.policies import Policy
from kvjax.policies.base import Carry
from kvjax.policies.capabilities import prefill
from kvjax.runtime.decoding import Decoding, Specs


def filled(policy: Policy, specs: Specs, context: int) -> Decoding:
    """A state as after prompts of `context` tokens, of random queries, keys and values that no model made.

    The policy's own prefill makes the cache, so slots, scores and metadata are as full as they would be. It runs once for each
    shape of cache: layers of one shape get copies.
    """
    made, fills, caches = {}, {}, []
    carry: Carry = {}
    for spec in specs:
        kind = _kind(policy, spec)
        if kind not in made:
            fills[kind] = partial(jax.jit(partial(_prefill, policy, spec, context)), carry=carry)
            made[kind], carry = fills[kind](jax.random.key(spec.layer))
            caches.append(made[kind])
        elif any(map(host_memory.on_host, jax.tree.leaves(made[kind]))):  # nothing copies within the host's memory
            caches.append(fills[kind](jax.random.key(spec.layer))[0])
        else:
            caches.append(jax.tree.map(jnp.copy, made[kind]))
    return _started(tuple(caches), specs[0].batch, context)


def compile_filling(policy: Policy, specs: Specs, context: int) -> None:
    """Have the programs of `filled` in the compilation cache."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    carry: Any = {}
    for spec in {_kind(policy, spec): spec for spec in reversed(specs)}.values():
        fill = jax.jit(partial(_prefill, policy, spec, context))
        fill.lower(key, carry).compile()
        _, carry = jax.eval_shape(fill, key, carry)


def _kind(policy: Policy, spec: LayerSpec) -> Hashable:
    """What layers have in common whose caches are alike."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(policy.layer(spec).init))
    return tree, tuple((x.shape, x.dtype) for x in leaves)


def shapes(policy: Policy, specs: Specs) -> Decoding:
    """Shapes of such a state."""
    return jax.eval_shape(lambda: started_empty(policy, specs))


def started_empty(policy: Policy, specs: Specs) -> Decoding:
    """Such a state, with nothing in its caches."""
    return _started(tuple(policy.layer(spec).init() for spec in specs), specs[0].batch, 0)


def _started(caches: tuple[object, ...], batch: int, context: int) -> Decoding:
    return Decoding(
        caches=caches,
        token=jnp.zeros((batch,), jnp.int32),
        pos=jnp.full((batch,), context, jnp.int32),
        steps=jnp.zeros((), jnp.int32),
        done=jnp.zeros((batch,), bool),
        seed=jnp.zeros((batch,), jnp.uint32),
    )


def _prefill(policy: Policy, spec: LayerSpec, context: int, key: jax.Array, carry: Carry) -> tuple[object, Carry]:
    heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    q, k, v = (
        jax.random.normal(one, (spec.batch, spec.prompt_len, count, spec.head_dim), spec.dtype)
        for one, count in zip(jax.random.split(key, 3), heads, strict=True)
    )
    lengths = jnp.full((spec.batch,), context, jnp.int32)
    return prefill(policy.layer(spec), Prompt.of(spec.rope, q, k, v, lengths, lengths + spec.new_tokens), carry)
