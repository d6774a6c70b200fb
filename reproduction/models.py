"""The model that a program measures: its options, its name in result files, and its tokens of texts and prompts."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kvjax
from kvjax.evals import Format

SHARED = Path(os.environ.get("KVJAX_SHARED", "shared")) / "data"
"""Texts and tasks: `text/books/*.txt`, `text/wikitext-2/test.txt`, and `tasks/` with the files of LongBench and GSM8K."""

BOOK = SHARED / "text/books/1661_The_Adventures_of_Sherlock_Holmes.txt"
"""The text in which RULER hides needles."""

CHARACTERS = 8
"""Characters of a text to tokenise for each token, about twice as many as a token has."""

DEFAULT = "SmolLM2-135M-Instruct (the default model)"

FILES = {"qwen.gguf": "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf"}
"""Names of models by names of files that do not say it."""


def parser(about: str | None, dtype: str) -> argparse.ArgumentParser:
    """A parser that shows a program's docstring as its help, with the options `--model` and `--dtype`."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default=None, help="any source that kvjax.load takes; by default the default model")
    made.add_argument("--dtype", default=dtype, help="type of the weights (default: %(default)s)")
    return made


def named(source: str | None) -> str:
    """The name of the model of `--model` in result files."""
    return DEFAULT if source is None else Path(source).name


def title(settings: Mapping[str, Any]) -> str:
    """The name of a result file's model on pages."""
    name: str = settings["model"]
    return FILES.get(name, name)


def read_tokens(params: kvjax.Params, path: Path, count: int, skip: int = 0) -> list[int]:
    """`count` tokens of a text file after the first `skip`.

    Raises:
        SystemExit: the text is too short.
    """
    assert params.tokenizer is not None
    beginning = path.read_text(encoding="utf-8")[: CHARACTERS * (skip + count)]
    tokens = params.tokenizer.encode(beginning)[skip : skip + count]
    if len(tokens) < count:
        raise SystemExit(f"{path} has {len(tokens)} of {count} tokens after the first {skip}; give a longer text")
    return tokens


def chat_format(params: kvjax.Params) -> Format:
    """Prompts in the model's chat template, if it has one."""
    assert params.tokenizer is not None
    return Format(params.tokenizer, params.tokenizer.chat_template is not None)
