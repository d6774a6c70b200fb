"""`kvjax draw` writes the picture, and refuses before it runs anything."""

from pathlib import Path


def test_a_picture(kvjax_command, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "kept.svg"
    result = kvjax_command(
        "draw",
        "--model",
        checkpoint,
        "--policies",
        "full,streaming_llm",
        "--budget",
        8,
        "-n",
        6,
        "-o",
        out,
        "hello there",
    )
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    text = out.read_text()
    for title in ("full", "streaming_llm, budget 8"):
        assert f"<!-- {title} -->" in text


def test_unknown_policies(kvjax_command, tmp_path: Path) -> None:
    result = kvjax_command("draw", "--policies", "full,nope", "-o", tmp_path / "kept.png", "hello")
    assert result.exit_code == 1
    assert "unknown policy" in result.stderr
    assert not list(tmp_path.iterdir())


def test_settings_that_no_policy_has(kvjax_command, tmp_path: Path) -> None:
    result = kvjax_command("draw", "--policies", "full,treekv", "--set", "blok=4", "-o", tmp_path / "kept.png", "hello")
    says = "error: blok=4: none of full, treekv has this hyperparameter. Did you mean 'block'?\n"
    assert (result.exit_code, result.stderr) == (1, says)
