"""Measure time to first token (TTFT) and time per output token (TPOT) of kvjax or vLLM, through their public functions.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.93 python -m benchmarks.first_token kvjax --cases 16384x1,1024x64 --policies full,snapkv:0.2
    PYTHONPATH=VLLM:. python -m benchmarks.first_token vllm --cases 16384x1,1024x64 | tee vllm.jsonl
    python -m benchmarks.first_token kvjax --peer vllm.jsonl --out benchmarks/results/first-token-h100.json

A case is `PROMPTxROWS`: that many random prompts of that many tokens, with random weights in bfloat16. With `--weights
mxfp4`, the experts of kvjax are in MXFP4. Both programs get lists of token ids, and neither stops early. Run them one
after the other on one machine, so that each has the GPU to itself.

TTFT is the wall clock of a call for one token. TPOT is (t(513) - t(1)) / 512, where t(n) is the wall clock of a call for
n tokens. Each t is the median of `--calls` calls after one that is not counted.

With `--compiled`, kvjax' calls use programs that `kvjax.aot_compile` makes once for a case. Of both programs, only the
first call of a case is not counted, so that a case takes half as long.

`bound_ms` is the bandwidth bound of a step with the full cache. All `--devices` read equal shares. For a mixture of experts
it assumes a random router. With `--count-experts`, a run of its own generates the tokens of the timed calls again. It counts
the distinct experts that their steps read, and adds the bound with those.

`--peer` adds the lines that the other program printed. `python -m benchmarks.tables --write` then puts both into
README.md.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from kvjax.config import PRESETS, ModelConfig

NEW = 513
"""Tokens of a long call."""

Generate = Callable[[list[list[int]], int], None]
"""Continues prompts by a number of tokens."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=["kvjax", "vllm"])
    parser.add_argument("--cases", default="16384x1,16384x8,65536x1,1024x64", help="PROMPTxROWS, separated by commas")
    parser.add_argument("--policies", default="full", help="of kvjax, separated by commas")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(PRESETS))
    parser.add_argument("--weights", default="float", choices=("float", "mxfp4"), help="kind of kvjax' experts")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--devices", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--memory", type=float, default=0.92, help="share of the GPU's memory that vLLM takes")
    parser.add_argument(
        "--calls",
        default="5",
        help="timed calls of each length: one number, or one for each case (default: %(default)s)",
    )
    parser.add_argument("--compiled", action="store_true", help="compile once for both lengths")
    parser.add_argument("--first-only", action="store_true", help="measure no TPOT")
    parser.add_argument("--count-experts", action="store_true", help="of the steps of a call, instead of times")
    parser.add_argument("--out", type=Path, help="result file of kvjax; printed alone if not given")
    parser.add_argument("--peer", type=Path, help="lines that vLLM's run printed, which are added to the result file")
    args = parser.parse_args()
    if args.out is not None and args.program == "vllm":
        parser.error("--out is for kvjax; keep what is printed, and give it to kvjax' run as --peer")
    if args.weights != "float" and args.program == "vllm":
        parser.error("--weights is for kvjax; vLLM's random weights are in bfloat16")
    config = PRESETS[args.shape]
    if args.layers is not None:
        config = config.with_depth(args.layers)
    sizes = [tuple(map(int, case.split("x"))) for case in args.cases.split(",")]
    calls = list(map(int, args.calls.split(",")))
    if len(calls) not in (1, len(sizes)) or min(calls) < 1:
        parser.error(f"--calls is one positive number or {len(sizes)}, one for each case, not {args.calls!r}")
    if args.program == "vllm":
        generate, about = vllm(config, max(prompt for prompt, _ in sizes) + NEW, args.devices, args.memory)
        programs = iter([("full", generate, about)])
    else:
        programs = _kvjax(config, args)
    for policy, generate, about in programs:
        for (prompt, rows), count in zip(sizes, calls * (len(sizes) // len(calls)), strict=True):
            random = np.random.default_rng(0)
            prompts = [random.integers(0, config.vocab_size - 300, prompt).tolist() for _ in range(rows)]
            row: dict[str, Any] = {
                **about,
                "shape": args.shape,
                "policy": policy,
                "prompt": prompt,
                "rows": rows,
                "layers": config.num_layers,
                "weights": args.weights,
                **report.measured_here(),
            }
            try:
                if args.count_experts:
                    row |= _experts_read(config, generate, prompts, row["device"], args.devices, args.weights)
                else:
                    row |= _times(generate, prompts, count, args)
                    if not args.first_only and policy == "full":
                        row["bound_ms"] = _bound_ms(config, prompt, rows, row["device"], args.devices, args.weights)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(row), flush=True)
            if args.out is not None:
                _keep(args.out, row)
            gc.collect()
    if args.peer is not None and args.out is not None:
        for line in args.peer.read_text(encoding="utf-8").splitlines():
            if line.startswith('{"program": "vllm"'):
                _keep(args.out, json.loads(line))


def _times(generate: Generate, prompts: list[list[int]], calls: int, args: argparse.Namespace) -> dict[str, Any]:
    """Columns of a case: times of calls, and what they give."""
    first = _seconds(generate, prompts, 1, calls)
    found = {"ttft_s": statistics.median(first), "calls_1": first}
    if args.first_only:
        return found
    long = _seconds(generate, prompts, NEW, calls, compiles=not args.compiled)
    return found | {"calls_513": long, "tpot_ms": 1e3 * (statistics.median(long) - found["ttft_s"]) / (NEW - 1)}


def _seconds(
    generate: Generate, prompts: list[list[int]], new: int, calls: int, *, compiles: bool = True
) -> list[float]:
    """Wall clock of each call.

    Args:
        compiles: whether a call with this number of new tokens may compile, so that the first one is not counted.
    """
    if compiles:
        generate(prompts, new)
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        generate(prompts, new)
        times.append(time.perf_counter() - start)
    return times


def _bound_ms(
    config: ModelConfig, prompt: int, rows: int, device: str, devices: int, kind: str, experts: float | None = None
) -> float | None:
    """Milliseconds to read the weights and the full caches, halfway through the answers; None if the bandwidth is not known.

    Args:
        devices: number of devices. Each reads an equal share.
        kind: kind of the experts, "float" or "mxfp4".
        experts: distinct experts of a layer that a step reads; those of a random router if None.
    """
    from kvjax.bench.floor import bandwidth, weight_bytes
    from kvjax.models import abstract

    rate = bandwidth(device)
    weights = weight_bytes(abstract(config, "bfloat16", weights=kind), rows, experts)
    read = weights + rows * config.cache_bytes(prompt + NEW // 2, 2)
    return None if rate is None else 1e3 * read / rate / devices


def _experts_read(
    config: ModelConfig, generate: Generate, prompts: list[list[int]], device: str, devices: int, kind: str
) -> dict[str, Any]:
    """Distinct experts that a layer reads in a step, the mean over layers and steps of a call, and the bound with them."""
    import jax

    from kvjax.models import experts

    counts: list[int] = []
    route = experts.route

    def counting(config: Any, router: Any, x: Any, *biases: Any) -> Any:
        chosen, weights = route(config, router, x, *biases)
        if len(x) == len(prompts):  # a step, not a prompt
            jax.debug.callback(lambda found: counts.append(len(np.unique(found))), chosen)
        return chosen, weights

    experts.route = counting
    jax.clear_caches()
    try:
        generate(prompts, NEW)
        jax.effects_barrier()
    finally:
        experts.route = route
    read = statistics.mean(counts)
    bound = _bound_ms(config, len(prompts[0]), len(prompts), device, devices, kind, read)
    return {"experts_read": read, "experts_counted": len(counts), "bound_experts_read_ms": bound}


def _kvjax(config: ModelConfig, args: argparse.Namespace) -> Iterator[tuple[str, Generate, dict[str, Any]]]:
    import jax

    import kvjax
    from kvjax._util.randomness import random_key
    from kvjax.models.sharding import get_shard, init_on
    from kvjax.policies.text import split_policies

    mesh = f"model={args.devices}" if args.devices > 1 else None
    params = init_on(get_shard(mesh, config), config, random_key(0), "bfloat16", args.weights)
    about = {"program": "kvjax", "version": kvjax.__version__, "jax": jax.__version__, "devices": args.devices}
    for policy in split_policies(args.policies):
        compiled: dict[tuple[int, int], Any] = {}  # by rows and prompt tokens, only the latest

        def generate(prompts: list[list[int]], new: int, policy: str = policy, compiled: Any = compiled) -> None:
            given: Any = prompts if len(prompts) > 1 else prompts[0]
            options: Any = {"ignore_eos": True, "mesh": mesh}
            if not args.compiled:
                found = kvjax.generate(params, given, policy, max_new_tokens=new, **options)
            else:
                size = len(prompts), len(prompts[0])
                if size not in compiled:
                    compiled.clear()
                    compiled[size] = kvjax.aot_compile(
                        params, policy, batch=size[0], prompt_len=size[1], max_new_tokens=NEW, **options
                    )
                found = compiled[size].generate(params, given, new)
            for each in found if isinstance(found, list) else [found]:
                assert len(each.tokens) == new, (len(each.tokens), new)

        yield policy, generate, about | {"device": jax.devices()[0].device_kind, "compiled": args.compiled}


def vllm(config: ModelConfig, longest: int, devices: int, memory: float = 0.92) -> tuple[Generate, dict[str, Any]]:
    """A vLLM with random weights, and what its rows name.

    Args:
        longest: tokens of the longest prompt with its answer.
        devices: GPUs that share the model.
        memory: share of a GPU's memory that it takes.
    """
    import os
    import tempfile

    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_USE_NCCL_SYMM_MEM": "0",
    }
    import torch
    import vllm as program  # pyright: ignore[reportMissingImports]

    from kvjax.conversion.hf_config import to_hf

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(to_hf(config) | {"torch_dtype": "bfloat16"}))
        model = program.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=longest + 64,
            gpu_memory_utilization=memory,
            enable_prefix_caching=False,
            tensor_parallel_size=devices,
            seed=0,
        )

    def generate(prompts: list[list[int]], new: int) -> None:
        sampling = program.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        found = model.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        assert all(len(each.outputs[0].token_ids) == new for each in found)

    about = {"program": "vllm", "version": program.__version__, "torch": torch.__version__, "devices": devices}
    return generate, about | {"device": torch.cuda.get_device_name()}


def _keep(path: Path, row: dict[str, Any]) -> None:
    """Put a row into a result file, over an earlier one of the same case, whose other columns stay."""
    header, rows = report.begun(path, report.header(weights="random"))
    same = ("program", "shape", "policy", "prompt", "rows", "layers", "devices", "device")

    def key(row: dict[str, Any]) -> list[Any]:
        return [*(row[name] for name in same), row.get("weights", "float")]

    others = [old for old in rows if key(old) != key(row)]
    earlier = next((old for old in rows if old not in others), {})
    report.write(path, header, [*others, earlier | row])


if __name__ == "__main__":
    main()
