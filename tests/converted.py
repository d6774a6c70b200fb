"""Tiny random checkpoints, and the GGUF files that llama.cpp's converter makes of them.

The files are in `conversion/converted`, where `converter.json` names the converter's commit. This makes them again, with torch,
transformers and sentencepiece installed:

    python tests/converted.py FOLDER_OF_LLAMA_CPP COMMIT
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import byte_tokenizer, weights
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.conversion import from_hf, from_state_dict
from kvjax.models import Params

FOLDER = Path(__file__).parent / "conversion/converted"

_SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 20000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.25}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

CHECKPOINTS: Mapping[str, dict[str, Any]] = {
    "llama-3.1": {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "phi3": {"model_type": "phi3", "sliding_window": 20},
    "glm4": {"model_type": "glm4", "head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5},
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 265,  # the converter drops rows beyond its own count of tokens
        "num_hidden_layers": 7,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "intermediate_size": 16,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, **_EXPERTS, "norm_topk_prob": True},
    "qwen2_moe": {"model_type": "qwen2_moe", **_EXPERTS, "shared_expert_intermediate_size": 24},
    "olmoe": {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 16},
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 16,
        "sliding_window": None,
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "intermediate_size": 16},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "rope_theta": 500000.0,
        "intermediate_size": 16,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.22,
        "logits_scaling": 2.0,
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 20000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "head_dim": 8,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 16,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
    "qwen3_5": {"model_type": "qwen3_5_text", "head_dim": 16, **_DELTA_NET, "rope_parameters": _PARTIAL},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "head_dim": 8,
        **_DELTA_NET,
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "rope_parameters": _PARTIAL,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "head_dim": 8,
        **_DELTA_NET,
        **_EXPERTS,
        "num_experts": 4,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 24,
        "rope_parameters": _PARTIAL,
    },
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "mistral_small": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "qwen3_vl": {"model_type": "qwen3", "head_dim": 16},
    "gpt_oss_mxfp4": {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
    },
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16},
}
"""Fields of each config.json besides the sizes. Weights depend on a checkpoint's place in this order. Gemma's files have a window in all layers but each sixth."""

_WHOLE: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mistral_small": ({"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}, {}),
    "qwen3_vl": (
        {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"},
        {
            "model_type": "qwen3_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "mrope_section": [4, 2, 2]},
        },
    ),
}
"""Fields of models with a vision tower and of their text models, whose other fields are above, by checkpoint."""

WRITTEN_AS: Mapping[str, tuple[str, ...]] = {"mistral": ("llama", "mistral3")}
"""Architectures that the converter gives to a family without one of its own. They are read as families that compute the same. Those with
a vision tower are "mistral3".
"""

_SPLITTERS = {
    "llama": "llama-bpe",
    "mistral": "llama-bpe",
    "mixtral": "llama-bpe",
    "smollm3": "llama-bpe",
    "glm4": "glm4",
    "glm4_moe": "glm4",
    "gpt_oss": "gpt-4o",
}
"""Name of the pre-tokenizer, by `model_type`; "qwen2" for others. The converter knows those of published tokenizers alone."""


_CONVERT = """
import json, runpy, sys
folder, jobs = sys.argv[1:]
sys.path[:0] = [folder + "/gguf-py", folder]
from conversion.base import TextModel
for splitter, model, out in json.loads(jobs):
    TextModel.get_vocab_base_pre = lambda self, tokenizer: splitter
    sys.argv[1:] = [model, "--outfile", out, "--outtype", "f16", *(["--no-mtp"] if "qwen3_5" in out or "next" in out else [])]
    runpy.run_path(folder + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def checkpoint(name: str) -> Params:
    """The checkpoint, in numbers that float16 has, so that files are exact."""
    config = from_hf(_SIZES | CHECKPOINTS[name])
    tensors = weights(config, seed=list(CHECKPOINTS).index(name))
    scaled = {key: x if "norm" in key else 3 * x for key, x in tensors.items()}
    return from_state_dict(config, {key: x.astype(np.float16).astype(np.float32) for key, x in scaled.items()})


def write_folder(name: str, path: Path) -> None:
    """Write the checkpoint as models of its kind are published."""
    kvjax.save(checkpoint(name), path, format="safetensors")
    if name in _WHOLE:
        _with_vision(path, *_WHOLE[name])
    if name.endswith("mxfp4"):
        _in_mxfp4(path, np.random.default_rng(list(CHECKPOINTS).index(name)))


def _with_vision(path: Path, whole: dict[str, Any], text: dict[str, Any]) -> None:
    """Make the checkpoint the text model of one with a vision tower. The tower's tensors are left out."""
    fields = json.loads((path / "config.json").read_text()) | text
    del fields["architectures"]
    (path / "config.json").write_text(json.dumps(whole | {"text_config": fields}))
    tensors = load_file(path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / "model.safetensors")


def _in_mxfp4(path: Path, rng: np.random.Generator) -> None:
    """Replace the matrices of experts by random blocks in MXFP4."""
    fields = json.loads((path / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": quantised}))
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = rng.integers(122, 127, blocks.shape[:3], dtype=np.uint8)
    save_file(tensors, path / "model.safetensors")


def main() -> None:
    """Convert all checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama_cpp", type=Path, help="folder with llama.cpp's convert_hf_to_gguf.py")
    parser.add_argument("commit", help="its commit, which is written beside the files")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for name, fields in CHECKPOINTS.items():
            path = Path(folder) / name
            write_folder(name, path)
            write_tokenizer(path, ("[gMASK]", "<|observation|>") if fields["model_type"] == "glm4_moe" else ())
            jobs.append((_SPLITTERS.get(fields["model_type"], "qwen2"), str(path), str(FOLDER / f"{name}.gguf")))
        # A process of its own, since the converter comes with another version of the package `gguf`.
        subprocess.run([sys.executable, "-c", _CONVERT, str(given.llama_cpp), json.dumps(jobs)], check=True)
    made = {"converter": "ggml-org/llama.cpp, convert_hf_to_gguf.py", "commit": given.commit, "outtype": "f16"}
    (FOLDER / "converter.json").write_text(json.dumps(made, indent=1) + "\n")


def write_tokenizer(path: Path, more: tuple[str, ...] = ()) -> None:
    """A byte-level tokenizer with the special tokens that the converter looks for, of which `more` are those of one family."""
    backend = byte_tokenizer()
    backend.add_special_tokens(["<|endoftext|>", "<|user|>", *more])
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
