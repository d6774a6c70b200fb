"""kvpress' answers to the prompts of `reproduction.peer_quality`; run by the Python that has torch, transformers and kvpress.

    python reproduction/peer_presses.py FOLDER [--seconds 500] [--part 1/3]
    python reproduction/peer_presses.py FOLDER --kept      # compares kept tokens with those of kvjax in FOLDER/kept.npz

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
    parser.add_argument("--kept", action="store_true", help="write FOLDER/kept.json: how many kept tokens differ")
    args = parser.parse_args()
    i, n = map(int, args.part.split("/"))
    end = None if args.seconds is None else time.monotonic() + args.seconds

    import numpy as np
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

    sketch = None
    if any(method.startswith("compactor") for method in settings["methods"]):
        sketch = torch.from_numpy(np.load(args.folder / "sketch.npy")).to(device, model.dtype)
    if args.kept:
        found = dict[str, dict[str, int]]()
        asked = {prompt["prompt"]: prompt for prompt in prompts}
        for name, ours in np.load(args.folder / "kept.npz").items():
            method, number = name.split(":")
            theirs = kept(model, method, asked[int(number)], settings["budget"], sketch)
            found[name] = {"kept": int(ours.sum()), "only_here": int((ours & ~theirs).sum())}
            print(name, found[name], flush=True)
        told = {"device": kind, "prompts": settings["prompts"], "counts": found}
        (args.folder / "kept.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
        return
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
                answer = answered(pipeline, method, prompt, settings["budget"], sketch)
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


def answered(pipeline: Any, method: str, prompt: dict[str, Any], budget: int, sketch: Any) -> str:
    """One prompt's answer, its context compressed to `budget` tokens before the question is read. `sketch`: see `made`."""
    import torch

    context, question = (torch.tensor([prompt[name]]) for name in ("context", "question"))
    press = made(method, context.shape[1], budget, sketch)
    with torch.inference_mode():
        (answer,) = pipeline._forward(
            {"context_ids": context, "questions_ids": [question]}, max_new_tokens=prompt["max_new_tokens"], press=press
        )
    return answer


def kept(model: Any, method: str, prompt: dict[str, Any], budget: int, sketch: Any) -> Any:
    """Which tokens of a context are kept: a mask by layer and head. For presses that score tokens, and KVzip."""
    import numpy as np
    import torch
    from transformers import DynamicCache

    context, config = torch.tensor([prompt["context"]]), model.config
    press = made(method, context.shape[1], budget, sketch)
    mask = np.zeros((config.num_hidden_layers, config.num_key_value_heads, context.shape[1]), bool)
    if method != "kvzip":
        plain = press.score

        def score(module: Any, *args: Any, **options: Any) -> Any:
            scores = plain(module, *args, **options)
            best = scores[0].topk(int(context.shape[1] * (1 - press.compression_ratio)), dim=-1).indices
            np.put_along_axis(mask[module.layer_idx], best.cpu().numpy(), True, axis=-1)
            return scores

        press.score = score
    with torch.inference_mode(), press(model):
        model.model(input_ids=context.to(model.device), past_key_values=DynamicCache())
    if method == "kvzip":
        mask[:] = True
        for layer, mine in zip(model.model.layers, mask, strict=True):
            _, heads, tokens = layer.self_attn.masked_key_indices
            mine[heads.cpu().numpy(), tokens.cpu().numpy()] = False
    return mask


def made(method: str, tokens: int, budget: int, sketch: Any) -> Any:
    """A press of kvpress by the name that kvjax has for the method; None for the full cache.

    Args:
        tokens: of the context.
        budget: tokens that are left of it.
        sketch: the random numbers of CompactorPress, [layers, heads, head size, 48], so that both libraries use the same ones.
    """
    import kvpress  # pyright: ignore[reportMissingImports]

    # The share of a context that leaves `budget` tokens of it; a thousandth more, as kvpress rounds down.
    ratio = 1 - (budget + 1e-3) / tokens
    if method == "full":
        return None
    if method == "chunkkv":
        return kvpress.ChunkKVPress(kvpress.SnapKVPress(compression_ratio=ratio), chunk_length=20)
    if method == "streaming_llm":  # as published: tokens stand where they are in the cache
        return kvpress.KeyRerotationPress(kvpress.StreamingLLMPress(compression_ratio=ratio))
    if method == "lagkv":
        # The published code keeps equally many of every segment. kvpress would also keep the remainder.
        return kvpress.LagKVPress(compression_ratio=1 - (evenly(tokens, budget) + 1e-3) / tokens)
    if method == "kvzip":  # which rounds down the number of evicted tokens
        return kvpress.KVzipPress(compression_ratio=1 - (budget - 1e-3) / tokens)
    if method.startswith("compactor"):
        return compactor(ratio, sketch, padded="unpadded" not in method)
    names = {"snapkv": "SnapKV", "tova": "TOVA", "keydiff": "KeyDiff", "expected_attention": "ExpectedAttention"}
    return getattr(kvpress, f"{names[method]}Press")(compression_ratio=ratio)


def evenly(tokens: int, budget: int, sinks: int = 4, lag: int = 128) -> int:
    """Tokens that LagKV keeps if every scored segment keeps equally many: at most `budget`."""
    segments, rest = divmod(tokens - sinks, lag)
    always = sinks + lag + rest
    if segments < 2 or budget < always:
        raise ValueError(f"LagKV scores no segment of {tokens} tokens within a budget of {budget}; give more of both")
    return always + (budget - always) // (segments - 1) * (segments - 1)


def compactor(ratio: float, sketch: Any, padded: bool) -> Any:
    """CompactorPress with given random numbers, and with or without padding in the last chunk of its attention."""
    from unittest import mock

    import torch
    from kvpress.presses import (  # pyright: ignore[reportMissingImports]
        compactor_press,
        leverage_press,
        non_causal_attention_press,
    )

    class Given(leverage_press.LeverageScorePress):  # pyright: ignore[reportUntypedBaseClass]
        def score(self, module: Any, *args: Any, **options: Any) -> Any:
            drawn = sketch[module.layer_idx][None]
            with mock.patch.object(torch, "randn", return_value=drawn):
                return super().score(module, *args, **options)

    plain = non_causal_attention_press.NonCausalAttnPress.non_causal_chunked_attn

    class Unpadded(non_causal_attention_press.NonCausalAttnPress):  # pyright: ignore[reportUntypedBaseClass]
        @staticmethod
        def non_causal_chunked_attn(q: Any, k: Any, chunk_size: int) -> Any:
            whole = q.shape[2] // chunk_size * chunk_size
            parts = [(0, whole, chunk_size), (whole, q.shape[2], q.shape[2] - whole)]
            found = [plain(q[:, :, a:b], k[:, :, a:b], size) for a, b, size in parts if a < b]
            return torch.cat(found, dim=-1)

    press = compactor_press.CompactorPress(compression_ratio=ratio)
    press._leverage_press = Given(compression_ratio=ratio, sketch_dimension=sketch.shape[-1])
    if not padded:
        press._non_causal_press = Unpadded(compression_ratio=ratio, chunk_size=press.chunk_size)
    return press


if __name__ == "__main__":
    main()
