"""Measured cost of collectives between devices that share a model."""

from collections.abc import Mapping

from kvjax.config import ModelConfig
from kvjax.devices import Device

SUMS: Mapping[str, tuple[tuple[int, float], ...]] = {"H200": ((8_192, 30e-6), (33_000_000, 185e-6))}
"""Device → (bytes, seconds) of an all-reduce, measured inside a jitted loop on two H200 with NVLink and NCCL, jax 0.11.2."""


def sums_seconds(device: Device, count: int, nbytes: int) -> float | None:
    """Seconds of `count` all-reduces of `nbytes` bytes, interpolated in `SUMS`; None for devices without measurements."""
    if device.kind not in SUMS or not count:
        return None if count else 0.0
    sizes, seconds = zip(*SUMS[device.kind], strict=True)
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    return count * (seconds[0] + slope * max(nbytes - sizes[0], 0))


def step_sums(config: ModelConfig) -> int:
    """Number of all-reduces and gathers per decode step: two per layer, one for the embedding and one for the logits."""
    return 2 * config.num_layers + 2
