"""All profiles by one command: the same as `kvjax calibrate` writes, and what is there is not made again."""

import json
import sys

import pytest

from kvjax.calibration.make_profile import METHODS
from kvjax.policies.profile import fingerprint, load
from reproduction import make_profiles
from reproduction.make_profiles import RECIPES, Recipe


def test_every_method_has_a_recipe():
    assert RECIPES.keys() == METHODS.keys()
    assert all(METHODS[name].reads_text == bool(recipe.texts) for name, recipe in RECIPES.items())


@pytest.mark.parametrize("name", RECIPES)
def test_those_that_come_with_kvjax_were_made_so(name):
    """Text, samples and settings, as their files tell them."""
    (file,) = make_profiles.FOLDER.glob(f"{name}-*.json")
    found, recipe = load(file, METHODS[name].profile), RECIPES[name]
    assert dict(found.settings) == vars(METHODS[name].settings(**recipe.settings))
    assert found.data.startswith(f"{recipe.samples} samples of {recipe.length} ")
    assert all(text in found.data for text in recipe.texts)


def test_makes_what_the_command_line_makes(checkpoint, params, tmp_path, monkeypatch, capsys, kvjax_command):
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged. " * 20)
    small = {
        "chelsea": Recipe(("text.txt",), 2, 64, {"chunk": 8}),
        "duoattention": Recipe(("text.txt",), 2, 64, {"passkeys": 1, "steps": 2}),
        "razorattention": Recipe((), 1, 32),
    }
    monkeypatch.setattr(make_profiles, "RECIPES", small)
    options = ["--model", str(checkpoint), "--texts", str(tmp_path), "--out", str(tmp_path / "made")]
    options += ["--methods", ",".join(small)]
    monkeypatch.setattr(sys, "argv", ["make_profiles", *options])
    make_profiles.main()
    first = capsys.readouterr().out
    assert "duoattention: 2 of 2" in first
    make_profiles.main()
    assert capsys.readouterr().out.splitlines() == [f"{name}: is there" for name in small]
    for name in small:
        out = tmp_path / f"{name}.json"
        _, *words = make_profiles.command(name, tmp_path, out, str(checkpoint), "float32")
        assert kvjax_command(*words).exit_code == 0
        mine = tmp_path / "made" / f"{name}-{fingerprint(params.config)}.json"
        assert json.loads(mine.read_text()) == json.loads(out.read_text())
