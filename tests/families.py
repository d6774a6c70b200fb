"""The table of supported families in docs/howto/own_model.md. `python tests/families.py` prints it."""

from collections.abc import Mapping
from pathlib import Path

from converted import CHECKPOINTS, WRITTEN_AS
from oracles import ARCHITECTURES

from kvjax.conversion.gguf_file import ARCHITECTURE_OF
from kvjax.conversion.hf_config import FAMILIES, Family

ROOT = Path(__file__).parents[1]

REAL: Mapping[str, tuple[str, str]] = {
    "llama": ("SmolLM2-135M-Instruct", "tests/models/test_smollm2.py"),
    "gemma3_text": ("Gemma 3 270M", "tests/models/test_gemma3.py"),
}
"""Models whose real weights tests load, and the tests, by family."""

_WINDOWS = {"none": "", "all": "sliding windows", "some": "optional windows", "pattern": "windows and full attention"}


def table() -> str:
    """The table: for each family what it is loaded from, and what it is tested with."""
    lines = [
        "| `model_type` | layers | loaded from | random weights, against transformers | a file of llama.cpp's converter | real weights |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    converted = {fields["model_type"] for fields in CHECKPOINTS.values()}
    for name, family in FAMILIES.items():
        random = [model for model, (kind, _) in ARCHITECTURES.items() if kind == name]
        cells = [
            f"`{name}`",
            _layers(family),
            _sources(name),
            ", ".join(random),
            "yes" if name in converted else "",
            REAL[name][0] if name in REAL else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |")


def _sources(name: str) -> str:
    own = [ARCHITECTURE_OF[name]] if name in ARCHITECTURE_OF else []
    files = ", ".join(f"`{architecture}`" for architecture in WRITTEN_AS.get(name, own))
    return f"safetensors, GGUF ({files})" if files else "safetensors"


def _layers(family: Family) -> str:
    kinds = (
        "gated delta nets and full attention" if family.recurrent_other_than else "",
        _WINDOWS[family.windows],
        "some without rotation" if family.unrotated_every else "",
        "experts" if family.experts else "",
        "a shared MLP" * (family.shared_experts or family.sigmoid_router),
        "attention sinks" * family.sinks,
    )
    return ", ".join(filter(None, kinds)) or "full attention"


if __name__ == "__main__":
    print(table())
