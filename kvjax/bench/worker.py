"""The worker process of benchmarks: reads cases as JSON, one per line, and writes a result line for each.

python -m kvjax.bench.worker '{"bandwidth": 4.8e12}'
"""

import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(header: Callable[[], dict[str, Any]], measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write `header()`, then for each input line `measure(case)` or how it failed, one JSON line each, until the input ends.

    Other output of the process goes to standard error.
    """
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(what: dict[str, Any]) -> None:
        out.write(json.dumps(what, default=str) + "\n")
        out.flush()

    say(header())
    for line in sys.stdin:
        try:
            found = measure(json.loads(line))
        except Exception as error:  # the next case has to run, whatever happened
            found = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        gc.collect()  # frees device memory that the error's frames hold
        say(found)


def main() -> None:
    """Measure kvjax, or with `compile_only` compile its programs into the compilation cache."""
    options = json.loads(sys.argv[1])
    from kvjax.runtime.disk_cache import VARIABLE, keep_unless_refused

    os.environ[VARIABLE] = str(int(options["compilation_cache"]))
    keep_unless_refused()
    import jax

    from kvjax._util.randomness import random_key
    from kvjax._util.user_code import POLICIES
    from kvjax.evals.report import header
    from kvjax.models import Params
    from kvjax.models.sharding import init_on
    from kvjax.policies.registry import load_policies

    from .case import Case
    from .floor import bandwidth
    from .measure import compile_only, measure

    if source := os.environ.get(POLICIES):
        with contextlib.redirect_stdout(sys.stderr):
            load_policies(source)
    device = jax.devices()[0]
    rate = options["bandwidth"] or bandwidth(device.device_kind)
    memory = options["memory"] or (device.memory_stats() or {}).get("bytes_limit")
    weights: dict[Any, Params] = {}

    def measured(fields: dict[str, Any]) -> dict[str, Any]:
        case = Case(**fields)
        if options.get("compile_only"):
            return compile_only(case)
        shard = case.shard
        key = case.config, case.dtype, case.weights, shard
        if key not in weights:
            weights.clear()
            made = init_on(shard, case.config, random_key(0), case.dtype, case.weights, case.weights)
            weights[key] = jax.block_until_ready(made)
            del made
        return measure(case, weights[key], rate, memory)

    serve(lambda: header(weights="random", **options | {"bandwidth": rate, "memory": memory}), measured)


if __name__ == "__main__":
    main()
