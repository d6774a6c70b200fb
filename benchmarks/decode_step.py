"""Time of prefill and of one decode step by policy, at a real model's shape, beside the memory-bound floor.

    python -m benchmarks.decode_step --shape llama-3.1-8b --context 16384 65536

Weights are random. The floor of a step is (weight bytes + cache bytes of live slots) / memory bandwidth. Before anything is
timed, a small model's tokens and log-probabilities on this device are compared with the CPU's.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import report
from kvjax import decoding
from kvjax.cache import layer_specs
from kvjax.models import ModelConfig, Params, init
from kvjax.models.presets import PRESETS
from kvjax.models.rope import RopeConfig
from kvjax.policies import get_policy
from kvjax.sampling import Greedy

NEW_TOKENS = 96


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(PRESETS), default="llama-3.1-8b")
    parser.add_argument("--context", type=int, nargs="+", default=[16384])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--policies", nargs="+", default=["full", "streaming_llm:0.2", "treekv:0.2"], help="name or name:budget"
    )
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second, for the floor")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode-step.json"))
    args = parser.parse_args()

    error = check()
    print(f"largest difference from the CPU, in log-probability: {error:.1e}", flush=True)
    params = init(PRESETS[args.shape], jax.random.key(0), jnp.bfloat16)
    jax.block_until_ready(params)
    header = report.header(shape=args.shape, weights="random, bfloat16", bandwidth=args.bandwidth, error_vs_cpu=error)
    rows = []
    for context in args.context:
        for batch in args.batch:
            for name in args.policies:
                rows.append(measure(params, name, context, batch, args.bandwidth))
                report.write(args.out, header, rows)
                print(
                    "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()),
                    flush=True,
                )


def check() -> float:
    """Largest difference of log-probabilities between this device and the CPU, both in float32 with exact matmuls.

    The CPU's results are what the tests hold against float64 NumPy oracles.
    """
    config = ModelConfig("llama", 97, 64, 128, 3, 4, 2, 16, 512, RopeConfig(1e4, 16))
    worst = 0.0
    for policy in (get_policy("full"), kvjax.TreeKV(budget=48, sinks=2, block=8), kvjax.StreamingLLM(budget=48)):
        results = []
        for device in (jax.devices()[0], jax.devices("cpu")[0]):
            with jax.default_device(device), jax.default_matmul_precision("highest"):
                params = init(config, jax.random.key(1))
                prompts = [list(range(90)), [5, 4, 3], [7] * 60]
                results.append(kvjax.generate(params, prompts, policy=policy, max_new_tokens=40))
        for got, want in zip(*results, strict=True):
            assert got.tokens == want.tokens, (policy, got.tokens, want.tokens)
            worst = max(worst, float(np.max(np.abs(np.subtract(got.logprobs, want.logprobs)))))
    return worst


def measure(params: Params, name: str, context: int, batch: int, bandwidth: float) -> dict[str, object]:
    """Prefill and decode a random prompt; medians of several runs of the compiled loop."""
    name, _, budget = name.partition(":")
    policy = get_policy(name, budget=(float(budget) if "." in budget else int(budget)) if budget else None)
    policy = policy.bind(params.config)
    specs = layer_specs(params.config, batch, context, NEW_TOKENS, params.dtype)
    lengths = jnp.full((batch,), context, jnp.int32)
    tokens = jax.random.randint(jax.random.key(2), (batch, specs[0].prompt_len), 0, params.config.vocab_size, jnp.int32)
    rest = Greedy(), jnp.zeros((0,), jnp.int32)
    prompt = policy, specs, params, tokens, lengths, jnp.zeros((batch,), jnp.uint32), *rest
    program = decoding.prefill.compiled(*prompt)
    ttft = []
    for _ in range(2):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(decoding.prefill(*prompt))
        ttft.append(time.perf_counter() - start)
    steps = 16
    tpot = []
    for i in range(NEW_TOKENS // steps - 1):
        start = time.perf_counter()
        state, *_ = jax.block_until_ready(decoding.decode(policy, specs, params, state, jnp.int32(steps), *rest))
        if i:  # the first call compiles
            tpot.append((time.perf_counter() - start) / steps)
    live = (
        sum(int(jnp.sum(policy.slots(*x).live)) for x in zip(specs, state.caches, strict=True))
        * 2
        * params.config.head_dim
        * params.dtype.itemsize
    )
    weights = sum(x.nbytes for x in jax.tree.leaves(params)) - params.embed.nbytes * (not params.config.tied)
    floor = (weights + live) / bandwidth
    return {
        "policy": name,
        "budget": budget or "default",
        "context": context,
        "batch": batch,
        "ttft_s": min(ttft),
        "tpot_ms": 1e3 * float(np.median(tpot)),
        "floor_ms": 1e3 * floor,
        "times_floor": float(np.median(tpot)) / floor,
        "cache_bytes": sum(x.nbytes for x in jax.tree.leaves(state.caches)),
        "prefill_temp_bytes": program.memory_analysis().temp_size_in_bytes,
        "decode_temp_bytes": decoding.decode.executables[-1].memory_analysis().temp_size_in_bytes,
        "compile_s": decoding.prefill.compile_seconds + decoding.decode.compile_seconds,
    }


if __name__ == "__main__":
    main()
