"""Count the bytes that matmuls with 8-bit and 4-bit weights move on a TPU, beside bfloat16, according to the TPU compiler.

    python -m benchmarks.quantized_products      # writes benchmarks/results/quantized-products-v5e.json

No TPU is needed: programs are compiled ahead of time, with plain XLA. They multiply one to sixteen rows by the matrices
of Llama-3.1-8B. A row has

- `bytes`: what the program has to move;
- `counted_bytes`: what the compiler counts. This includes prefetches into the chip's own memory, so compare rows with
  each other, not with a bandwidth;
- `temporary_bytes`: temporaries in the device's memory;
- `floats_first`: whether the whole matrix is dequantised before the matmul.
"""

import argparse
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report
from kvjax.models.params import quantized_shape
from kvjax.pallas_kernels import projection
from kvjax.pallas_kernels.projection.quantized import nbytes_of
from kvjax.runtime.absent_tpu import CHIPS, compile_for

MATRICES = {
    "q and o": (4096, 4096),
    "k and v": (1024, 4096),
    "gate and up": (14336, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
"""Number of outputs and inputs of each matrix."""

KINDS = "bfloat16", "int8", "int4"

ROWS = 1, 8, 16


def main() -> None:
    """Measure one case after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=CHIPS, default="v5e")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for matrix, kind, count in product(MATRICES, KINDS, ROWS):
        rows.append(measure(args.chip, matrix, kind, count))
        print(rows[-1], flush=True)
    out = args.out or Path(f"benchmarks/results/quantized-products-{args.chip}.json")
    report.write(out, report.header(chip=args.chip, shape="llama-3.1-8b"), rows)


def measure(chip: str, matrix: str, kind: str, rows: int) -> dict[str, Any]:
    """Return one row of the result file."""
    shape = outputs, inputs = MATRICES[matrix]
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
    w: Any = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    if kind != "bfloat16":
        w = quantized_shape(jax.ShapeDtypeStruct(shape, jnp.float32), kind)
    compiled = compile_for(chip, lambda x, w: projection(x, w)[0], x, w)
    return {
        "matrix": matrix,
        "kind": kind,
        "rows": rows,
        "bytes": nbytes_of((x, w)) + 2 * rows * outputs,
        "counted_bytes": int(compiled.cost_analysis()["bytes accessed"]),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "floats_first": kind != "bfloat16" and makes_floats(compiled.as_text(), math.prod(shape)),
    }


def makes_floats(text: str, numbers: int) -> bool:
    """Whether a step of a compiled program returns `numbers` floats, in one array or in two halves."""
    steps = [
        line for line in text[text.index("ENTRY") :].splitlines()[1:] if " = " in line and "parameter(" not in line
    ]
    for step in steps:
        results = step.partition(" = ")[2]
        results = results.partition(") ")[0] if results.startswith("(") else results.partition(" ")[0]
        arrays = re.findall(r"(?:bf16|f32)\[([\d,]+)\]", results)
        if max((math.prod(map(int, dims.split(","))) for dims in arrays), default=0) >= numbers // 2:
            return True
    return False


if __name__ == "__main__":
    main()
