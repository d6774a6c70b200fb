"""Compiling for a TPU that this machine does not have; tests that need it skip where there is no TPU compiler."""

import os
from typing import Any

import pytest

from kvjax.runtime import absent_tpu

CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")


def chip(generation: str) -> Any:
    """A TPU chip to compile for. Skips the test where there is no TPU compiler, except in CI."""
    try:
        return absent_tpu.chip(generation)
    except RuntimeError as error:
        if CI:
            raise
        pytest.skip(str(error))


def compile_for(generation: str, function: Any, *args: Any, **options: Any) -> Any:
    """As `kvjax.runtime.absent_tpu.compile_for`, skipping as `chip` does."""
    chip(generation)
    return absent_tpu.compile_for(generation, function, *args, **options)


def temporaries(compiled: Any) -> int:
    """Bytes of device memory that the program needs besides its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes
