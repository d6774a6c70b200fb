"""Make all profiles of a model's heads that policies need, as `kvjax calibrate` does.

    python -m reproduction.make_profiles --model MODEL        # into kvjax/policies/profiles, where the library finds them
    python -m reproduction.make_profiles --model MODEL --out FOLDER --methods catekv,chelsea
    python -m reproduction.make_profiles --model MODEL --commands                 # print the equivalent commands

The model is loaded once. Existing profiles of the same model, text and settings are kept, so an interrupted run continues.
"""

import argparse
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kvjax
from kvjax.calibration.make_profile import METHODS, profile
from kvjax.conversion import describe
from kvjax.models import ModelConfig
from kvjax.policies import PolicyError
from kvjax.policies.profile import fingerprint, load

FOLDER = Path(kvjax.__file__).parent / "policies" / "profiles"

WIKITEXT = "wikitext-2/test.txt"
BOOKS = (
    "books/98_A_Tale_of_Two_Cities.txt",
    "books/1342_Pride_and_Prejudice.txt",
    "books/76_Adventures_of_Huckleberry_Finn.txt",
    WIKITEXT,
)


class Recipe(NamedTuple):
    """How a method's profile is made.

    Attributes:
        texts: files of the folder of texts; none for random tokens.
        samples, length: pieces of text, and tokens of each.
        settings: of the method, besides its defaults.
    """

    texts: Sequence[str]
    samples: int
    length: int = 2048
    settings: Mapping[str, Any] = {}


RECIPES = {
    "catekv": Recipe(BOOKS, 16),
    "chelsea": Recipe((WIKITEXT,), 12),
    "duoattention": Recipe(BOOKS, 16, 384, {"steps": 96}),
    "infinigen": Recipe(BOOKS, 16),
    "razorattention": Recipe((), 1, 1024),
    "triattention": Recipe(BOOKS, 16),
}
"""By method; those of the default model that come with kvjax were made so."""


def main() -> None:
    """Make the profiles that do not exist yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="any source that kvjax.load takes; by default the default model")
    parser.add_argument("--dtype", default="float32", help="type of the weights")
    shared = os.environ.get("KVJAX_SHARED", "shared")
    parser.add_argument("--texts", type=Path, default=Path(shared) / "data" / "text", help="folder of texts")
    parser.add_argument("--methods", default=",".join(RECIPES), help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to")
    parser.add_argument("--commands", action="store_true", help="only print the commands")
    args = parser.parse_args()
    chosen = args.methods.split(",")
    if unknown := [name for name in chosen if name not in RECIPES]:
        parser.error(f"no profile for {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    if args.commands:
        config = describe(args.model).config
        for name in chosen:
            print(shlex.join(command(name, args.texts, path(args.out, name, config), args.model, args.dtype)))
        return
    params = kvjax.load(args.model, dtype=args.dtype)
    for name in chosen:
        make(params, name, args.texts, path(args.out, name, params.config))


def path(folder: Path, name: str, config: ModelConfig) -> Path:
    """Where the library finds a profile of this model."""
    return folder / f"{name}-{fingerprint(config)}.json"


def command(name: str, texts: Path, out: Path, model: str | None, dtype: str) -> list[str]:
    """The command that does the same as `make`."""
    recipe = RECIPES[name]
    parts = ["kvjax", "calibrate", name, "--out", str(out), "--dtype", dtype]
    parts += [] if model is None else ["--model", model]
    parts += ["--samples", str(recipe.samples), "--length", str(recipe.length)]
    for text in recipe.texts:
        parts += ["--data", str(texts / text)]
    for setting, value in recipe.settings.items():
        parts += ["--set", f"{setting}={value}"]
    return parts


def make(params: kvjax.Params, name: str, texts: Path, out: Path) -> bool:
    """Make one profile unless it exists; return whether it was made."""
    recipe, method = RECIPES[name], METHODS[name]
    files = [texts / text for text in recipe.texts]
    samples, data = method.tokens(params, files, recipe.samples, recipe.length)
    settings = method.settings(**recipe.settings)
    if _there(out, name, params, data, settings):
        print(f"{name}: is there", flush=True)
        return False
    start = time.monotonic()
    made = profile(params, name, samples, data, settings, _told(name))
    out.parent.mkdir(parents=True, exist_ok=True)
    made.save(out)
    print(f"{name}: wrote {out} after {time.monotonic() - start:.0f} s", flush=True)
    return True


def _there(out: Path, name: str, params: kvjax.Params, data: str, settings: Any) -> bool:
    if not out.exists():
        return False
    try:
        found = load(out, METHODS[name].profile)
    except PolicyError:  # of another version: it is made again
        return False
    return (found.method, found.model, found.data, dict(found.settings)) == (
        name,
        fingerprint(params.config),
        data,
        vars(settings),
    )


def _told(name: str) -> Callable[[int, int], None]:
    """A function that prints the progress, at most ten times."""

    def progress(done: int, total: int) -> None:
        if done == total or done % max(total // 10, 1) == 0:
            print(f"{name}: {done} of {total}", flush=True)

    return progress


if __name__ == "__main__":
    main()
