"""GSM8K with long answers under a budget: what a run writes, what is made of it, and that the page is the result file's."""

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvjax.evals.report import read_rows
from reproduction import peer_quality, reasoning, sections, weights_error, weights_quality
from reproduction.equal_bytes import batches


def row(policy: str, first: int, scores: list[float]) -> dict:
    """A batch's row, of a part."""
    return {
        "policy": policy,
        "first": first,
        "held": 25,
        "full": 100,
        "scores": scores,
        "new_tokens": [10] * len(scores),
        "ended": [True] * len(scores),
        "answers": ["x"] * len(scores),
    }


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """A part whose batches are not in order, one of them without those before it."""
    about = {"model": "toy", "dtype": "float32", "budget": 64, "new_tokens": 32}
    rows = [row("full", 2, [1, 1]), row("full", 0, [1, 0]), row("h2o", 0, [0, 0]), row("rkv", 2, [1, 1])]
    header = {"date": "2026-01-01", "device": "1 x NVIDIA Abacus (gpu)", "versions": {}, "settings": about}
    path = tmp_path / "part"
    path.write_text("".join(json.dumps(each) + "\n" for each in ({"header": header}, *rows)))
    return path


def test_the_table_by_hand(part, tmp_path, monkeypatch):
    """Of 1, 0, 1, 1 the standard error is √(1/4) / 2 = 25 %; H2O has the first two alone, where it is beside 1, 0: -0.5 ± 0.5."""
    monkeypatch.setattr(sections, "RESULTS", tmp_path)
    monkeypatch.setattr(sections, "DOCS", tmp_path)
    page = tmp_path / "quality.md"
    page.write_text("# Page\n\n## While a model reasons\n\nold\n\n## Next\n\ntext\n")
    file = reasoning.record(part)
    assert file.name == "reasoning-abacus.json"
    content = json.loads(file.read_text())
    assert [each["policy"] for each in content["rows"]] == ["full", "h2o"]
    assert content["rows"][0]["answers"] == ["x"] * 4
    assert "were scored before a mend" not in reasoning.section(content)
    assert reasoning.table(content["rows"]).splitlines()[2:] == [
        "| `full` | 75.0 ± 25.0 |  | 100 % | 10 | 25.0 % |",
        "| `h2o` | 0.0 ± 0.0 | -50.0 ± 50.0 | 100 % | 10 | 25.0 % |",
    ]
    for _ in range(2):
        reasoning.SECTION.write()
        assert page.read_text() == f"# Page\n\n{reasoning.SECTION.of(file)}\n## Next\n\ntext\n"
    page.write_text("# Page\n")
    reasoning.SECTION.write()
    assert page.read_text() == f"# Page\n\n{reasoning.SECTION.of(file)}"


def test_a_result_file_is_scored_again(part, tmp_path, monkeypatch):
    monkeypatch.setattr(sections, "RESULTS", tmp_path)
    file, problems = reasoning.record(part), tmp_path / "problems.jsonl"
    content = json.loads(file.read_text())
    content["rows"][0]["answers"] = ["#### 1. Count\n\\boxed{18}", "18 ft", "", "\\boxed{18 \\text{ ft}^2}"]
    file.write_text(json.dumps(content))
    problems.write_text('{"question": "?", "answer": "#### 18"}\n' * 4)
    reasoning.rescore(file, problems)
    again = json.loads(file.read_text())["rows"]
    assert [each["scores"] for each in again] == [[1, 1, 0, 1], [0, 0]]
    del content["rows"][0]["answers"]
    file.write_text(json.dumps(content))
    assert "were scored before a mend" in reasoning.section(content)
    with pytest.raises(SystemExit, match="has no answers of full; measure again"):
        reasoning.rescore(file, problems)


@pytest.mark.parametrize(
    "section",
    [reasoning.SECTION, peer_quality.SECTION, peer_quality.EXACT, weights_quality.SECTION, weights_error.SECTION],
)
def test_pages_have_the_section_of_a_result_file(section):
    """No section without a file, and that of the file where there is one."""
    page = (sections.DOCS / section.page).read_text(encoding="utf-8")
    file = section.file()
    assert (f"## {section.title}\n" in page) is (file is not None)
    assert file is None or section.of(file) in page


