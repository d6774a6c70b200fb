"""What it costs and saves to keep keys and values in the host's memory, by policy and by what travels.

    python -m benchmarks.offload --context 4096 --policies full clusterkv:1024

Three modes: "plain" keeps the cache on the device; "selected" and "layer" are `offloaded(policy, fetch=...)`, which are the same,
and run once, unless its attention is sparse. Each is run in a process of its own, so that one's peak of device memory is not another's, and one that the
device's compiler cannot take is a row that says so. Before a mode is measured, its tokens and log-probabilities are compared
with the plain policy's on this device, in float32 with exact matmuls, by two small random models, one of SmolLM2's widths.

Weights and prompt are random, unless `--text` is given: then it is the opening of the text, read by `--model`.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvjax
from benchmarks import report
from kvjax.models import ModelConfig, init
from kvjax.models.presets import PRESETS
from kvjax.models.rope import RopeConfig
from kvjax.policies import Policy, get_policy, offloaded
from kvjax.runtime import decoding

TINY = ModelConfig("llama", 97, 64, 128, 3, 4, 2, 16, 512, RopeConfig(1e4, 16))
CHECKED = {"tiny": TINY, "smollm2-like": dataclasses.replace(PRESETS["smollm2-135m"], num_layers=4, windows=())}
MODES = ("plain", "selected", "layer")


def main() -> None:
    """Run each policy in each mode, and write what was seen after every one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(PRESETS), default="smollm2-135m")
    parser.add_argument("--model", default=None, help="with --text: any source that kvjax.load takes")
    parser.add_argument("--text", type=Path, default=None, help="a plain text file to read the beginning of")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policies", nargs="+", default=["full", "clusterkv:1024"], help="name or name:budget")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=1, help="queries whose selections stay on the device")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/offload.json"))
    parser.add_argument("--one", nargs=2, metavar=("POLICY", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args, *args.one)))
        return
    rows: list[dict[str, Any]] = []
    header: dict[str, Any] = {}
    for policy in args.policies:
        sparse = get_policy(policy).info.memory == "sparse"
        for mode in [mode for mode in args.modes if sparse or mode != "layer"]:
            rows.append({"policy": policy, "mode": mode} | in_a_process(policy, mode))
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items() if name != "header"), flush=True)
            header = rows[-1].pop("header", header)
            report.write(args.out, header, rows)


def in_a_process(policy: str, mode: str) -> dict[str, Any]:
    """What `measure` finds, or how it failed."""
    command = [sys.executable, "-m", "benchmarks.offload", *sys.argv[1:], "--one", policy, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.returncode, "says": done.stderr.strip().splitlines()[-8:]}
    return json.loads(done.stdout.splitlines()[-1])


def measure(args: argparse.Namespace, name: str, mode: str) -> dict[str, Any]:
    """Check the mode, then generate twice: the first run compiles, the second is timed."""
    worst = {shape: check(config, name.partition(":")[0], mode, args.steps) for shape, config in CHECKED.items()}
    if args.text is None:
        params = init(PRESETS[args.shape], jax.random.key(0), args.dtype)
        prompt = np.random.default_rng(2).integers(0, params.config.vocab_size, args.context).tolist()
    else:
        params = kvjax.load(args.model, dtype=args.dtype)
        assert params.tokenizer is not None
        prompt = params.tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.context]
    name, _, budget = name.partition(":")
    policy = get_policy(name, budget=(float(budget) if "." in budget else int(budget)) if budget else None)
    options = {"policy": placed(policy, mode, args.steps), "max_new_tokens": args.new_tokens, "ignore_eos": True}
    first, result = (kvjax.generate(params, prompt, **options) for _ in range(2))
    stats = result.stats
    memory = decoding.decode.executables[-1].memory_analysis()
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")  # the CPU does not tell
    return {
        "largest_difference": worst,
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "device_bytes": stats.cache_bytes,
        "host_bytes": stats.host_cache_bytes,
        "step_bytes_read": stats.step_bytes_read,
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "decode_temp_bytes": memory.temp_size_in_bytes,
        "decode_host_temp_bytes": memory.host_temp_size_in_bytes,
        "process_peak_device_bytes": peak,
        "prefill_s": stats.prefill_seconds,
        "tpot_ms": 1e3 / stats.decode_tokens_per_second,
        "hit_rate": stats.hit_rate,
        "compile_s": first.stats.compile_seconds,
        "header": report.header(
            weights=f"random, {args.shape}" if args.text is None else args.model or "the default model",
            text=None if args.text is None else args.text.name,
            dtype=args.dtype,
            steps=args.steps,
        ),
    }


def check(config: ModelConfig, name: str, mode: str, steps: int) -> float:
    """Largest difference of log-probabilities between a policy in this mode and the plain one, whose tokens are the same."""
    params = init(config, jax.random.key(1))
    prompts: list[list[int]] = [
        np.random.default_rng(i).integers(0, 97, size).tolist() for i, size in enumerate((150, 3, 60))
    ]
    small = {"budget": 48, "sinks": 4, "dense_layers": 1, "n_clusters": 8, "window": 16, "every": 8}
    fields = {field.name for field in dataclasses.fields(kvjax.policies.policies()[name])}
    policy = get_policy(name, **{field: value for field, value in small.items() if field in fields})
    with jax.default_matmul_precision("highest"):
        want, got = (
            kvjax.generate(params, prompts, policy=one, max_new_tokens=40, ignore_eos=True)
            for one in (policy, placed(policy, mode, steps))
        )
    for row, plain in zip(got, want, strict=True):
        assert row.tokens == plain.tokens, (mode, row.tokens, plain.tokens)
    if mode != "plain":
        assert got[0].stats.host_cache_bytes > 0
        assert got[0].stats.cache_bytes < want[0].stats.cache_bytes
        assert (got[0].stats.hit_rate is not None) == (policy.info.memory == "sparse")
    return max(float(np.max(np.abs(np.subtract(a.logprobs, b.logprobs)))) for a, b in zip(got, want, strict=True))


def placed(policy: Policy, mode: str, steps: int) -> Policy:
    """The policy in one of the three modes."""
    return policy if mode == "plain" else offloaded(policy, steps, mode)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
