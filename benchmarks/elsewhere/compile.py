"""Runs a module that only compiles, as if it had GPUs that are not here; see this folder."""

import argparse
import importlib
import runpy
import sys
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.registers import TARGETS
from kvjax.policies import chelsea, pyramidkv


def main() -> None:
    """Take GPUs for JAX's devices, and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument(
        "--target", default="nvidia-h200", choices=sorted(path.stem for path in TARGETS.glob("*.txtpb"))
    )
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    take(args.gpus, args.target)
    sys.argv = [args.module, *args.arguments]
    runpy.run_module(args.module, run_name="__main__", alter_sys=True)


def take(count: int, target: str) -> None:
    """Have so many GPUs that are not here as JAX's devices. They compile, and run nothing: what kvjax computes at once stays with the CPU."""
    bridge: Any = importlib.import_module("jax._src.xla_bridge")
    topologies: Any = importlib.import_module("jax.experimental.topologies")
    config = (TARGETS / f"{target}.txtpb").read_text()
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=config, topology=f"1x1x{count}"
    )
    (cpu, *_) = jax.devices("cpu")
    bridge._backends["cuda"] = bridge._default_backend = found.devices[0].client

    def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with jax.default_device(cpu):
                return function(*args)

        return call

    for place, name in ((chelsea, "_usual"), (pyramidkv.PyramidKV, "max_budget")):
        setattr(place, name, on_cpu(getattr(place, name)))


if __name__ == "__main__":
    main()
