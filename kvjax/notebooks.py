"""Prepares a notebook, after its first cell has installed kvjax: `kvjax.notebooks.prepare()`."""

import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

TPU_FILES = ("/dev/accel0", "/dev/vfio/0")
"""Device files. A machine with TPUs has one of them."""


def prepare() -> Any:
    """Make JAX use this machine's TPU or GPU, print the device, and return that `jax.Device`.

    kvjax requires JAX for CPUs. If another JAX version was installed before, for example in Colab, its accelerator
    support no longer fits. On a machine with a TPU or an NVIDIA GPU, this function installs the support for the current
    JAX version if it is missing. Call it before any computation.

    Raises:
        RuntimeError: the installation failed. The message has the command.

    Example:
        >>> from kvjax.notebooks import prepare
        >>> device = prepare()
        jax ... on cpu
    """
    missing = _missing()
    if missing is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", missing]
        if subprocess.run(command, check=False).returncode:
            raise RuntimeError(
                f"JAX lacks support for this machine's accelerator, and installing it failed: {' '.join(command)}; "
                "run that in a shell and restart the kernel, or set JAX_PLATFORMS=cpu to use the CPU"
            )
        importlib.invalidate_caches()
    import jax

    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.device_kind}")
    return device


def _missing() -> str | None:
    """Requirement of JAX's support for this machine's accelerator; None if nothing is missing."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return None
    version = importlib.metadata.version("jax")
    if any(Path(file).exists() for file in TPU_FILES):
        return f"jax[tpu]=={version}"  # pip selects the matching compiler, or does nothing if it is installed
    if shutil.which("nvidia-smi") is None:
        return None
    there = {_version(f"jax-cuda{release}-plugin") for release in (12, 13)}
    return None if version in there else f"jax[cuda12]=={version}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
