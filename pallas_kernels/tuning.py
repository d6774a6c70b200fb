"""Measured block sizes of the kernels: one JSON file per device in `tuned/`, with an ordered list of rules per
operation.

An entry `{"base": "nvidia-h200"}` stands for the rules of the operation in that file.

`python -m benchmarks.kernels --tune NAME` measures them.
"""

import functools
import importlib.resources
import json
import re
from collections.abc import Mapping
from typing import Any

from .device import target


def tuned(operation: str, case: Mapping[str, Any], default: Mapping[str, int]) -> dict[str, int]:
    """Return the block sizes of a case on the device that programs are traced for.

    The first rule whose conditions all hold applies. A condition is either a value that the case must have, or a range
    `[low, high]`, ends included.

    Args:
        operation: name of the operation.
        case: properties of the case that rules can test, such as `{"head_dim": 128, "dtype": "bfloat16", "tokens":
            8192}`.
        default: heuristic block sizes. A rule replaces the sizes that it names.
    """
    for rule in _rules(_file_name(target().kind), operation):
        if all(_holds(wanted, case[name]) for name, wanted in rule["when"].items()):
            return {**default, **rule["use"]}
    return dict(default)


def _holds(wanted: Any, value: Any) -> bool:
    return wanted[0] <= value <= wanted[1] if isinstance(wanted, list) else wanted == value


def _file_name(kind: str) -> str:
    """Return the name of the file of a device's rules, without its ending: "NVIDIA H200" has nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


@functools.cache
def _rules(name: str, operation: str) -> list[dict[str, Any]]:
    """Return the rules of an operation on a device, with those of other files where it names them."""
    file = importlib.resources.files(__package__ or "kvjax.pallas_kernels") / "tuned" / f"{name}.json"
    entries = json.loads(file.read_text()).get(operation, []) if file.is_file() else []
    return [rule for entry in entries for rule in (_rules(entry["base"], operation) if "base" in entry else [entry])]
