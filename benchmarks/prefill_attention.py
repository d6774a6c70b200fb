"""Time of the blockwise XLA prefill attention by block size, at the default model's shape.

python -m benchmarks.prefill_attention
"""

import argparse
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np

from benchmarks import report
from kvjax.pallas_kernels.prefill_attention import reference


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prefill-attention.json"))
    args = parser.parse_args()
    q, k, v = (jax.random.normal(jax.random.key(i), (1, args.tokens, n, 64)) for i, n in enumerate((9, 3, 3)))
    rows = []
    for block in args.blocks:
        reference.BLOCK = block
        attend = jax.jit(partial(reference.prefill_attention, scale=0.125)).lower(q, k, v).compile()
        times = []
        for _ in range(6):
            start = time.perf_counter()
            jax.block_until_ready(attend(q, k, v))
            times.append(time.perf_counter() - start)
        memory = attend.memory_analysis()
        assert memory is not None
        temporary = memory.temp_size_in_bytes
        rows.append({"block": block, "seconds": float(np.median(times[1:])), "temp_bytes": temporary})
        print(
            f"block {block:5d}  {1e3 * rows[-1]['seconds']:8.1f} ms  temporaries {temporary / 1e6:8.1f} MB", flush=True
        )
    report.write(args.out, report.header(tokens=args.tokens, heads=9, kv_heads=3, head_dim=64, dtype="float32"), rows)


if __name__ == "__main__":
    main()
