"""Measure decoding with keys and values in host memory, by policy and by what is transferred.

    python -m benchmarks.offload --context 4096 --cases full clusterkv:1024@selected

A case is `POLICY@MODE`. `@steps=R`, `@rows=B`, `@context=T` and `@without=KERNEL` can follow.

| mode | the cache |
| --- | --- |
| `plain` | on the device |
| `selected`, `layer` | `offloaded(policy, fetch=...)`; both are the same unless the policy's attention is sparse |

`without` leaves an operation to XLA. Without `fetch_slots`, the host gathers the missing slots. Without `write_slots`,
new tokens are written slice by slice.

Two other rows come first. `check` compares tokens and log-probabilities of a small random model with those of the plain
policy on this device, in float32 with exact matmuls, for every policy and mode. `bus` has the rates at which a plain
copy, and the kernel that fetches slots, read host memory.

Every case runs in its own process with a time limit. All compile at the same time and run one after the other. The
result file is written after each. Weights and the contents of the cache are random, so hit rates are those of a random
model.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import report
from kvjax.bench import states
from kvjax.cache import host_memory, layer_specs
from kvjax.config import PRESETS, RopeConfig
from kvjax.models import ModelConfig, init
from kvjax.pallas_kernels import fetch_slots, reads_host_memory
from kvjax.policies import Policy, get_policy, offloaded
from kvjax.policies.transforms.offload import fetched_bytes, hits
from kvjax.runtime import decoding
from kvjax.runtime.sampling import Greedy

TINY = ModelConfig.uniform("llama", 97, 64, 128, 3, 4, 2, 16, 512, RopeConfig(1e4, 16))
CALLS = 4
"""Timed calls of the decode program, after one that is not timed."""

CASES = (
    "clusterkv:1024,dense_layers=0@selected",
    "quest:1024,dense_layers=0@selected",
    "shadowkv:1024@selected",
    "full@selected",
    "clusterkv:1024,dense_layers=0@selected@steps=0",
    "clusterkv:1024,dense_layers=0@selected@steps=2",
    "quest:1024,dense_layers=0,gqa=sum@selected",
    "clusterkv:1024,dense_layers=0,gqa=mean@selected",
    "quest:1024@selected",
    "quest:1024,dense_layers=0@selected@without=write_slots",
    "quest:1024,dense_layers=0@selected@without=fetch_slots",
    "shadowkv:1024@plain",
    "quest:1024,dense_layers=0@plain",
    "full@plain",
    "clusterkv:1024,dense_layers=0@plain",
    "quest:1024,dense_layers=0,gqa=sum@selected@rows=16@context=65536",
)


class Case(NamedTuple):
    """A policy, its mode, and the shape."""

    policy: str
    mode: str
    steps: int = 1
    rows: int = 1
    context: int = 0
    without: str = ""

    @classmethod
    def parse(cls, text: str, context: int) -> "Case":
        """Parse a case."""
        policy, *rest = text.split("@")
        mode = rest.pop(0) if rest and "=" not in rest[0] else "selected"
        settings = dict(part.split("=", 1) for part in rest)
        steps, rows, own = (
            int(settings.get(name, least)) for name, least in (("steps", 1), ("rows", 1), ("context", context))
        )
        return cls(policy, mode, steps, rows, own, settings.get("without", ""))

    def placed(self) -> Policy:
        """The policy in its mode."""
        policy = get_policy(self.policy)
        return policy if self.mode == "plain" else offloaded(policy, self.steps, self.mode)  # pyright: ignore[reportArgumentType]


def main() -> None:
    """Run every case, and write the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(PRESETS), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=None, help="number of layers; by default all")
    parser.add_argument("--context", type=int, default=32768, help="tokens in the cache, unless a case has its own")
    parser.add_argument("--new-tokens", type=int, default=32, help="new tokens of each timed call")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="cases, the most important first")
    parser.add_argument("--limit", type=float, default=280, help="seconds, after which unfinished cases are stopped")
    parser.add_argument("--jobs", type=int, default=16, help="number of processes at the same time")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/offload.json"))
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run = {"check": check, "bus": bus}.get(args.one, measure)
        print(json.dumps(run(args) | {"header": header(args)}))
        return
    rows: list[dict[str, Any]] = []
    told: dict[str, Any] = {}
    end = time.monotonic() + args.limit
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        texts = ["bus", args.cases[0], "check", *args.cases[1:]]
        running = [pool.submit(in_a_process, text, rank, args.out, end) for rank, text in enumerate(texts)]
        for done in concurrent.futures.as_completed(running):
            row = done.result()
            told = row.pop("header", told)
            rows.append(row)
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            report.write(args.out, told, rows)


