"""`kvjax calibrate` writes a profile that the policy takes, and refuses before it reads a model."""

import json
from pathlib import Path

import pytest

from kvjax.models import Params
from kvjax.policies import HeadProfile, MeanQueries, SkewProfile
from kvjax.policies.profile import fingerprint, load

SMALL = ["--samples", 2, "--length", 64]
CATEKV = ["--set", "sinks=4", "--set", "recent=8", "--set", "window=8", "--set", "ratio=0.5"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("It is a truth universally acknowledged. " * 20)
    return file


@pytest.mark.parametrize(
    ("method", "settings", "label", "count"),
    [
        ("catekv", CATEKV, "adaptive", 2),
        ("chelsea", ["--set", "chunk=8"], "outlier", 1),
        ("duoattention", ["--set", "passkeys=1", "--set", "steps=2"], "streaming", 2),
    ],
)
def test_profile_and_picture(
    kvjax_command, checkpoint: Path, params: Params, text: Path, tmp_path, method, settings, label, count
):
    out, picture = tmp_path / "profile.json", tmp_path / "heads.svg"
    result = kvjax_command(
        "calibrate", method, "--model", checkpoint, "--data", text, *SMALL, *settings, "-o", out, "--plot", picture
    )
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    profile = load(out)
    assert (profile.method, profile.model) == (method, fingerprint(params.config))
    assert profile.data == f"2 samples of 64 tokens, spread evenly over {text.parent.name}/text.txt"
    assert len(profile.heads(label)) == count
    assert f"<!-- {method}: " in picture.read_text()

    options = [
        "--policy",
        method,
        "--budget",
        0.5,
        "--set",
        "sinks=4",
        "--set",
        f"profile={out}",
        "-n",
        4,
        "--json",
        "--ignore-eos",
    ]
    used = json.loads(kvjax_command("generate", "--model", checkpoint, *options, "hello there, " * 4).stdout)
    assert used["policy"]["profile"] == str(out)
    assert len(used["tokens"]) == 4


@pytest.mark.parametrize(
    ("method", "policy", "reads", "kind"),
    [
        ("infinigen", "infinigen", ["--data"], SkewProfile),
        ("triattention", "triattention", ["--data"], MeanQueries),
        ("razorattention", "duoattention", [], HeadProfile),
    ],
)
def test_profiles_of_another_kind(
    kvjax_command, checkpoint: Path, params: Params, text: Path, tmp_path, method, policy, reads, kind
):
    """Directions, and heads that are told from random tokens; for the policies that take them."""
    out = tmp_path / "profile.json"
    data = [*reads, text] if reads else []
    result = kvjax_command("calibrate", method, "--model", checkpoint, *data, *SMALL, "-o", out)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    profile = load(out, kind)
    assert (profile.method, profile.model) == (method, fingerprint(params.config))
    options = ["--policy", policy, "--budget", 0.6, "--set", f"profile={out}", "-n", 4, "--json", "--ignore-eos"]
    options += ["--set", {"duoattention": "sinks=4", "infinigen": "dense_layers=0", "triattention": "window=4"}[policy]]
    used = json.loads(kvjax_command("generate", "--model", checkpoint, *options, "hello there, " * 4).stdout)
    assert used["policy"]["profile"] == str(out)
    assert len(used["tokens"]) == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["catekv"], "catekv: give text to read"),
        (["razorattention", "--data", "book.txt"], "random tokens are used; omit it"),
        (["infinigen", "--data", "book.txt", "--plot", "heads.png"], "no scores of heads to draw"),
        (["infinigen", "--data", "book.txt", "--set", "x=1"], "no setting 'x'; there are none"),
        (["triattention"], "triattention: give text to read"),
    ],
)
def test_what_does_not_go_with_the_method(kvjax_command, tmp_path: Path, arguments, says) -> None:
    result = kvjax_command("calibrate", *arguments, "-o", tmp_path / "profile.json", "--model", "nowhere")
    assert result.exit_code != 0
    assert says in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["treekv"], 2, "'treekv' is not one of"),
        (["catekv", "--set", "ratoi=1"], 1, "there is no setting 'ratoi'; there are ratio, quantile"),
        (["catekv", "--set", "ratio=half"], 1, "ratio='half'; give a number"),
        (["catekv", "--set", "ratio=2"], 1, "ratio=2.0; give a fraction"),
    ],
)
def test_what_cannot_be_asked(kvjax_command, text: Path, tmp_path: Path, arguments, code, says) -> None:
    out = tmp_path / "profile.json"
    result = kvjax_command("calibrate", *arguments, "--data", text, "-o", out, "--model", "nowhere")
    assert result.exit_code == code
    assert says in " ".join(result.stderr.split())
    assert not out.exists()


def test_text_that_is_not_there_or_too_short(kvjax_command, checkpoint: Path, text: Path, tmp_path: Path) -> None:
    out = ["-o", tmp_path / "profile.json", "--model", checkpoint]
    result = kvjax_command("calibrate", "catekv", "--data", tmp_path / "none.txt", *out)
    assert (result.exit_code, result.stderr) == (1, f"error: {tmp_path / 'none.txt'}: no such file\n")
    result = kvjax_command("calibrate", "catekv", "--data", text, "--samples", 1, "--length", 300, *out)
    assert (result.exit_code, "give longer samples" in result.stderr) == (1, True)
