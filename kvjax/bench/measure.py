"""Measure one case on the device at hand."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import layer_specs
from kvjax.models import Params, abstract
from kvjax.policies import Policy
from kvjax.runtime import decoding
from kvjax.runtime.compiling import executables, program_bytes
from kvjax.runtime.decoding import Decoding, Specs
from kvjax.runtime.sampling import Greedy

from . import compression, floor, states
from .case import LARGEST, Case

STEPS = 64
"""Tokens a call of the decode program: enough that the call itself does not count."""

PREFILLS = 3
"""Times a prompt is read; the first warms up."""

_REST = Greedy(), jax.ShapeDtypeStruct((0,), jnp.int32)


def measure(case: Case, params: Params, bandwidth: float | None, memory: int | None) -> dict[str, Any]:
    """What a row says besides the case itself.

    Args:
        params: weights of the case's shape and type.
        bandwidth: bytes a second, for the floor; None if it is not known.
        memory: bytes that may be used; None if that is not known, which "largest" batches need.

    Raises:
        ValueError: the programs need more than `memory`, or nothing fits.
        PolicyError: the policy does not take these settings.
    """
    policy = case.bound_policy()
    policy.validate(case.context + case.new_tokens)
    if case.batch != LARGEST:
        return _run(case, policy, params, case.batch, bandwidth, memory)
    if memory is None:
        raise ValueError(
            "the largest batch is searched within a memory, but this device does not tell its own; give one"
        )
    batch = _largest(case, policy, memory)
    while True:
        try:
            return _run(case, policy, params, batch, bandwidth, memory)
        except (ValueError, jax.errors.JaxRuntimeError):
            if batch == 1:
                raise
            _forget()
            batch -= max(batch // 16, 1)


def compile_only(case: Case) -> dict[str, Any]:
    """The seconds that a case's programs take to compile.

    Raises:
        PolicyError: the policy does not take these settings.
    """
    if case.batch == LARGEST:
        return {"compile_s": 0.0}
    _forget()
    start = time.perf_counter()
    policy = case.bound_policy()
    specs = layer_specs(case.config, case.batch, case.context, case.new_tokens, case.dtype)
    _needed(case, policy, specs)
    if case.prefill:
        compression.compiled(policy, specs)
    else:
        states.compile_filling(policy, specs, case.context)
    return {"compile_s": time.perf_counter() - start}


def _run(
    case: Case, policy: Policy, params: Params, batch: int, bandwidth: float | None, memory: int | None
) -> dict[str, Any]:
    _forget()
    specs = layer_specs(params.config, batch, case.context, case.new_tokens, params.dtype)
    before = decoding.prefill.compile_seconds + decoding.decode.compile_seconds
    needed = _needed(case, policy, specs)
    compile_seconds = decoding.prefill.compile_seconds + decoding.decode.compile_seconds - before
    peak = max(needed.values())
    if memory is not None and peak > memory:
        raise ValueError(f"needs {peak} bytes of the device's memory, of which there are {memory}")
    if case.prefill:
        state, ttft = _prefilled(case, policy, specs, params)
    else:
        state, ttft = jax.block_until_ready(states.filled(policy, specs, case.context)), []
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(state.caches))
    state, calls = _decoded(case, policy, specs, params, state)
    read = floor.weight_bytes(params), floor.cache_bytes_read(policy, specs, state.caches)
    del state
    compression_seconds = compression.seconds(policy, specs, case.context) if case.prefill else None
    timed = calls[1:] or calls
    tpot = sum(seconds for _, seconds in timed) / sum(steps for steps, _ in timed)
    return {
        "batch_run": batch,
        "budget_applies": policy.info.takes_budget,
        "ttft_s": float(np.median(ttft)) if ttft else None,
        "ttft_all_s": ttft,
        "tpot_ms": 1e3 * tpot,
        "tpot_all_ms": [1e3 * seconds / steps for steps, seconds in calls],
        "floor_ms": None if bandwidth is None else 1e3 * sum(read) / bandwidth,
        "times_floor": None if bandwidth is None else tpot * bandwidth / sum(read),
        "decode_s": sum(seconds for _, seconds in calls),
        "compression_s": compression_seconds,
        "latency_s": ttft[-1] + sum(seconds for _, seconds in calls) if ttft else None,
        "tokens_per_s": batch / tpot,
        "cache_bytes": cache_bytes,
        "peak_bytes": peak,
        "program_bytes": needed,
        "weight_bytes_read": read[0],
        "cache_bytes_read": read[1],
        "compile_s": compile_seconds,
    }


def _needed(case: Case, policy: Policy, specs: Specs) -> dict[str, int]:
    """Compile the case's programs, from shapes; the most bytes each holds."""
    weights = abstract(case.config, specs[0].dtype)
    if case.prefill:
        prefill, decode = executables(policy, specs, weights, Greedy())
        return {"prefill": program_bytes(prefill), "decode": program_bytes(decode)}
    count = jax.ShapeDtypeStruct((), jnp.int32)
    decode = decoding.decode.compiled(policy, specs, weights, states.shapes(policy, specs), count, *_REST)
    return {"decode": program_bytes(decode)}


def _largest(case: Case, policy: Policy, memory: int) -> int:
    """Rows that fit by the compiler's word for one and for four, which differ by what rows take: their cache at least."""
    shapes = case.context, case.new_tokens, case.dtype
    one, four = (max(_needed(case, policy, layer_specs(case.config, rows, *shapes)).values()) for rows in (1, 4))
    if one > memory:
        raise ValueError(f"a single row needs {one} bytes of the device's memory, of which there are {memory}")
    row = max((four - one) // 3, policy.nbytes(case.config, 1, *shapes))
    return 1 + (memory - one) // row


def _prefilled(case: Case, policy: Policy, specs: Specs, params: Params) -> tuple[Decoding, list[float]]:
    """The state after a random prompt, and the seconds until its first token was at the host, each time but the first."""
    batch = specs[0].batch
    shape, vocabulary = (batch, specs[0].prompt_len), params.config.vocab_size
    tokens = jax.random.randint(jax.random.key(2), shape, 0, vocabulary, jnp.int32)
    rest = Greedy(), jnp.zeros((0,), jnp.int32)
    prompt = tokens, jnp.full((batch,), case.context, jnp.int32), jnp.zeros((batch,), jnp.uint32)
    seconds, state = [], None
    for _ in range(PREFILLS):
        del state
        start = time.perf_counter()
        state, _ = decoding.prefill(policy, specs, params, *prompt, *rest)
        np.asarray(state.token)
        seconds.append(time.perf_counter() - start)
    assert state is not None
    return state, seconds[1:]


def _decoded(
    case: Case, policy: Policy, specs: Specs, params: Params, state: Decoding
) -> tuple[Decoding, list[tuple[int, float]]]:
    """The state after all new tokens, and steps and seconds of each call of the decode program; the first warms up."""
    calls, ends = [], jnp.zeros((0,), jnp.int32)
    for at in range(0, case.new_tokens, STEPS):
        steps = min(STEPS, case.new_tokens - at)
        start = time.perf_counter()
        state, *drawn = decoding.decode(policy, specs, params, state, jnp.asarray(steps, jnp.int32), Greedy(), ends)
        jax.block_until_ready((state, drawn))
        calls.append((steps, time.perf_counter() - start))
    return state, calls


def _forget() -> None:
    """Let go of compiled programs: each holds device memory, too."""
    for program in (decoding.prefill, decoding.decode):
        program.forget()
