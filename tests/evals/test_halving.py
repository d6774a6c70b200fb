"""Successive halving with scores that are known."""

import pytest

from kvjax.evals.halving import halve, round_sizes

QUALITY = {"a": 0.2, "b": 0.9, "c": 0.5, "d": 0.7, "e": 0.1, "f": 0.3, "g": 0.4}


class Scorer:
    """Scores by name: the quality, and one better where an example's number is divisible by ten. It notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __call__(self, name: str, count: int) -> list[float]:
        self.calls.append((name, count))
        return [QUALITY[name] + (i % 10 == 0) for i in range(count)]


def test_the_better_half_is_measured_on_twice_as_many() -> None:
    scorer = Scorer()
    found = halve(list(QUALITY), scorer, round_sizes(7, 40))
    assert found.sizes == (10, 20, 40)
    assert scorer.calls == [
        *((name, 10) for name in "abcdefg"),
        *((name, 20) for name in "bdcg"),
        *((name, 40) for name in "bd"),
    ]
    assert "".join(found.order) == "bdcgfae"
    assert found.finalists == ("b", "d")
    assert {name: len(scores) for name, scores in found.scores.items()} == dict(
        zip("bdcgfae", [40] * 2 + [20] * 2 + [10] * 3, strict=True)
    )
    assert found.scores["c"] == tuple(Scorer()("c", 20))


def test_a_later_round_may_change_the_order() -> None:
    """The first example favours a, and all of them b."""
    late = {"a": [1.0, 0, 0, 0], "b": [0.5] * 4, "c": [0.0] * 4}
    found = halve("abc", lambda name, count: late[name][:count], (1, 4))
    assert found.order == ("b", "a", "c")
    assert found.finalists == ("b", "a")


def test_equal_scores_keep_the_order_of_candidates() -> None:
    assert halve("xyz", lambda name, count: [0.5] * count, (2, 4)).order == ("x", "y", "z")


@pytest.mark.parametrize(
    ("candidates", "examples", "want"),
    [
        (1, 48, (48,)),
        (2, 48, (48,)),
        (3, 48, (24, 48)),
        (4, 48, (24, 48)),
        (8, 48, (12, 24, 48)),
        (10, 48, (6, 12, 24, 48)),
        (10, 20, (4, 5, 10, 20)),
        (10, 3, (3, 3, 3, 3)),
    ],
)
def test_sizes_of_rounds(candidates: int, examples: int, want: tuple[int, ...]) -> None:
    assert round_sizes(candidates, examples) == want
    found = halve(range(candidates), lambda each, count: [float(each)] * count, want)
    assert found.order == tuple(reversed(range(candidates)))


def test_one_candidate_wins() -> None:
    assert halve(["a"], Scorer(), (4,)).finalists == ("a",)


@pytest.mark.parametrize(("candidates", "sizes"), [([], (4,)), (["a"], ()), (["a"], (0, 4)), (["a"], (4, 2))])
def test_other_arguments_are_refused(candidates: list[str], sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="give candidates and ascending sizes"):
        halve(candidates, Scorer(), sizes)
