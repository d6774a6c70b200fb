"""Measure one case on the device at hand."""

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
"""Tokens a call of the decode program: enough that the call itself does not count."""

PREFILLS = 3
"""Times a prompt is read; the first warms up."""


def measure(case: Case, params: Params, bandwidth: float | None, memory: int | None) -> dict[str, Any]:
    """What a row says besides the case itself.

    Args:
        params: weights of the case's shape and type.
        bandwidth: bytes per second, for the floor; None if it is not known.
        memory: bytes that may be used; None if that is not known, which "largest" batches need.

    Raises:
        ValueError: the programs need more than `memory`, or nothing fits.
        PolicyError: the policy does not take these settings.
    """
    if case.batch != LARGEST:
        return _run(case, params, case.batch, bandwidth, memory)
    if memory is None:
        raise ValueError(
            "the largest batch is searched within a memory, but this device does not tell its own; give one"
        )
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
    """The seconds that a case's programs take to compile.

    Raises:
        PolicyError: the policy does not take these settings.
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
        raise ValueError(f"needs {peak} bytes of the device's memory, of which there are {memory}")
    if case.prefill:
        state, ttft = _prefilled(case, engine)
    else:
        state, ttft = jax.block_until_ready(states.filled(policy, specs, case.context)), []
    cache_bytes = bytes_per_device(state.caches)
    state, calls = _decoded(case, engine, state)
    read = floor.weight_bytes(engine.weights), floor.cache_bytes_read(policy, specs, state.caches)
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
    """Compile the case's programs, from shapes; the most bytes each holds."""
    prefill, decode = engine.executables(None if case.prefill else states.shapes(engine.policy, engine.specs))
    return ({} if prefill is None else {"prefill": program_bytes(prefill)}) | {"decode": program_bytes(decode)}


def _largest(case: Case, memory: int) -> int:
    """Rows that fit by the compiler's word for one and for four, which differ by what rows take: their cache at least."""
    engines = [case.engine(case.shapes, rows) for rows in (1, 4)]
    one, four = (max(needed(case, engine).values()) for engine in engines)
    if one > memory:
        raise ValueError(f"a single row needs {one} bytes of the device's memory, of which there are {memory}")
    row = max((four - one) // 3, engines[0].cache_bytes)
    return 1 + (memory - one) // row


def _prefilled(case: Case, engine: Engine) -> tuple[Decoding, list[float]]:
    """The state after a random prompt, and the seconds until its first token was at the host, each time but the first."""
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
    """The state after all new tokens, and steps and seconds of each call of the decode program; the first warms up."""
    calls = []
    for at in range(0, case.new_tokens, STEPS):
        steps = min(STEPS, case.new_tokens - at)
        start = time.perf_counter()
        state, *drawn = engine.decode(state, steps)
        jax.block_until_ready((state, drawn))
        calls.append((steps, time.perf_counter() - start))
    return state, calls


def _forget() -> None:
    """Let go of compiled programs: each holds device memory, too."""
    for program in (decoding.prefill, decoding.decode):
        program.forget()
