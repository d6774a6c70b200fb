"""Block sizes that were measured to be fastest: one JSON file a device, an ordered list of rules an operation."""

import functools
import importlib.resources
import json
import re
from collections.abc import Mapping
from typing import Any

from .device import target


def tuned(operation: str, case: Mapping[str, Any], default: Mapping[str, int]) -> dict[str, int]:
    """Block sizes for a case on the device that programs are traced for.

    The first rule wins of which every condition holds: a condition is a value that the case must have, or `[low, high]`
    that it must lie in, ends included.

    Args:
        case: what the rules may ask about, such as `{"head_dim": 128, "dtype": "bfloat16", "tokens": 8192}`.
        default: what a heuristic would take; a rule replaces the sizes that it names.
    """
    for rule in _rules(_file_name(target().kind)).get(operation, []):
        if all(_holds(wanted, case[name]) for name, wanted in rule["when"].items()):
            return {**default, **rule["use"]}
    return dict(default)


def _holds(wanted: Any, value: Any) -> bool:
    return wanted[0] <= value <= wanted[1] if isinstance(wanted, list) else wanted == value


def _file_name(kind: str) -> str:
    """Where a device's sizes stand: "NVIDIA H200" has nvidia-h200.json."""
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json"


@functools.cache
def _rules(name: str) -> dict[str, list[dict[str, Any]]]:
    file = importlib.resources.files(__package__ or "kvjax.pallas_kernels") / "tuned" / name
    return json.loads(file.read_text()) if file.is_file() else {}
