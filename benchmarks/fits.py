"""Memory that a model needs on a TPU, as the TPU compiler reports it. No TPU and no weights are needed.

    python -m benchmarks.fits --weights int8 --policies snapkv:8192 --layers 2 --out /tmp/fits.json
    python -m benchmarks.fits
    python -m benchmarks.fits --weights int4/int4 --policies chelsea:8192
    python -m benchmarks.fits --chip v5e:2x2 --weights float --policies snapkv:8192,treekv:8192

For each kind of weights and each policy, two programs are compiled ahead of time (`kvjax.runtime.absent_tpu`): one
prefills a block of the prompt, one decodes. They are for one chip, or for several that share the model (`--chip
v5e:2x2`). A row of the result file has the bytes of weights and of cache on each chip, and the peak of each program:
its arguments, temporaries and results. Compare the peaks with the chip's memory.

If the result file exists, rows are added to it. Its settings and versions must then be those of the run.
`benchmarks.tables` makes tables of `docs/howto/weights.md` and `docs/howto/several_devices.md` from these files,
`tests/test_planning.py` compares `kvjax.plan` with them, and `tests/models/test_fits.py` calls `measure`.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from kvjax.bench.case import Case, read_policy
from kvjax.models import abstract
from kvjax.policies.text import split_policies
from kvjax.runtime.absent_tpu import CHIPS, HOSTS, memory_of, mesh
from kvjax.runtime.engine import Engine

CASE = "weights", "embedding", "policy", "settings", "tokens", "new_tokens", "block"
"""Fields that identify a row. A new row replaces one with equal fields."""


def main() -> None:
    """Compile the programs of all kinds of weights with all policies, and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=[*CHIPS, *HOSTS], default="v5e")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--weights",
        default="int8/int8,int4/int8",
        help="weights of the layers, then optionally / and weights of embedding and head (default float); each is float, int8 or "
        "int4. Separate several with commas",
    )
    parser.add_argument(
        "--policies", default="snapkv:8192,chunkkv:8192,treekv:8192,chelsea:8192", help="as for `kvjax bench`"
    )
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--block", type=int, default=4096, help="tokens that are prefilled at a time")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/fits-CHIP.json")
    args = parser.parse_args()
    out = args.out or Path(f"benchmarks/results/fits-{args.chip.replace(':', '-')}.json")
    header = report.header(chip=args.chip, shape=args.shape, layers=args.layers, dtype=args.dtype, block=args.block)
    header, rows = report.begun(out, header)
    for kinds in args.weights.split(","):
        weights, _, embedding = kinds.partition("/")
        for text in split_policies(args.policies):
            name, settings = read_policy(text)
            case = Case(
                name, settings, args.tokens, 1, args.shape, args.new_tokens, dtype=args.dtype, layers=args.layers
            )
            new = measure(case, weights, embedding or "float", args.block, args.chip)
            rows = [row for row in rows if any(row[name] != new[name] for name in CASE)] + [new]
            print(
                "{weights} {policy}: prefill {prefill_bytes:,} B, decode {decode_bytes:,} B".format(**rows[-1]),
                flush=True,
            )
            report.write(out, header, rows)


def measure(case: Case, weights: str, embedding: str, block: int, chip: str) -> dict[str, Any]:
    """Compile both programs of a case, and return its row."""
    params = abstract(case.config, case.dtype, weights=weights, embedding=embedding)
    engine = Engine(
        params,
        case.bound_policy(),
        prompt_len=case.context,
        max_new_tokens=case.new_tokens,
        block=block,
        mesh=mesh(chip),
    )
    start = time.perf_counter()
    memory = memory_of(engine)
    return {
        "weights": weights,
        "embedding": embedding,
        "policy": case.policy,
        "settings": case.settings,
        "tokens": case.context,
        "new_tokens": case.new_tokens,
        "block": engine.block,
        "weight_bytes": memory.weights,
        "cache_bytes": memory.cache,
        "full_cache_bytes": engine.full_cache_bytes,
        "prefill_bytes": memory.prefill,
        "decode_bytes": memory.decode,
        "compile_seconds": round(time.perf_counter() - start, 1),
    }


if __name__ == "__main__":
    main()
