"""Measure the command of docs/howto/long_prompts.md: a long file on a CPU, under a limit of the process's memory.

python -m benchmarks.long_file --text BOOKS.txt --tokens 100000
"""

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kvjax
from benchmarks import report

PAGE = Path(__file__).parents[1] / "docs/howto/long_prompts.md"


def options() -> tuple[list[str], int]:
    """Return the command's words after `kvjax`, with FILE for the file's name, and the page's limit in bytes."""
    found = re.search(r"^\(ulimit -d (\d+); kvjax (.*)\)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if found is None:
        raise SystemExit(f"{PAGE.name} has no command under ulimit -d")
    return found[2].split(), int(found[1]) * 1024


def measure(file: Path, words: list[str], limit: int) -> dict[str, Any]:
    """Run the command in its own process. Returns its time, its memory and its output."""
    command = [sys.executable, "-m", "kvjax", *(str(file) if word == "FILE" else word for word in words)]
    began = time.monotonic()
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall_s": time.monotonic() - began,
        "cpu_s": used.ru_utime + used.ru_stime,
        "process_peak_bytes": used.ru_maxrss * 1024,
        "text": done.stdout,
    }


def main() -> None:
    """Cut the text to `--tokens` tokens, run the command, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="plain text of `--tokens` tokens or more")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/long-file-cpu.json"))
    args = parser.parse_args()
    tokenizer = kvjax.load(progress=False).tokenizer
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8-sig"))[: args.tokens]
    if len(ids) < args.tokens:
        raise SystemExit(f"{args.text} has {len(ids)} tokens, {args.tokens} are asked for; give a longer text")
    words, limit = options()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "long.txt"
        file.write_text(tokenizer.decode(ids), encoding="utf-8")
        row = {"tokens": len(ids), "data_limit_bytes": limit, **measure(file, words, limit)}
    report.write(args.out, report.header(command=" ".join(["kvjax", *words])), [row])
    print(row)


if __name__ == "__main__":
    main()
