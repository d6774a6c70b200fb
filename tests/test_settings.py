"""Values written as text become what the policy's field is declared as."""

from typing import Literal

import pytest

from kvjax._util.settings import parse_value
from kvjax.policies import Full


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("256", int | float, 256),
        ("0.2", int | float, 0.2),
        ("1.0", int | float, 1.0),
        ("none", int | None, None),
        ("7", int | None, 7),
        ("False", bool, False),
        ("7", str, "7"),
        ("left", Literal["score", "left"], "left"),
        ("2", Literal[1, 2], 2),
        ("1,2.5", tuple[float, ...], (1, 2.5)),
        ("(3,)", tuple[int, ...], (3,)),
    ],
)
def test_values(text: str, hint, value) -> None:
    parsed = parse_value(text, hint)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "hint", "says"),
    [
        ("x", int, "give a whole number$"),
        ("1.5", int | None, "give a whole number or none$"),
        ("x", int | float, "give a number$"),
        ("1732900000000", int, "give a whole number from -2147483647 to 2147483647$"),
        ("1732900000000", int | None, "give a whole number from -2147483647 to 2147483647 or none$"),
        ("nan", int | float, r"give a number from -3e\+38 to 3e\+38$"),
        ("yes", bool, "give true or false$"),
        ("right", Literal["score", "left"], "give score or left$"),
        ("1,x", tuple[int, ...], "give values separated by commas$"),
        ("1,,", tuple[int, ...], "give values separated by commas$"),
        ("full", Full, "the command line cannot write this one$"),
    ],
)
def test_what_a_field_does_not_take(text: str, hint, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_value(text, hint)
