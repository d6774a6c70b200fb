"""Write a model with random weights as a Hugging Face directory, to measure servers without a download.

    python -m benchmarks.random_model llama-3.1-8b /tmp/model
    kvjax serve /tmp/model --policy treekv:1024 --rows auto
    vllm serve /tmp/model

Its tokenizer has a made-up word for each token of the vocabulary, so all servers decode answers at the same cost.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import tokenizers

import kvjax
from kvjax._util.randomness import random_key
from kvjax.config import PRESETS
from kvjax.models import init


def write_tokenizer(path: Path, count: int) -> None:
    """Write a tokenizer with `count` words into a directory."""
    vocabulary = {f"▁w{i}": i for i in range(count)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="▁w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "▁w1", "unk_token": "▁w0"}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(PRESETS))
    parser.add_argument("path", type=Path, help="directory to create")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    config = PRESETS[args.shape]
    if args.layers is not None:
        config = config.with_depth(args.layers)
    params = init(dataclasses.replace(config, eos=(1,)), random_key(0), jnp.dtype(args.dtype))
    kvjax.save(params, args.path, format="safetensors")
    write_tokenizer(args.path, config.vocab_size)


if __name__ == "__main__":
    main()
