"""The example: `ModelNew` is `Model` to KernelBench's check, and to everything that copies or saves modules."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gnfuse
from gnfuse.kernelbench import load_module

PATH = Path(__file__).resolve().parents[1] / "examples" / "kernelbench_83.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_module(PATH)
    for name, value in {"batch_size": 2, "depth": 5, "height": 9, "width": 8}.items():
        monkeypatch.setattr(module, name, value)
    return module


def two_models(example: ModuleType) -> tuple[torch.nn.Module, torch.nn.Module]:
    model, new = (cls(*example.get_init_inputs()) for cls in (example.Model, example.ModelNew))
    new.load_state_dict(model.state_dict())
    return model, new


@pytest.mark.parametrize("training", [True, False])
def test_the_usual_check_passes_and_the_difference_is_zero(training: bool, example: ModuleType):
    assert [example.check(seed, training, "cpu") for seed in range(3)] == [0.0, 0.0, 0.0]
    assert [site.status for report in gnfuse.reports() for site in report.sites] == ["folded"]


def test_the_command_runs_the_check(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["kernelbench_83.py", "--batch-size", "1", "--seeds", "1"])
    assert example.main() == 0
    assert capsys.readouterr().out.count("batch 1, train, seed 0: equal within 1e-4") == 1


def test_the_command_fails_where_the_models_differ(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(example, "ModelNew", example.Model)
    monkeypatch.setattr(example.Model, "forward", lambda self, x: torch.rand(3))
    monkeypatch.setattr(sys, "argv", ["kernelbench_83.py", "--seeds", "1", "--batch-size", "1"])
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    assert example.main() == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_the_sizes_are_those_of_the_problem():
    module = load_module(PATH)
    assert module.batch_size == 128
    assert module.get_init_inputs() == [3, 16, 3, 8, 0.0, 1.0, 0.2]
    assert (module.in_channels, module.depth, module.height, module.width) == (3, 16, 64, 64)


def test_the_compiled_model_has_the_state_dict_keys_of_the_plain_one(example: ModuleType):
    model, new = two_models(example)
    new(*example.get_inputs())
    assert list(new.state_dict()) == list(model.state_dict())
    assert [name for name, _ in new.named_modules()] == [name for name, _ in model.named_modules()]


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_a_copy_of_the_compiled_model_is_a_model_of_its_own_and_compiled(
    how: str, example: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    _, new = two_models(example)
    x = example.get_inputs()[0]
    new(x)
    if how == "deepcopy":
        other = copy.deepcopy(new)
    else:
        file = io.BytesIO()
        torch.save(new, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    with torch.no_grad():
        other.norm.bias.fill_(torch.nan)
    torch._dynamo.reset()
    gnfuse.clear_reports()
    assert other(x).isnan().all() and not new(x).isnan().any()
    assert all(report for report in gnfuse.reports()) and gnfuse.reports()
