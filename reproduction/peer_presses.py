"""kvpress' answers to the prompts of `reproduction.peer_quality`; run by the Python that has torch, transformers and kvpress.

    python reproduction/peer_presses.py FOLDER [--seconds 500] [--part 1/3]

Takes the model in FOLDER/model and the tokens in FOLDER/prompts.jsonl, and adds to FOLDER/theirs.jsonl what is not there yet; parts of the
prompts, each with a file of its own, may run beside each other. Nothing
of kvjax is imported, as kvpress takes only older versions of transformers: it may have an environment of its own. Prompts are read and
answers decoded by kvpress' own pipeline, given tokens in place of text. (transformers with torch >= 2.11; kvpress 0.5.5 needs
transformers < 5.3.)
"""

import argparse
import json
import time
from importlib import metadata
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer what has no answer yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=None, help="begin nothing after so long")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the i-th of n parts of the prompts")
    args = parser.parse_args()
    i, n = map(int, args.part.split("/"))
    end = None if args.seconds is None else time.monotonic() + args.seconds

    import torch
    from kvpress import KVPressTextGenerationPipeline  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = json.loads((args.folder / "settings.json").read_text(encoding="utf-8"))
    prompts = [json.loads(line) for line in (args.folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=getattr(torch, settings["dtype"]))
    model = model.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "model")
    pipeline = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer, device=device)

    out = args.folder / ("theirs.jsonl" if n == 1 else f"theirs-{i}-of-{n}.jsonl")
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "kvpress")}
    begin = {"versions": versions, "device": kind, "prompts": settings["prompts"], "dtype": settings["dtype"]}
    rows = begun(out, begin)
    done = {(row["method"], row["prompt"]) for row in rows}
    with out.open("a", encoding="utf-8") as file:
        for prompt in prompts[i - 1 :: n]:  # all methods have answered as many when time is up, but for one prompt
            for method in settings["methods"]:
                if (method, prompt["prompt"]) in done:
                    continue
                if end is not None and time.monotonic() > end:
                    print("out of time; run it again")
                    return
                answer = answered(pipeline, method, prompt, settings["budget"])
                row = {"method": method, "prompt": prompt["prompt"], "answer": answer}
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(f"{prompt['prompt']:3d} {method:20s} {answer[:80]!r}", flush=True)
    print("done")


def begun(out: Path, begin: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that a file has, which is begun if there is none; a last line that was cut short is taken away.

    Raises:
        SystemExit: its answers are to other prompts, or of other versions or another device.
    """
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True) if out.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    if not whole:
        whole = [json.dumps(begin) + "\n"]
    there, *rows = (json.loads(line) for line in whole)
    if there != begin:
        raise SystemExit(f"{out} was begun with {there}, now it would be {begin}; remove it, or take another folder")
    if whole != lines:
        out.write_text("".join(whole), encoding="utf-8")
    return rows


def answered(pipeline: Any, method: str, prompt: dict[str, Any], budget: int) -> str:
    """One prompt's answer, its context compressed to `budget` tokens before the question is read."""
    import torch

    context, question = (torch.tensor([prompt[name]]) for name in ("context", "question"))
    # The share of a context that leaves `budget` tokens of it; a thousandth more, as kvpress rounds down.
    press = made(method, 1 - (budget + 1e-3) / context.shape[1])
    with torch.inference_mode():
        (answer,) = pipeline._forward(
            {"context_ids": context, "questions_ids": [question]}, max_new_tokens=prompt["max_new_tokens"], press=press
        )
    return answer


def made(method: str, ratio: float) -> Any:
    """A press of kvpress by the name that kvjax has for the method; None for the full cache."""
    import kvpress  # pyright: ignore[reportMissingImports]

    if method == "full":
        return None
    if method == "chunkkv":
        return kvpress.ChunkKVPress(kvpress.SnapKVPress(compression_ratio=ratio), chunk_length=20)
    if method == "streaming_llm":  # as published: tokens stand where they are in the cache
        return kvpress.KeyRerotationPress(kvpress.StreamingLLMPress(compression_ratio=ratio))
    names = {"snapkv": "SnapKV", "tova": "TOVA", "keydiff": "KeyDiff", "expected_attention": "ExpectedAttention"}
    return getattr(kvpress, f"{names[method]}Press")(compression_ratio=ratio)


if __name__ == "__main__":
    main()