def header(args: argparse.Namespace) -> dict[str, Any]:
    """Header of the result file."""
    return report.header(
        weights=f"random, {args.shape}", layers=args.layers, dtype=args.dtype, new_tokens=args.new_tokens
    )


def in_a_process(text: str, rank: int, out: Path, end: float) -> dict[str, Any]:
    """Return the row of one case, or of its failure."""
    command = [sys.executable, "-m", "benchmarks.offload", *sys.argv[1:], "--one", text]
    without = "" if "@" not in text else Case.parse(text, 0).without
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several processes share the device
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "240",
        "KVJAX_WITHOUT_KERNELS": without,
        "KVJAX_OFFLOAD_LOCK": str(out.resolve().with_suffix(".lock")),
    }
    time.sleep(0.5 * rank)  # so that they run in about this order
    left = max(1.0, end - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left, env=environment)
    except subprocess.TimeoutExpired:
        return {"case": text, "failed": "not done in time"}
    says = done.stderr.strip().splitlines()
    if done.returncode:
        return {"case": text, "failed": done.returncode, "says": says[-8:]}
    slow = [line[-200:] for line in says if "slow execution" in line or "host_offloader" in line]
    return {"case": text} | json.loads(done.stdout.splitlines()[-1]) | ({"warned": slow[:2]} if slow else {})


def alone() -> Any:
    """Return a context in which no other process uses the device."""
    lock = os.environ.get("KVJAX_OFFLOAD_LOCK")
    return report.alone(Path(lock) if lock else None)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Compile, fill the cache, and decode. The result is the best of several calls, as other processes may be compiling."""
    case = Case.parse(args.one, args.context)
    config = PRESETS[args.shape]
    if args.layers:
        config = config.with_depth(args.layers)
    new = 16 + CALLS * args.new_tokens
    policy, shape = case.placed().for_model(config), (case.rows, case.context, new, jnp.dtype(args.dtype))
    specs = layer_specs(config, *shape)
    start = time.perf_counter()
    made = jax.jit(lambda: init(config, jax.random.key(0), args.dtype))
    params = jax.eval_shape(made)
    state = states_on_devices(policy, specs)
    sampler, ends = Greedy(), np.zeros((0,), np.int32)
    program = decoding.decode.compiled(policy, specs, params, state, np.int32(0), sampler, ends)
    weights = made.lower().compile()
    states.compile_filling(policy, specs)
    compile_s = time.perf_counter() - start
    print(f"{args.one}: compiled in {compile_s:.0f} s", file=sys.stderr, flush=True)
    with alone():
        start = time.perf_counter()
        params = jax.block_until_ready(weights())
        state = jax.block_until_ready(states.filled(policy, specs, case.context))
        fill_s = time.perf_counter() - start
        leaves = jax.tree.leaves(state.caches)
        on_host = sum(x.nbytes for x in leaves if host_memory.on_host(x))
        on_device = sum(x.nbytes for x in leaves) - on_host
        state = jax.block_until_ready(program(params, state, np.int32(16), sampler, ends)[0])
        before, needed = hits(state.caches), fetched_bytes(state.caches, 0)
        seconds = []
        for _ in range(CALLS):
            start = time.perf_counter()
            state = jax.block_until_ready(program(params, state, np.int32(args.new_tokens), sampler, ends)[0])
            seconds.append(time.perf_counter() - start)
        steps = CALLS * args.new_tokens
        chosen, found = (b - a for a, b in zip(before, hits(state.caches), strict=True))
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")  # a CPU does not report it
    memory = program.memory_analysis()
    return {
        "rows": case.rows,
        "context": case.context,
        "tpot_ms": 1e3 * min(seconds) / args.new_tokens,
        "tpot_all_ms": [1e3 * each / args.new_tokens for each in seconds],
        "hit_rate": found / chosen if chosen else None,
        "bus_bytes_per_step": (fetched_bytes(state.caches, steps) - needed) / steps,
        "device_bytes": on_device,
        "predicted_device_bytes": policy.nbytes(config, *shape),
        "host_bytes": on_host,
        "predicted_host_bytes": policy.host_nbytes(config, *shape),
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "decode_temp_bytes": memory.temp_size_in_bytes,
        "decode_host_temp_bytes": memory.host_temp_size_in_bytes,
        "process_peak_device_bytes": peak,
        "compile_s": compile_s,
        "fill_s": fill_s,
    }


def states_on_devices(policy: Policy, specs: Any) -> Any:
    """Shapes of the state before decoding, with the memory of each array."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[0]), ())
    made = jax.make_jaxpr(lambda: states.started_empty(policy, specs))().out_avals

    def place(x: Any, aval: Any) -> jax.ShapeDtypeStruct:
        host = aval.memory_space == jax.memory.Space.Host
        kind = "pinned_host" if host else jax.devices()[0].default_memory().kind
        there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind=kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)

    leaves, tree = jax.tree.flatten(states.shapes(policy, specs))
    return tree.unflatten([place(x, aval) for x, aval in zip(leaves, made, strict=True)])


