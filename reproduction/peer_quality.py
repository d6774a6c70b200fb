"""Nine methods of kvpress on the same weights and the same prompts: do both libraries answer alike?

    python -m reproduction.peer_quality ask FOLDER --model MODEL      # writes model, prompts and kvjax's answers
    python reproduction/peer_presses.py FOLDER                        # kvpress' answers, by the Python that has it
    python -m reproduction.peer_quality compare FOLDER    # writes reproduction/results/peer-quality-<device>.json and the page's section

With `--dtype float32` the two are asked in exact products of float32, `compare` writes peer-float32-<device>.json, and the page has another section:
what the two still answer differently is not of bfloat16's rounding.
kvpress' answers of the first seven methods to the default prompts on Qwen2.5-Coder-1.5B-Instruct in bfloat16 are in
reproduction/results/peer-answers: beside `ask`'s files in FOLDER they need not be asked again.

The model is written as transformers takes it, so that both read the same weights (a GGUF file's, too), and prompts are written as tokens,
so that templates and tokenizers play no part. Contexts are compressed to the same number of tokens before their questions are known,
with kvpress' settings of every method, and new tokens are kept in both. Scores are compared in pairs; every prompt that the two answer
differently is listed. With `--methods`, only some methods are asked, and `compare` keeps the file's rows of the others.

Which tokens do both keep of a prompt that they answer differently? Before `compare`:

    python -m reproduction.peer_quality kept FOLDER --model MODEL
    python reproduction/peer_presses.py FOLDER --kept
"""

import argparse
import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
from benchmarks import report
from kvjax.analysis import layers
from kvjax.evals.intervals import mean_interval
from kvjax.evals.report import ResultFile, header, model_fingerprint
from kvjax.evals.ruler.scoring import match_all
from kvjax.policies import (
    TOVA,
    ChunkKV,
    Compactor,
    ExpectedAttention,
    Full,
    KeyDiff,
    KVzip,
    LagKV,
    Policy,
    SnapKV,
    StreamingLLM,
    prompt_only,
)
from reproduction import models, sections
from reproduction.equal_bytes.batches import Roomy, answered
from reproduction.equal_bytes.suite import Data, make_suites
from reproduction.sections import Section, device


@dataclasses.dataclass(frozen=True)
class PressedKVzip(KVzip):
    """KVzip as kvpress has it.

    The words that ask for a later part have no space at their end. The chat template's tokens before the user's text, which are not
    repeated, are evicted first, except for the sinks.
    """

    @property
    def replay(self) -> Any:
        plain = super().replay
        return dataclasses.replace(plain, then=plain.then.rstrip())

    def shared_mask(
        self, scores: Float[Array, "B L K T"], budget: Int[Array, " B"], pos: Int[Array, "B #K T"], most: int
    ) -> Bool[Array, "B L K T"]:
        not_repeated = scores == jnp.finfo(scores.dtype).max
        return super().shared_mask(jnp.where(not_repeated, -1.0, scores), budget, pos, most)


def methods(budget: int) -> dict[str, Policy]:
    """kvjax's policies with the settings that kvpress has by default, all of them in the form that leaves new tokens alone."""
    return {
        "full": Full(),
        "snapkv": SnapKV(budget=budget, window=64, pool="avg", kernel=5),
        "chunkkv": ChunkKV(budget=budget, chunk=20, window=64, agg="mean", pool=5, shared_heads=True, rule="kvpress"),
        "streaming_llm": prompt_only(StreamingLLM(budget=budget, sinks=4)),
        "tova": prompt_only(TOVA(budget=budget, keep_newest=True)),
        "keydiff": prompt_only(KeyDiff(budget=budget)),
        "expected_attention": ExpectedAttention(budget=budget, sinks=4, future=512, epsilon=0.0),
        "lagkv": LagKV(budget=budget, sinks=4),
        "compactor": Compactor(budget=budget),
        UNPADDED: Compactor(budget=budget),
        "kvzip": PressedKVzip(budget=budget, chunk=2048, slack=1000.0),  # no limit of a layer's tokens
    }


UNCOUNTED = ("full", "chunkkv", "streaming_llm")
"""Methods whose kept tokens `kept` does not count: their presses do not score single tokens."""

UNPADDED = "compactor, unpadded"
"""`compactor` beside kvpress' press without padding in the last chunk."""