@pytest.fixture
def told(talker, monkeypatch, tmp_path):
    """Runs the program, in which to compile takes ten seconds and a batch one, and tells what it did in order."""
    now, events = 0.0, []
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n" for _ in range(4)))

    def took(event: str, policy: str, seconds: float) -> None:
        nonlocal now
        now += seconds
        events.append((event, policy))

    def run(compiling, *options: str) -> list[tuple[str, str]]:
        class Engine:
            def __init__(self, params, policy, **sizes):
                self.policy = policy

            def compile(self):
                compiling()
                took("compile", self.policy.info.name, 10)

        def answered(params, engine, *_):
            took("run", engine.policy.info.name, 1)
            return {"scores": [1.0]}

        monkeypatch.setattr(reasoning, "Engine", Engine)
        monkeypatch.setattr(reasoning, "scored", answered)
        monkeypatch.setattr(reasoning.kvjax, "load", lambda model, dtype: talker)
        monkeypatch.setattr(reasoning, "time", SimpleNamespace(monotonic=lambda: now))
        monkeypatch.setattr(batches, "time", SimpleNamespace(monotonic=lambda: now))
        sizes = ["--data", str(problems), "--samples", "4", "--batch", "2", "--policies", "h2o,tova,treekv"]
        monkeypatch.setattr(sys, "argv", ["reasoning", *sizes, "--out", str(tmp_path / "part"), *options])
        reasoning.main()
        return events

    return run


def test_programs_are_compiled_in_their_turn(told, capsys):
    """In less than all would take to compile, the first policies have their batches; what there is no time for is not begun."""
    events = told(lambda: None, "--ahead", "0", "--seconds", "24")
    assert events == [("compile", "h2o"), ("run", "h2o"), ("compile", "tova"), ("run", "tova")]
    assert "4 batches left" in capsys.readouterr().out


def test_programs_are_compiled_ahead(told, capsys):
    """So many at a time."""
    together = threading.Barrier(3)
    events = told(lambda: together.wait(timeout=60), "--ahead", "3")
    assert [policy for event, policy in events if event == "run"] == ["h2o", "tova", "treekv"] * 2
    assert "done" in capsys.readouterr().out


@pytest.mark.slow
def test_runs_go_round_and_go_on(talker, shared, monkeypatch, tmp_path, capsys):
    """Each policy's first problems before any one's next; a policy that fails keeps no other from its turn; a run goes on."""
    monkeypatch.setattr(reasoning.kvjax, "load", lambda model, dtype: talker)
    sizes = ["--data", str(shared / "data/tasks/gsm8k/test.jsonl"), "--samples", "3", "--batch", "2", "--budget", "64"]
    sizes += ["--new-tokens", "16", "--ahead", "1", "--out", str(tmp_path / "part")]

    def rows(*options: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", ["reasoning", *sizes, *options])
        reasoning.main()
        return read_rows(tmp_path / "part")

    first = rows("--policies", "full,triattention,streaming_llm")  # TriAttention has no statistics of this model
    assert "triattention: PolicyError" in capsys.readouterr().out
    assert [(each["policy"], each["first"]) for each in first] == [
        ("full", 0),
        ("streaming_llm", 0),
        ("full", 2),
        ("streaming_llm", 2),
    ]
    assert [len(each["scores"]) for each in first] == [2, 2, 1, 1]
    assert rows("--policies", "full,streaming_llm") == first
    assert all(each["held"] < each["full"] for each in first if each["policy"] != "full")


def test_errors_of_logits_by_hand(talker, monkeypatch):
    """Logits of three tokens after one token: a constant does not count, and a swap of the largest two does."""
    exact, near = np.asarray([[[1.0, 0.0, -1.0]]]), np.asarray([[[2.0, 3.0, 1.0]]])
    monkeypatch.setattr(
        weights_error.transformer, "forward", lambda params, tokens: exact if params is talker else near
    )
    found = weights_error._differences.__wrapped__(talker, None, np.zeros((1, 1), np.int32))
    assert found["error"] == pytest.approx(1.0)  # (0, 1, -1) beside (1, 0, -1): 2 / 2
    p, q = (np.exp(x) / np.exp(x).sum() for x in (exact[0, 0], near[0, 0]))
    assert found["kl"] == pytest.approx(float(np.sum(p * np.log(p / q))), rel=1e-5)
    assert found["same"] == 0


def test_rows_of_quantised_files_say_what_they_are():
    assert weights_quality.names("Qwen-Q4_K_M.gguf")["int4"] == "Q4_K_M, remainder in int4"
    assert weights_quality.names("model") == {}
