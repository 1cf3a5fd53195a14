"""The command line: what it prints, and the exit code and one line it gives for each missing piece."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gnfuse.cli import main
from gnfuse.kernelbench import ProblemError, load, split_target

PROBLEM = """
import torch
from torch import nn

print("a file may print")

class Model(nn.Module):
    def __init__(self, channels, groups):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)
        self.norm = nn.GroupNorm(groups, channels)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        x = self.norm(self.conv(x))
        return self.dropout(torch.clamp(torch.minimum(x, torch.tensor(0.0)), 0.0, 1.0))

class Smooth(Model):
    def forward(self, x):
        return torch.nn.functional.silu(self.norm(self.conv(x)))

def get_inputs():
    return [torch.randn(2, 3, 8, 8)]

def get_init_inputs():
    return [8, 4]

not_a_class = 3
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No phrase that a test looks for is broken over two lines."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.py"
    path.write_text(PROBLEM)
    return path


def line_of(path: Path, text: str) -> str:
    lines = path.read_text().splitlines()
    return f"{path.name}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def test_explain_prints_the_report_with_the_source_line(problem: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(problem)]) == 0
    out, err = capsys.readouterr()
    assert "1 site: 1 folded, 0 fused, 0 refused" in out
    assert "constant 0.0 where not NaN" in out
    assert line_of(problem, "self.norm(self.conv(x))") in out
    assert "a file may print" in err and "a file may print" not in out


def test_explain_takes_the_named_class(problem: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", f"{problem}:Smooth"]) == 0
    assert "group_norm → silu" in capsys.readouterr().out


def test_explain_runs_the_model_in_training_mode_unless_told(problem: Path, capsys: pytest.CaptureFixture[str]):
    patterns = []
    for mode in ([], ["--train"], ["--eval"]):
        assert main(["explain", str(problem), "--json", *mode]) == 0
        patterns.append(json.loads(capsys.readouterr().out)["sites"][0]["pattern"])
    assert ["dropout(0.2)" in pattern for pattern in patterns] == [True, True, False]


@pytest.mark.parametrize("grad", [False, True])
def test_explain_json_is_the_report(grad: bool, problem: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(problem), "--json", *["--grad"] * grad]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert [site["status"] for site in found["sites"]] == ["folded"]


def test_explain_writes_the_page(problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "out.html"
    assert main(["explain", str(problem), "--html", str(page)]) == 0
    assert "constant 0.0 where not NaN" in page.read_text(encoding="utf-8")
    assert main(["explain", str(problem), "--html", str(tmp_path / "no" / "out.html")]) == 2
    assert "no folder" in capsys.readouterr().err


def test_explain_leaves_grad_mode_and_the_callers_modules_as_they_were(problem: Path):
    before = set(sys.path)
    assert main(["explain", str(problem)]) == 0
    assert torch.is_grad_enabled() and set(sys.path) == before


@pytest.mark.parametrize(
    ("old", "new", "name", "message"),
    [
        ("", "", "Modell", "no class Modell; there is Model"),
        ("", "", "not_a_class", "not_a_class is not a class derived from torch.nn.Module"),
        ("", "", "torch", "torch is not a class derived from torch.nn.Module"),
        ("def get_inputs", "def inputs", "Model", "no function get_inputs(), which gives the inputs of Model.forward"),
        ("def get_init_inputs", "def f", "Model", "no function get_init_inputs(), which gives the arguments of Model"),
        ("[8, 4]", "[8, 3]", "Model", "Model(...): ValueError: num_channels"),
        ("[8, 4]", "[8]", "Model", "Model(...): TypeError: Model.__init__() missing 1 required positional argument"),
        ("[8, 4]", "8", "Model", "get_init_inputs() gives the arguments of Model(...) as a list, got int"),
        ("torch.randn(2", "torch.nothing(2", "Model", "get_inputs(): AttributeError: module 'torch' has no attribute"),
        ("import torch\n", "import torhc\n", "Model", "running the file: ModuleNotFoundError: No module named 'torhc'"),
        ("class Model(", "class Model((", "Model", "running the file: SyntaxError"),
        ("not_a_class = 3", "raise SystemExit(0)", "Model", "running the file: SystemExit: 0"),
    ],
)
def test_a_missing_or_failing_piece_is_named_in_one_line(
    old: str, new: str, name: str, message: str, problem: Path, capsys: pytest.CaptureFixture[str]
):
    problem.write_text(PROBLEM.replace(old, new, 1))
    assert main(["explain", f"{problem}:{name}"]) == 2
    error = capsys.readouterr().err.replace("a file may print\n", "")
    assert error.startswith(f"gnfuse explain: {problem}: ") and message in error
    assert error.count("\n") == 1


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(tmp_path / "none.py")]) == 2
    assert "none.py: no such file" in capsys.readouterr().err
    assert main(["explain", str(tmp_path)]) == 2
    assert "not a .py file" in capsys.readouterr().err


def test_a_model_that_cannot_be_traced_exits_with_1(problem: Path, capsys: pytest.CaptureFixture[str]):
    problem.write_text(PROBLEM.replace("nn.Conv2d(3,", "nn.Conv2d(5,"))
    assert main(["explain", str(problem)]) == 1
    assert f"gnfuse explain: tracing {problem}: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["explain"], ["explain", "a.py", "--train", "--eval"], ["unknown"]])
def test_wrong_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: gnfuse" in capsys.readouterr().err


def test_the_console_script_runs_and_an_ascii_terminal_breaks_nothing(problem: Path):
    script = Path(sys.executable).with_name("gnfuse")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [script, "explain", problem, "--eval"], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "group_norm ? minimum(0)" in done.stdout


@pytest.mark.parametrize(
    ("target", "path", "name"),
    [
        ("a.py", "a.py", "Model"),
        ("a.py:Net", "a.py", "Net"),
        ("a.py:", "a.py", "Model"),
        ("d:/a.py", "d:/a.py", "Model"),
    ],
)
def test_targets_name_a_file_and_a_class(target: str, path: str, name: str):
    assert split_target(target) == (Path(path), name)


def test_arguments_may_be_given_as_dicts(problem: Path):
    problem.write_text(
        PROBLEM.replace("[8, 4]", "{'channels': 8, 'groups': 2}").replace("[torch.randn(2, 3, 8, 8)]", "{'x': 1}")
    )
    loaded = load(str(problem), training=False)
    assert loaded.model.norm.num_groups == 2 and not loaded.model.training
    assert loaded.inputs.args == () and loaded.inputs.kwargs == {"x": 1}


def test_a_neighbouring_file_can_be_imported_but_does_not_shadow_the_standard_library(problem: Path):
    (problem.parent / "helper_of_problem.py").write_text("sizes = [8, 4]\n")
    (problem.parent / "random.py").write_text("raise ImportError('shadowed')\n")
    problem.write_text(PROBLEM.replace("[8, 4]", "sizes") + "\nimport random\nfrom helper_of_problem import sizes\n")
    assert load(str(problem)).model.norm.num_groups == 4


def test_a_file_that_fails_leaves_no_module_behind(tmp_path: Path):
    path = tmp_path / "failing.py"
    path.write_text("raise ValueError('two\\nlines')")
    before = set(sys.modules)
    with pytest.raises(ProblemError, match=r"running the file: ValueError: two$"):
        load(str(path))
    assert set(sys.modules) == before
