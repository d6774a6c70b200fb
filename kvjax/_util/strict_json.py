"""JSON by RFC 8259, which every program can read: without NaN, Infinity and halves of surrogate pairs."""

import json
import math
from typing import Any


def dumps(value: Any, indent: int | None = None) -> str:
    """Convert a value to JSON.

    Non-finite numbers become null, halves of surrogate pairs U+FFFD, and arrays lists. Values that JSON cannot express
    become their text in Python.
    """
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def loads(text: str | bytes) -> Any:
    """Parse a JSON document. NaN and Infinity, which some programs write, become None.

    Raises:
        ValueError: the document is not UTF-8 or not JSON. The message gives the column.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        return json.loads(text, parse_constant=lambda name: None)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("not JSON that can be read (nested too deeply)") from None


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _characters(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, dict):
        return {_characters(key) if isinstance(key, str) else _key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays of NumPy and JAX
        return _plain(value.tolist())
    return _characters(str(value))


def _key(key: Any) -> Any:
    return key if key is None or isinstance(key, bool | int | float) else _characters(str(key))


def _characters(text: str) -> str:
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