def bus(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes per second from host memory, by one large copy and by the kernel that fetches slots in several orders."""
    slots, heads, dim = args.context, 8, 128
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    zeros = jax.jit(lambda: tuple(jnp.zeros((8, heads, slots, dim), jnp.bfloat16) for _ in "kv"), out_shardings=there)
    with alone():
        stores = jax.block_until_ready(zeros())
        copied = jax.jit(host_memory.to_device)
        found = {"copy_bytes_per_s": rate(copied, stores, sum(x.nbytes for x in stores))}
        random = np.random.default_rng(0)
        for name, index in (
            ("row", np.broadcast_to(np.arange(1024), (8, 32, 1024))),
            ("anywhere", random.integers(0, slots, (8, 32, 1024))),
            ("by_pages", (random.integers(0, slots // 16, (8, 32, 64, 1)) * 16 + np.arange(16)).reshape(8, 32, 1024)),
            ("shared_by_4", np.repeat(random.integers(0, slots, (8, 8, 1024)), 4, axis=1)),
        ):
            at = jnp.asarray(index, jnp.int32)
            got = [jnp.zeros((*at.shape, dim), jnp.bfloat16) for _ in stores]
            if not reads_host_memory(stores, at, at >= 0, got):
                break
            fetch = jax.jit(lambda stores, at, got: fetch_slots(stores, at, at >= 0, got))
            call = lambda stores: fetch(stores, at, got)  # noqa: B023, E731 - called at once
            found[f"fetched_bytes_per_s_{name}"] = rate(call, stores, sum(x.nbytes for x in got))
    return found


def rate(call: Callable[[Any], Any], stores: Any, size: int) -> float:
    """Bytes per second, the best of five calls after the first."""
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(call(stores))
        seconds.append(time.perf_counter() - start)
    return size / min(seconds[1:])


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Largest difference of log-probabilities from the plain policy's, by policy and mode. Tokens must be the same."""
    params = init(TINY, jax.random.key(1))
    prompts: list[list[int]] = [
        np.random.default_rng(i).integers(0, 97, size).tolist() for i, size in enumerate((150, 3, 60))
    ]
    small = {"budget": 48, "sinks": 4, "dense_layers": 1, "n_clusters": 8, "window": 16, "every": 8}
    found: dict[str, Any] = {}
    for case in dict.fromkeys(Case.parse(text, 0)._replace(rows=1, context=0, without="") for text in args.cases):
        name = case.policy.partition(":")[0]
        if case.mode == "plain" or (key := f"{name}@{case.mode}@steps={case.steps}") in found:
            continue
        fields = {field.name for field in dataclasses.fields(kvjax.policies.policies()[name])}
        policy = get_policy(name, **{field: value for field, value in small.items() if field in fields})
        with jax.default_matmul_precision("highest"):
            want, got = (
                kvjax.generate(params, prompts, policy=one, max_new_tokens=40, ignore_eos=True)
                for one in (policy, offloaded(policy, case.steps, case.mode))  # pyright: ignore[reportArgumentType]
            )
        pairs = list(zip(got, want, strict=True))
        same = all(a.tokens == b.tokens for a, b in pairs)
        worst = max(float(np.max(np.abs(np.subtract(a.logprobs, b.logprobs)))) for a, b in pairs)
        far = got[0].stats.host_cache_bytes > 0 and got[0].stats.cache_bytes < want[0].stats.cache_bytes
        found[key] = worst if same and far else f"not the same: tokens {same}, less on the device {far}, {worst}"
    return {"largest_difference": found}


if __name__ == "__main__":
    main()
