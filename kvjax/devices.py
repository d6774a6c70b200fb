"""Memory and bandwidth of devices, from the manufacturers' data sheets.

NVIDIA: data sheets "NVIDIA T4", "L4", "L40S", "A10G" (AWS G5), "A100" (PCIe and SXM), "H100" and "H200 Tensor Core
GPU", "DGX B200", and the product page of the GeForce RTX 4090. Google: "Cloud TPU system architecture" (v4, v5e, v5p,
v6e), high bandwidth memory and its bandwidth per chip. Sizes are in powers of ten, as printed there. The actual memory
differs slightly, and driver and runtime use part of it, see `Device.usable`.
"""

import dataclasses
import os
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        kind: words that JAX's `device_kind` contains.
        memory: bytes.
        bandwidth: memory bandwidth in bytes per second.
    """

    kind: str
    memory: float
    bandwidth: float

    @property
    def usable(self) -> int:
        """Bytes that programs can use: 15/16 of a TPU's memory (15 of the 16 GB of a v5e), or what JAX takes of a GPU's.

        JAX takes three quarters of a GPU's memory, or the fraction in XLA_CLIENT_MEM_FRACTION or
        XLA_PYTHON_CLIENT_MEM_FRACTION. XLA_PYTHON_CLIENT_PREALLOCATE=false changes when memory is taken, but not how
        much. XLA_PYTHON_CLIENT_ALLOCATOR=platform has no limit and counts as 15/16.

        Raises:
            ValueError: the variable is not a fraction.
        """
        if self.kind.startswith("TPU") or os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
            return int(self.memory) * 15 // 16
        return int(self.memory * _gpu_fraction())


def _gpu_fraction() -> float:
    """Fraction of a GPU's memory that JAX takes."""
    for name in FRACTIONS:
        if told := os.environ.get(name):
            try:
                fraction = float(told)
            except ValueError:
                fraction = 0.0
            if not fraction > 0:
                raise ValueError(f"{name}={told!r}; give a fraction above 0, or unset it")
            return fraction if fraction <= 1 else 15 / 16  # JAX allows more than 1, for memory shared with the host
    return 0.75


FRACTIONS = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Variables with the fraction of a GPU's memory that JAX takes. At most one is set."""

DEVICES = tuple(
    Device(kind, gigabytes * 1e9, terabytes * 1e12)
    for kind, gigabytes, terabytes in (
        ("B200", 180, 8.0),
        ("H200", 141, 4.8),
        ("H100 NVL", 94, 3.9),
        ("H100 PCIe", 80, 2.0),
        ("H100", 80, 3.35),
        ("A100-SXM4-80GB", 80, 2.039),
        ("A100 80GB PCIe", 80, 1.935),
        ("A100", 40, 1.555),
        ("L40S", 48, 0.864),
        ("L4", 24, 0.3),
        ("A10G", 24, 0.6),
        ("T4", 16, 0.32),
        ("RTX 4090", 24, 1.008),
        ("TPU v6", 32, 1.64),
        ("TPU v5p", 95, 2.765),
        ("TPU v5e", 16, 0.819),
        ("TPU v5 lite", 16, 0.819),
        ("TPU v4", 32, 1.228),
        ("TPU v5", 95, 2.765),  # JAX's name of a v5p
    )
)
"""The first device applies whose kind occurs in a `device_kind` as whole words."""

PRESETS: Mapping[str, Device] = {
    name: next(device for device in DEVICES if device.kind == kind)
    for name, kind in {
        "t4": "T4",
        "l4": "L4",
        "l40s": "L40S",
        "rtx-4090": "RTX 4090",
        "a100-40": "A100",
        "a100-80": "A100-SXM4-80GB",
        "h100": "H100",
        "h200": "H200",
        "v5e": "TPU v5e",
        "v5p": "TPU v5p",
        "v6e": "TPU v6",
    }.items()
}
"""Devices to plan for, by short names. Colab offers T4, L4, A100, v5e and v6e."""


def device_of(device_kind: str) -> Device | None:
    """Device with this `device_kind`; None if it is not in the table."""
    return next((each for each in DEVICES if re.search(rf"\b{re.escape(each.kind)}(?!\d)", device_kind)), None)
