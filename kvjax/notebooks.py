"""What a notebook begins with, once its first cell has installed kvjax: `kvjax.notebooks.prepare()`."""

import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

TPU_FILES = ("/dev/accel0", "/dev/vfio/0")
"""Of these a machine with TPUs has one."""


def prepare() -> Any:
    """Have JAX compute on this machine's TPU or GPU, say on what it computes, and return that `jax.Device`.

    kvjax requires JAX for CPUs, and where another JAX was before, in Colab for example, what it had for an accelerator no longer
    fits. So where there is a TPU or an NVIDIA GPU, what JAX needs for it is installed, of JAX's own version, unless it is there. Call it
    before anything is computed.

    Raises:
        RuntimeError: it could not be installed; the message has the command.
    """
    missing = _missing()
    if missing is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", missing]
        if subprocess.run(command, check=False).returncode:
            raise RuntimeError(
                f"JAX has nothing for this machine's accelerator, and installing it failed: {' '.join(command)}; "
                "run that in a shell and start the kernel anew, or set JAX_PLATFORMS=cpu to do without"
            )
        importlib.invalidate_caches()
    import jax

    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.device_kind}")
    return device


def _missing() -> str | None:
    """The requirement of what JAX needs for this machine's accelerator; None where it needs nothing more."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return None
    version = importlib.metadata.version("jax")
    if any(Path(file).exists() for file in TPU_FILES):
        return f"jax[tpu]=={version}"  # which compiler belongs to it pip knows, and does nothing where that is there
    if shutil.which("nvidia-smi") is None:
        return None
    there = {_version(f"jax-cuda{release}-plugin") for release in (12, 13)}
    return None if version in there else f"jax[cuda12]=={version}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
