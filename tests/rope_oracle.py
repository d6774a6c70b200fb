"""Rotary embeddings as transformers computes them, for configurations of every kind that is read.

`python tests/rope_oracle.py` writes `rope_goldens.json`, with which tests compare where there is no transformers.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).with_name("rope_goldens.json")

DIM = 32
VECTOR = np.linspace(-1, 1, DIM, dtype=np.float32)
"""A head's query or key."""

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(DIM // 2)],
    "long_factor": [1.0 + 1.5 * i for i in range(DIM // 2)],
    "original_max_position_embeddings": 512,
}

CASES: dict[str, dict[str, Any]] = {
    "default": {"length": 4096, "theta": 1e4},
    "default, other base": {"length": 4096, "theta": 1e6},
    "linear": {"length": 4096, "rope": {"rope_type": "linear", "factor": 3.0}},
    "llama3.1": {"length": 4096, "rope": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192}},
    "llama3.2": {"length": 600, "rope": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 512}},
    "yarn": {"length": 4096, "theta": 1e6, "rope": YARN},
    "yarn within the window": {"length": 64, "theta": 1e6, "rope": YARN},
    "yarn, no extension": {"length": 512, "rope": YARN | {"factor": 1.0}},
    "yarn, other rotations": {
        "length": 4096,
        "rope": YARN | {"factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    },
    "yarn, one step": {"length": 1024, "rope": YARN | {"beta_fast": 8.0, "beta_slow": 8.0, "truncate": False}},
    "yarn, short window": {"length": 256, "theta": 1e4, "rope": YARN | {"original_max_position_embeddings": 64}},
    "yarn, long window": {
        "length": 4096,
        "theta": 10.0,
        "rope": YARN | {"original_max_position_embeddings": 65536},
    },
    "yarn, attention factor": {"length": 4096, "rope": YARN | {"attention_factor": 0.7}},
    "yarn, mscale": {"length": 4096, "rope": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "yarn, mscale alone": {"length": 4096, "rope": YARN | {"factor": 40.0, "mscale": 0.7}},
    "longrope, short": {"length": 512, "theta": 1e4, "rope": LONG | {"factor": 32.0}},
    "longrope, long": {"length": 513, "theta": 1e4, "rope": LONG | {"factor": 32.0}},
    "longrope, factor of the windows": {"length": 4096, "theta": 1e4, "rope": LONG},
    "longrope, no extension": {"length": 513, "theta": 1e4, "rope": LONG | {"factor": 1.0}},
    "longrope, attention factor": {
        "length": 4096,
        "theta": 1e4,
        "rope": LONG | {"factor": 4.0, "attention_factor": 1.3},
    },
    "glm": {"length": 4096, "theta": 1e4, "family": "glm", "partial": 0.5},
    "phi3, partial": {
        "length": 4096,
        "theta": 1e4,
        "family": "phi3",
        "partial": 0.75,
        "rope": LONG | {key: LONG[key][: DIM * 3 // 8] for key in ("short_factor", "long_factor")},
    },
}
"""Lengths, and what config.json says."""


def fields(case: dict[str, Any]) -> dict[str, Any]:
    """A config.json of a case."""
    rope = {"rope_type": "default"} | case.get("rope", {}) | {"rope_theta": case.get("theta", 5e5)}
    beside = {}
    if case.get("family") == "phi3":
        beside["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if "partial" in case:
        rope["partial_rotary_factor"] = beside["partial_rotary_factor"] = case["partial"]
    return {
        "model_type": case.get("family", "llama"),
        "vocab_size": 64,
        "hidden_size": 2 * DIM,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": DIM,
        "max_position_embeddings": 16384,
        "pad_token_id": 0,
        "rope_parameters": rope,
        **beside,
    }


def theirs(case: dict[str, Any]) -> dict[str, Any]:
    """Frequencies, the factor on cosine and sine, and `VECTOR` at the last position of a case's length."""
    import torch
    import transformers

    family = case.get("family", "llama")
    config = transformers.AutoConfig.for_model(**fields(case))
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    rope = getattr(modeling, f"{family.capitalize()}RotaryEmbedding")(config)
    x = torch.from_numpy(VECTOR)[None, None, None]
    cos, sin = rope(x, torch.tensor([[case["length"] - 1]]))
    turned, _ = modeling.apply_rotary_pos_emb(x, x, cos, sin)
    return {
        "inv_freq": rope.inv_freq.tolist(),
        "amplitude": float(rope.attention_scaling),
        "turned": turned[0, 0, 0].tolist(),
    }


def main() -> None:
    """Write the numbers, with the versions they are from."""
    import torch
    import transformers

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = [f" {json.dumps(name)}: {json.dumps(theirs(case))}" for name, case in CASES.items()]
    cases = ",\n".join(lines)
    GOLDENS.write_text(f'{{"versions": {json.dumps(versions)},\n"cases": {{\n{cases}\n}}}}\n')


if __name__ == "__main__":
    main()
