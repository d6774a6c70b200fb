"""`kvjax convert`, and what is left of its output when something is in the way."""

from pathlib import Path

import pytest


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_a_converted_model_writes_the_same_text(kvjax_command, checkpoint: Path, tmp_path: Path, format: str) -> None:
    there = tmp_path / "there"
    result = kvjax_command("convert", checkpoint, there, "--format", format)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    texts = [kvjax_command("generate", "--model", path, "-n", 8, "hello").stdout for path in (checkpoint, there)]
    assert texts[0] == texts[1] != ""


def test_home_is_replaced(kvjax_command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the shell leaves it in the argument, as in `--out=~/results`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(checkpoint)
    result = kvjax_command("convert", "~/model", "~/there", "--format", "safetensors")
    assert (result.exit_code, result.stderr) == (0, "")
    assert (tmp_path / "there" / "model.safetensors").exists()


def test_progress_shows_without_a_terminal(
    kvjax_command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line every few seconds; here at once."""
    monkeypatch.setattr("kvjax.conversion.progress.pause", lambda elapsed, least: 0.0)
    result = kvjax_command("convert", checkpoint, tmp_path / "there")
    first, *_, last = result.stderr.splitlines()
    assert first.startswith("Writing there: ")
    assert last.endswith("100%")
    for number, arguments in enumerate((("--quiet", "convert", checkpoint), ("convert", "--quiet", checkpoint))):
        result = kvjax_command(*arguments, tmp_path / str(number))
        assert (result.exit_code, result.stderr) == (0, "")


def test_an_existing_destination_is_replaced_only_on_request(kvjax_command, checkpoint: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    assert kvjax_command("convert", checkpoint, there).exit_code == 0
    refused = kvjax_command("convert", checkpoint, there, "--format", "safetensors")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: ")
    assert str(there) in refused.stderr
    assert not (there / "model.safetensors").exists()
    assert kvjax_command("convert", checkpoint, there, "--format", "safetensors", "--overwrite").exit_code == 0
    assert (there / "model.safetensors").exists()
