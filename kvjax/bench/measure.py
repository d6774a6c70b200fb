"""Measures one case on this device."""

import time
from typing import Any

import jax
import numpy as np

from kvjax.models import Params
from kvjax.models.sharding import bytes_per_device, compile_init_on
from kvjax.runtime import decoding
from kvjax.runtime.decoding import Decoding
from kvjax.runtime.engine import Engine, program_bytes

from . import compression, floor, states
from .case import LARGEST, Case

STEPS = 64
"""Tokens per call of the decode program, so that the cost of the call is negligible."""

PREFILLS = 3
"""Number of prefills. The first is a warm-up."""


def measure(case: Case, params: Params, bandwidth: float | None, memory: int | None) -> dict[str, Any]:
    """Measure a case. Returns the fields of the result row after those of the case.

    Args:
        case: the case.
        params: weights of the case's shape and type.
        bandwidth: memory bandwidth in bytes per second, for the bandwidth bound; None if unknown.
        memory: available memory in bytes; None if unknown. "largest" batches need it.

    Raises:
        ValueError: the programs need more than `memory`, or nothing fits.
        PolicyError: the policy does not accept these settings.
    """
    if case.batch != LARGEST:
        return _run(case, params, case.batch, bandwidth, memory)
    if memory is None:
        raise ValueError("batch 'largest' needs the size of the memory, which this device does not report; give one")
    batch = _largest(case, memory)
    while True:
        try:
            return _run(case, params, batch, bandwidth, memory)
        except (ValueError, jax.errors.JaxRuntimeError):
            if batch == 1:
                raise
            _forget()
            batch -= max(batch // 16, 1)


def compile_only(case: Case) -> dict[str, Any]:
    """Compile a case's programs. Returns their compile time in seconds.

    Raises:
        PolicyError: the policy does not accept these settings.
    """
    if case.batch == LARGEST:
        return {"compile_s": 0.0}
    _forget()
    start = time.perf_counter()
    engine = case.engine(case.shapes, case.batch)
    needed(case, engine)
    if not case.prefill:
        states.compile_filling(engine.policy, engine.specs)
        floor.compile_counting(engine.policy, engine.specs, states.shapes(engine.policy, engine.specs).caches)
    elif not case.mesh:
        compression.compiled(engine.policy, engine.specs)
    compile_init_on(case.shard, case.config, case.dtype, case.weights, case.weights)
    return {"compile_s": time.perf_counter() - start}


def _run(case: Case, params: Params, batch: int, bandwidth: float | None, memory: int | None) -> dict[str, Any]:
    _forget()
    engine = case.engine(params, batch)
    policy, specs = engine.policy, engine.specs
    programs = needed(case, engine)
    compile_seconds, peak = engine.compile_seconds, max(programs.values())
    if memory is not None and peak > memory:
        raise ValueError(f"needs {peak} bytes of the device's memory, which has {memory}")
    if case.prefill:
        state, ttft = _prefilled(case, engine)
    else:
        state, ttft = jax.block_until_ready(states.filled(policy, specs, case.context)), []
    cache_bytes = bytes_per_device(state.caches)
    state, calls = _decoded(case, engine, state)
    read = (
        floor.weight_bytes(engine.weights, engine.batch // engine.shard.data),
        floor.cache_bytes_read(policy, specs, state.caches),
    )
    del state
    alone = case.prefill and not case.mesh
    compression_seconds = compression.seconds(policy, specs, case.context) if alone else None
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
        "program_bytes": programs,
        "weight_bytes_read": read[0],
        "cache_bytes_read": read[1],
        "compile_s": compile_seconds,
    }


def needed(case: Case, engine: Engine) -> dict[str, int]:
    """Compile the case's programs from shapes. Returns the peak bytes of each."""
    prefill, decode = engine.executables(None if case.prefill else states.shapes(engine.policy, engine.specs))
    return ({} if prefill is None else {"prefill": program_bytes(prefill)}) | {"decode": program_bytes(decode)}


def _largest(case: Case, memory: int) -> int:
    """Maximum batch size, extrapolated from XLA's memory analysis for batch sizes 1 and 4. A row takes at least its cache."""
    engines = [case.engine(case.shapes, rows) for rows in (1, 4)]
    one, four = (max(needed(case, engine).values()) for engine in engines)
    if one > memory:
        raise ValueError(f"a single row needs {one} bytes of the device's memory, which has {memory}")
    row = max((four - one) // 3, engines[0].cache_bytes)
    return 1 + (memory - one) // row


def _prefilled(case: Case, engine: Engine) -> tuple[Decoding, list[float]]:
    """State after a random prompt, and the seconds until its first token is on the host, without the warm-up."""
    shape = engine.batch, case.context
    prompts = np.random.default_rng(2).integers(0, engine.config.vocab_size, shape, np.int32)
    seconds, state = [], None
    for _ in range(PREFILLS):
        del state
        start = time.perf_counter()
        state, _ = engine.prefill(prompts)
        np.asarray(state.token)
        seconds.append(time.perf_counter() - start)
    assert state is not None
    return state, seconds[1:]


def _decoded(case: Case, engine: Engine, state: Decoding) -> tuple[Decoding, list[tuple[int, float]]]:
    """State after all new tokens, and steps and seconds of each call of the decode program. The first is a warm-up."""
    calls = []
    for at in range(0, case.new_tokens, STEPS):
        steps = min(STEPS, case.new_tokens - at)
        start = time.perf_counter()
        state, *drawn = engine.decode(state, steps)
        jax.block_until_ready((state, drawn))
        calls.append((steps, time.perf_counter() - start))
    return state, calls


def _forget() -> None:
    """Drop compiled programs, as each holds device memory."""
    for program in (decoding.prefill, decoding.decode):
        program.forget()
