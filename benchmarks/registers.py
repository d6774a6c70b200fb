"""What a GPU's compiler makes of kernels, where there is no GPU: registers, spills, barriers and loads of each, by block sizes.

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12 --no-deps       # of JAX's own version; or those of CUDA 13
    JAX_PLATFORMS=cpu python -m benchmarks.registers projection --shape "down: 1" --dtype int4 --variant " 64 4 1 0"

Kernels that spill, or bring tiles from one layout to another by way of shared memory, are slow; this tells before a GPU is there to time
them (`python -m benchmarks.kernels --tune`). Kernels in Mosaic are not told of here: with MOSAIC_GPU_DUMP_PTX=1, MOSAIC_GPU_DUMP_PTXAS=1 and MOSAIC_GPU_DUMP_TO=FOLDER in the environment
JAX 0.11 writes what their assembler says.
"""

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import kernel_cases

TARGETS = Path(__file__).parent / "targets"
ENTRY = re.compile(r"Compiling entry function '(\w+)'.*?\n(.*?)(?=ptxas info\s+: Compiling|\Z)", re.DOTALL)


def main() -> None:
    """Compile and print, a line for each kernel of each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="+", help="modules of benchmarks.kernel_cases")
    parser.add_argument("--shape", default="", help="only shapes that contain this")
    parser.add_argument("--dtype", default="", help="only this type")
    parser.add_argument("--variant", default="gpu", help="only variants that contain this")
    parser.add_argument(
        "--target", default="nvidia-h200", choices=sorted(path.stem for path in TARGETS.glob("*.txtpb"))
    )
    args = parser.parse_args()
    ptxas = find_ptxas()
    with tempfile.TemporaryDirectory() as dump:
        flags = f"--xla_dump_to={dump} --xla_gpu_cuda_data_dir={ptxas.parents[1]}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
        for number, (name, function, inputs) in enumerate(chosen(args)):
            print(name, flush=True)
            compile_for(args.target, f"variant_{number}", function, inputs)
            for path in sorted(Path(dump).glob(f"*variant_{number}.*ptx")):
                for line in told(path, ptxas):
                    print(f"  {line}", flush=True)


def chosen(args: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Any], Callable[[int], Any]]]:
    """What each variant is called, the variant, and what makes its inputs."""
    for module in args.operations:
        for case in kernel_cases.cases(module):
            if args.shape in case.shape and args.dtype in case.dtype:
                for variant, function in case.variants.items():
                    if args.variant in variant:
                        yield f"{case.operation}: {case.shape}, {case.dtype}, {variant}", function, case.inputs


def compile_for(target: str, name: str, function: Callable[..., Any], inputs: Callable[[int], Any]) -> None:
    """Compile a function of a case's inputs for a GPU that is not there."""
    import jax
    from jax.experimental import topologies

    config = (TARGETS / f"{target}.txtpb").read_text()
    try:
        found = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=config, topology="1x1x1"
        ).devices
    except Exception as error:  # of many types, by what is missing
        raise SystemExit(f"no compiler for CUDA here ({error}); see --help") from error
    cores = re.search(r"core_count: (\d+)", config)
    device = jax.sharding.AbstractDevice(
        device_kind=found[0].device_kind, platform="gpu", num_cores=int(cores[1]) if cores else None
    )
    there = jax.sharding.SingleDeviceSharding(found[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), jax.eval_shape(lambda: inputs(0))
    )

    def call(*given: Any) -> Any:
        return function(*given)

    call.__name__ = name
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        jax.jit(call).lower(*shapes).compile()


def told(path: Path, ptxas: Path) -> Iterator[str]:
    """A line for each kernel in a file of PTX."""
    code = path.read_text()
    if ".entry" not in code:  # of what is called, and has no kernels
        return
    target = re.search(r"\.target (\w+)", code)
    command = [ptxas, "-v", f"-arch={target[1] if target else 'sm_90a'}", path, "-o", path.with_suffix(".cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    for entry, found in ENTRY.findall(said.stderr + said.stdout):
        body = code[code.index(f".entry {entry}(") :].split("\n}\n")[0]
        loads = collections.Counter(re.findall(r"ld\.global[a-z0-9_.]*", body))
        counts = {"barriers": "bar.sync", "shared stores": "st.shared", "matrix products": "mma"}
        yield ", ".join(
            [
                entry,
                f"{_number('Used ([0-9]+) registers', found)} registers",
                f"{_number('([0-9]+) bytes spill stores', found)} bytes spilled",
                *(f"{body.count(word)} {what}" for what, word in counts.items()),
                *(f"{count} {load}" for load, count in loads.most_common()),
            ]
        )


def find_ptxas() -> Path:
    """The assembler, of a package or on the path.

    Raises:
        SystemExit: there is none.
    """
    found = [file for folder in sys.path for file in Path(folder).glob("nvidia/*/bin/ptxas")]
    found += [Path(file) for file in [shutil.which("ptxas")] if file]
    if not found:
        raise SystemExit("no ptxas here: pip install nvidia-cuda-nvcc-cu12 (or nvidia-cuda-nvcc, for CUDA 13)")
    found[0].chmod(0o755)
    return found[0]


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else "?"


if __name__ == "__main__":
    main()
