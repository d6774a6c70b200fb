"""The process that measures: cases come in as JSON, one per line, and what was seen goes out.

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
    """Answer cases until the input ends: first with `header()`, then with `measure(case)` or how it failed, one line each.

    Whatever else the process prints goes to standard error.
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
        except Exception as error:  # whatever it is, the next case is to run
            found = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        gc.collect()  # what the error's frames held on the device
        say(found)


def main() -> None:
    """Measure kvjax, or with `compile_only` have its programs in the compilation cache."""
    options = json.loads(sys.argv[1])
    from kvjax.runtime.compilation_cache import VARIABLE, keep_unless_refused

    os.environ[VARIABLE] = str(int(options["compilation_cache"]))
    keep_unless_refused()
    import jax

    from kvjax.evals.report import header
    from kvjax.models import Params
    from kvjax.models.sharding import init_on
    from kvjax.randomness import random_key
    from kvjax.user_code import POLICIES, load_policies

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