def main() -> None:
    """Ask, or compare."""
    parser = models.parser(__doc__, "bfloat16")
    parser.add_argument("what", choices=("ask", "kept", "compare"))
    parser.add_argument("folder", type=Path, help="holds the model, prompts and answers")
    parser.add_argument("--length", type=int, default=4096, help="tokens of RULER's prompts")
    parser.add_argument("--tasks", default="niah_single_2,niah_multikey_1,niah_multivalue,vt,fwe")
    parser.add_argument("--samples", type=int, default=10, help="of every task")
    parser.add_argument("--share", type=float, default=0.25, help="of the length, the tokens that are kept")
    parser.add_argument(
        "--methods", default=None, help=f"separated by semicolons; by default all: {'; '.join(methods(1024))}"
    )
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument(
        "--seconds", type=float, default=None, help="start nothing after this time; the next run continues"
    )
    parser.add_argument("--text", type=Path, default=models.BOOK)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.what == "ask":
        ask(args)
    elif args.what == "kept":
        kept(args)
    else:
        compare(args.folder, args.out)


def ask(args: argparse.Namespace) -> None:
    """Write the model and the prompts, if they are not there, and answer them."""
    end = None if args.seconds is None else time.monotonic() + args.seconds
    if args.dtype == "float32":  # as PyTorch multiplies it; by default GPUs round to 10 bits of mantissa
        jax.config.update("jax_default_matmul_precision", "highest")
    params = kvjax.load(args.model, dtype=args.dtype)
    tokenizer = params.tokenizer
    assert tokenizer is not None
    form, data = models.chat_format(params), Data(args.text, args.text, {})
    (whole,) = make_suites([f"ruler-{args.length}"], form, params.config.context_length, args.samples, 0, data)
    suite = whole.only(args.tasks.split(","))
    if suite is None:
        raise SystemExit(f"--tasks {args.tasks}; give some of {', '.join(whole.tasks)}")
    budget = round(args.share * args.length)
    policies = methods(budget)
    if args.methods is not None:
        asked = args.methods.split(";")
        if unknown := [name for name in asked if name not in policies]:
            raise SystemExit(f"--methods: no method {', '.join(unknown)}; there are {'; '.join(policies)}")
        policies = {name: policies[name] for name in asked}
    args.folder.mkdir(parents=True, exist_ok=True)
    before = args.folder / "settings.json"
    if before.exists() and (dtype := json.loads(before.read_text(encoding="utf-8"))["dtype"]) != args.dtype:
        raise SystemExit(
            f"{args.folder} has the model and answers in {dtype}, not in {args.dtype}; give another folder"
        )
    if not (args.folder / "model").exists():
        kvjax.save(params, args.folder / "model", format="safetensors")
    settings = {"dtype": args.dtype, "budget": budget, "methods": list(policies), "length": args.length}
    prompts = [
        {
            "prompt": i,
            "task": task,
            "context": context,
            "question": question,
            "answers": list(example.answers),
            "max_new_tokens": example.max_new_tokens,
        }
        for i, (task, example, (context, question)) in enumerate(
            (task, example, pair)
            for task, asked in suite.asked.items()
            for example, pair in zip(asked.examples, asked.pairs, strict=True)
        )
    ]
    lines = [json.dumps(prompt) + "\n" for prompt in prompts]
    settings["prompts"] = hashlib.sha256("".join(lines).encode()).hexdigest()  # answers to others are not compared
    told = {
        "model": models.named(args.model),
        "fingerprint": model_fingerprint(params),
        "suite": suite.settings,
        **settings,
    }
    results = ResultFile(args.folder / "ours.jsonl", header(**told))  # refuses to continue with others
    (args.folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    (args.folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    np.save(args.folder / "sketch.npy", sketches(params))
    done = {(row["method"], row["prompt"]) for row in results.rows}
    most = max(prompt["max_new_tokens"] for prompt in prompts)

    def made(policy: Policy) -> Roomy:
        engine = Roomy(params, policy, suite, args.batch)
        engine.compile_all()
        return engine

    pool = ThreadPoolExecutor(len(policies), thread_name_prefix="compile")
    wanted = {method for method in policies if any((method, prompt["prompt"]) not in done for prompt in prompts)}
    engines = {method: pool.submit(made, policy) for method, policy in policies.items() if method in wanted}
    for first in range(0, len(prompts), args.batch):
        for method, engine in engines.items():
            batch = [prompt for prompt in prompts[first : first + args.batch] if (method, prompt["prompt"]) not in done]
            if not batch:
                continue
            if end is not None and time.monotonic() > end:
                print("out of time; run it again")
                return
            contexts, questions = ([prompt[part] for prompt in batch] for part in ("context", "question"))
            answers = answered(params, engine.result(), contexts, questions, most)
            texts = [
                tokenizer.decode_after([], answer.tokens[: prompt["max_new_tokens"]])
                for prompt, answer in zip(batch, answers, strict=True)
            ]
            results.append(
                [
                    {"method": method, "prompt": prompt["prompt"], "answer": text}
                    for prompt, text in zip(batch, texts, strict=True)
                ]
            )
            print(f"{method:20s} {len(batch)} prompts from {first}", flush=True)
    print("done")


def sketches(params: kvjax.Params) -> Float[np.ndarray, "L K H k"]:
    """The normal numbers of Compactor's sketches, by layer and head. kvpress draws new ones for each prompt."""
    policy = Compactor()
    assert policy.sketch is not None
    specs = kvjax.Engine(params, policy, 512, prompt_len=512, max_new_tokens=1).specs
    return np.stack([np.asarray(policy.sketch_of(spec)) * policy.sketch**0.5 for spec in specs])


def kept(args: argparse.Namespace) -> None:
    """Write which tokens kvjax keeps of the prompts that were answered differently, as masks by layer and head."""
    prompts = {prompt["prompt"]: prompt for prompt in _lines(args.folder / "prompts.jsonl")}
    settings = json.loads((args.folder / "settings.json").read_text(encoding="utf-8"))
    _, _, ours, theirs = _answers(args.folder)
    if settings["dtype"] == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    params, policies = kvjax.load(args.model, dtype=settings["dtype"]), methods(settings["budget"])
    masks = dict[str, np.ndarray]()
    for row in compared(list(prompts.values()), ours, theirs):
        for each in row["differing"] if row["method"] not in UNCOUNTED else ():
            context = prompts[each["prompt"]]["context"]
            masks[f"{row['method']}:{each['prompt']}"] = layers.kept(params, context, policies[row["method"]])
            print(row["method"], each["prompt"], flush=True)
    np.savez_compressed(args.folder / "kept.npz", **masks)  # pyright: ignore[reportArgumentType]


def _answers(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Header of kvjax's answers, headers of the parts of kvpress' answers, and both libraries' answers."""
    ours_header, *ours = _lines(folder / "ours.jsonl")
    parts = [_lines(part) for part in sorted(folder.glob("theirs*.jsonl"))]
    if not parts:
        raise SystemExit(f"{folder} has no answers of kvpress; run reproduction/peer_presses.py first")
    return ours_header["header"], [header for header, *_ in parts], ours, [row for _, *rows in parts for row in rows]


def compare(folder: Path, out: Path | None) -> None:
    """Write the result file, and print it."""
    prompts = _lines(folder / "prompts.jsonl")
    begun, peers, ours, theirs = _answers(folder)
    theirs_header = peers[0]
    if any(there != theirs_header for there in peers):
        raise SystemExit(f"{folder}: parts of kvpress' answers are of different prompts, versions or devices")
    if begun["settings"]["prompts"] != theirs_header["prompts"]:
        raise SystemExit(f"{folder}: the two have answered different prompts; ask the one that is behind again")
    dtypes = begun["settings"]["dtype"], theirs_header.get("dtype", "bfloat16")  # which files of before do not say
    if dtypes[0] != dtypes[1]:
        raise SystemExit(f"{folder}: kvjax has answered in {dtypes[0]}, kvpress in {dtypes[1]}; ask one of them again")
    begun["peer"] = theirs_header
    rows = compared(prompts, ours, theirs)
    if (file := folder / "kept.json").exists():
        told = json.loads(file.read_text(encoding="utf-8"))
        if told["prompts"] != theirs_header["prompts"]:
            raise SystemExit(f"{file} is of other prompts; run peer_presses.py --kept again")
        for row in rows:
            for each in row["differing"]:
                if counts := told["counts"].get(f"{row['method']}:{each['prompt']}"):
                    each |= counts | {"kept_on": told["device"]}
    written = EXACT if begun["settings"]["dtype"] == "float32" else SECTION
    path = out or sections.RESULTS / f"{written.results}-{sections.slug(begun)}.json"
    begun, rows = with_recorded(path, begun, rows)
    report.write(path, begun, rows)
    for row in rows:
        print(line(row))
    print(f"wrote {path}")
    if out is None:
        written.write()


def with_recorded(
    path: Path, begun: dict[str, Any], rows: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows with those of other methods that the result file has.

    Raises:
        SystemExit: the file's rows are of other settings, versions or devices.
    """
    asked = [row["method"] for row in rows]
    if not path.exists() or set(asked) >= set(methods(1024)):
        return begun, rows
    recorded = report.read(path)

    def told(header: Mapping[str, Any]) -> dict[str, Any]:
        """What has to agree."""
        peer = {"dtype": header["settings"]["dtype"], **header["peer"]}
        return {
            "device": header["device"],
            "versions": header["versions"],
            "xla_flags": header.get("xla_flags"),
            "settings": {name: value for name, value in header["settings"].items() if name != "methods"},
            "peer": peer,
        }

    before, now = told(recorded["header"]), json.loads(json.dumps(told(begun)))
    if different := [name for name in now if before[name] != now[name]]:
        changes = "; ".join(f"{name} {before[name]}, now {now[name]}" for name in different)
        raise SystemExit(f"{path} has other methods, measured differently: {changes}. Ask all methods, or give --out")
    for row in recorded["rows"]:
        if fewer := [new for new in rows if new["method"] == row["method"] and new["prompts"] < row["prompts"]]:
            raise SystemExit(
                f"{path} has {row['prompts']} answers of {row['method']}, {fewer[0]['prompts']} are given. Ask all prompts, or give --out"
            )
    every = [
        *(row for row in recorded["rows"] if row["method"] not in asked),
        *({**row, "date": begun["date"]} for row in rows),
    ]
    order = list(methods(1024))
    every.sort(key=lambda row: order.index(row["method"]))
    header = recorded["header"]
    return {**header, "settings": {**header["settings"], "methods": [row["method"] for row in every]}}, every


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def compared(
    prompts: list[dict[str, Any]], ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row for each method: scores of both, the paired difference with half its 95 % interval, and prompts whose answers differ."""
    asked = {prompt["prompt"]: prompt for prompt in prompts}
    answers = [{(row["method"], row["prompt"]): row["answer"] for row in rows} for rows in (ours, theirs)]
    rows = []
    for method in dict.fromkeys(row["method"] for row in ours):
        both = [i for i in asked if all((method, i) in of for of in answers)]
        if not both:
            continue
        mine, other = ([match_all(of[method, i], asked[i]["answers"]) for i in both] for of in answers)
        apart = np.asarray(mine) - np.asarray(other)
        mean, width = mean_interval(apart)
        rows.append(
            {
                "method": method,
                "prompts": len(both),
                "kvjax": float(np.mean(mine)),
                "kvpress": float(np.mean(other)),
                "difference": mean,
                "interval": None if np.isnan(width) else width,
                "within_sampling_error": abs(mean) <= width,
                "same_answers": sum(answers[0][method, i].strip() == answers[1][method, i].strip() for i in both),
                "scores": [mine, other],
                "differing": [
                    {
                        "prompt": i,
                        "task": asked[i]["task"],
                        "scores": [a, b],
                        "answers": [of[method, i] for of in answers],
                    }
                    for i, a, b in zip(both, mine, other, strict=True)
                    if answers[0][method, i].strip() != answers[1][method, i].strip()
                ],
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    error = "" if row["interval"] is None else f" ± {row['interval']:.3f}"
    return (
        f"{row['method']:20s} kvjax {row['kvjax']:.3f}  kvpress {row['kvpress']:.3f}  difference {row['difference']:+.3f}{error}  "
        f"{row['same_answers']} of {row['prompts']} answers the same, {len(_differing(row))} scores differ"
    )


def _differing(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The prompts whose scores differ."""
    return [each for each in row["differing"] if each["scores"][0] != each["scores"][1]]


def section(content: Mapping[str, Any]) -> str:
    """What the page has of a result file: both libraries' scores, and which prompts they answer so that the scores differ."""
    header, rows = content["header"], content["rows"]
    about, peer = header["settings"], header["peer"]
    tasks = ", ".join(f"`{task}`" for task in about["suite"]["tasks"])
    lines = [
        f"{models.title(about)} in {about['dtype']}: {rows[0]['prompts']} of RULER's prompts of {about['length']} tokens ({tasks}), compressed to "
        f"{about['budget']} tokens before the question is known. Both libraries get the same tokens and weights:",
        f"kvpress {peer['versions']['kvpress']} (PyTorch {peer['versions']['torch']}, {peer['device']}) and kvjax ({device(header)}). Scores are in percent. The "
        "paired difference has its 95 % interval (Student's t).",
        f"Prompts are numbered from 0 to {rows[0]['prompts'] - 1}. Measured by `python -m reproduction.peer_quality`.",
        "",
    ]
    cells = []
    for row in rows:
        width = "" if row["interval"] is None else f" ± {100 * row['interval']:.1f}"
        method, *scores = _scores(row)
        cells.append([method, *scores, f"{100 * row['difference']:+.1f}{width}", *_alike(row)])
    heads = ["method", "kvjax", "kvpress", "difference", *_ALIKE]
    return "\n".join([*lines, report.table(heads, cells, "lrrrrl")])


_ALIKE = "same answers", "prompts whose scores differ (number, task)"
"""Headings of the cells of `_alike`."""


def _scores(row: Mapping[str, Any]) -> list[str]:
    """The method, and the scores of both libraries."""
    return [f"`{row['method']}`", *(f"{100 * row[library]:.1f}" for library in ("kvjax", "kvpress"))]


def _alike(row: Mapping[str, Any]) -> list[str]:
    """How many answers are the same, and the prompts whose scores differ."""
    differing = [f"{each['prompt']} (`{each['task']}`)" for each in _differing(row)]
    return [f"{row['same_answers']} of {row['prompts']}", ", ".join(differing) or "none"]


def exact_section(content: Mapping[str, Any]) -> str:
    """What the page has of a result file in float32: how many answers are the same, and which are not."""
    header, rows = content["header"], content["rows"]
    peer = header["peer"]
    same, asked = (sum(row[count] for row in rows) for count in ("same_answers", "prompts"))
    told = [
        f"**In {header['settings']['dtype']}, {same} of {asked} answers that both libraries gave are the same, word for word.**"
    ]
    above = [row for row in rows if row["method"] not in NOTES and row["method"] != UNPADDED]
    if all(row["same_answers"] == row["prompts"] for row in above):
        told.append(
            f"All {sum(row['prompts'] for row in above)} answers of the methods above are the same, so bfloat16 causes the differences above. It rounds differently "
            "in the two libraries, which changes the order of tokens with almost equal scores and of words with almost equal probabilities."
        )
    most = max(row["prompts"] for row in rows)
    missing = {row["method"]: most - row["prompts"] for row in rows if row["prompts"] < most}
    if missing:  # kvjax answers all prompts of a batch at once, kvpress one at a time
        by_method = ", ".join(f"{count} of `{method}`" for method, count in missing.items())
        told.append(f"kvpress' run ended before it had given the other {sum(missing.values())} ({by_method}).")
    lines = [
        *told,
        "",
        f"Prompts and weights are those of the section above, and both libraries compute matmuls in full float32 (`--dtype float32`; kvpress "
        f"{peer['versions']['kvpress']}, PyTorch {peer['versions']['torch']}, {peer['device']}; kvjax, {device(header)}).",
        "",
        report.table(["method", "kvjax", "kvpress", *_ALIKE], [_scores(row) + _alike(row) for row in rows], "lrrrl"),
    ]
    if notes := [f"- {NOTES[row['method']]}" for row in rows if row["method"] in NOTES]:
        lines += ["", *notes]
    differing = [(row["method"], each) for row in rows for each in row["differing"]]
    if differing:
        heads, cells = ["method", "prompt", "kvjax", "kvpress"], []
        for method, each in differing:
            answers = [" ".join(answer.split()).replace("|", "\\|") for answer in each["answers"]]
            cells.append([f"`{method}`", f"{each['prompt']} (`{each['task']}`)", *answers])
        lines += ["", "The answers that differ:", "", report.table(heads, cells, "l")]
    counted = [
        f"- `{method}`, prompt {each['prompt']}: of {each['kept']} tokens that kvjax keeps in all KV heads, kvpress keeps "
        f"{each['kept'] - each['only_here']} in a run of both libraries on {each['kept_on']}."
        for method, each in differing
        if "kept" in each
    ]
    if counted:
        lines += ["", *counted]
    return "\n".join(lines)


NOTES = {
    "lagkv": "`lagkv`: kvjax keeps equally many tokens of each segment, so it does not use the whole budget. kvpress' compression ratio is set to keep "
    "the same number.",
    "compactor": "`compactor`: both use the same random sketches. In kvpress, the padding of the last chunk takes part in attention, as keys and as "
    "queries. The row `compactor, unpadded` leaves it out.",
    "kvzip": "`kvzip`: measured with a variant of kvjax's policy in `reproduction/peer_quality.py`, which has no limit of tokens per layer. It may evict "
    "the chat template's tokens, except for the 4 sinks. Its instruction to repeat does not end in a space.",
}
"""What pages say of methods that are set differently from kvjax's or kvpress' defaults."""


SECTION = Section("howto/from_kvpress.md", "The same prompts in both", "peer-quality", section)

EXACT = Section("howto/from_kvpress.md", "The same prompts in float32", "peer-float32", exact_section)


if __name__ == "__main__":
    main()
