"""Memory and bandwidth of devices, by their makers' data sheets.

NVIDIA's: "NVIDIA T4", "L4", "L40S", "A10G" (AWS' G5), "A100" (PCIe and SXM), "H100", "H200" Tensor Core GPU data sheets, "DGX B200", and
the GeForce RTX 4090's product page. Google's: "Cloud TPU system architecture" (v4, v5e, v5p, v6e), high bandwidth memory and its
bandwidth of a chip. Sizes are in powers of ten as they are printed there: what a device has is a little more than that or less, and a
driver and its runtime take their part of it, see `Device.usable`.
"""

import dataclasses
import os
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Device:
    """What a kind of device has.

    Attributes:
        kind: what JAX calls it: `device_kind` has this in it.
        memory: bytes.
        bandwidth: of it, in bytes per second.
    """

    kind: str
    memory: float
    bandwidth: float

    @property
    def usable(self) -> int:
        """Bytes for programs: of a TPU 15/16, as 15 of the 16 GB of a v5e; of a GPU what JAX takes.

        JAX takes three quarters of a GPU's memory, or the fraction that XLA_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_MEM_FRACTION is set to.
        XLA_PYTHON_CLIENT_PREALLOCATE=false changes when it takes the memory, and not how much. XLA_PYTHON_CLIENT_ALLOCATOR=platform has
        no limit, of which 15/16 are counted.

        Raises:
            ValueError: the variable is set to what is no fraction.
        """
        if self.kind.startswith("TPU") or os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
            return int(self.memory) * 15 // 16
        return int(self.memory * _gpu_fraction())


def _gpu_fraction() -> float:
    """The part of a GPU's memory that JAX takes."""
    for name in FRACTIONS:
        if told := os.environ.get(name):
            try:
                fraction = float(told)
            except ValueError:
                fraction = 0.0
            if not fraction > 0:
                raise ValueError(f"{name}={told!r}; give a fraction above 0, or unset it")
            return fraction if fraction <= 1 else 15 / 16  # more than there is, for memory that is shared with the host
    return 0.75


FRACTIONS = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Variables that tell JAX how much of a GPU's memory to take; at most one of them is set."""

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
        ("TPU v5", 95, 2.765),  # what JAX calls a v5p
    )
)
"""The first whose kind is in a `device_kind`, as words of their own, is meant."""

PRESETS: Mapping[str, Device] = {
    name: next(device for device in DEVICES if device.kind == kind)
    for name, kind in {
        "t4": "T4",
        "l4": "L4",
        "a100-40": "A100",
        "a100-80": "A100-SXM4-80GB",
        "h100": "H100",
        "h200": "H200",
        "v5e": "TPU v5e",
        "v5p": "TPU v5p",
        "v6e": "TPU v6",
    }.items()
}
"""Devices to plan for, by short names; Colab has T4, L4, A100, v5e and v6e among them."""


def device_of(device_kind: str) -> Device | None:
    """The device that JAX calls so; None if it is not in the table."""
    return next((each for each in DEVICES if re.search(rf"\b{re.escape(each.kind)}(?!\d)", device_kind)), None)
