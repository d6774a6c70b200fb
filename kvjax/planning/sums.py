"""What devices that share a model spend on adding up, by measurement."""

from collections.abc import Mapping

from kvjax.config import ModelConfig
from kvjax.devices import Device

SUMS: Mapping[str, tuple[tuple[int, float], ...]] = {"H200": ((8_192, 30e-6), (33_000_000, 185e-6))}
"""Seconds that a sum over devices takes by its bytes, measured inside of a jitted loop: two H200s, NVLink, NCCL by jax 0.11.2."""


def sums_seconds(device: Device, count: int, nbytes: int) -> float | None:
    """Seconds that `count` sums of so many bytes take by `SUMS`, between whose sizes they grow evenly; None where there are none."""
    if device.kind not in SUMS or not count:
        return None if count else 0.0
    sizes, seconds = zip(*SUMS[device.kind], strict=True)
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    return count * (seconds[0] + slope * max(nbytes - sizes[0], 0))


def step_sums(config: ModelConfig) -> int:
    """How often the devices that share a model add up or gather in a decoding step: twice a layer, for the embedding, for logits."""
    return 2 * config.num_layers + 2
