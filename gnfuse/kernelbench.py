"""Loading a file in KernelBench's convention: a model class, ``get_inputs()`` and ``get_init_inputs()``.

``get_init_inputs()`` gives the constructor's arguments and ``get_inputs()`` those of ``forward``, each as a list (or a
dict, for keyword arguments). Whatever is missing or wrong raises `ProblemError`, whose one-line message names it.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

DEFAULT_NAME = "Model"


class ProblemError(Exception):
    """A file that is not in KernelBench's convention, or whose code fails; the message is one line."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, function: Callable[..., Any]) -> Any:
        """``function(*args, **kwargs)``."""
        return function(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Problem:
    """A model with the inputs that its file gives for it."""

    model: torch.nn.Module
    inputs: Arguments


def split_target(target: str) -> tuple[Path, str]:
    """``FILE.py:NAME`` as path and name; without a name it is "Model"."""
    path, colon, name = target.rpartition(":")
    if colon and path.endswith(".py"):
        return Path(path), name or DEFAULT_NAME
    return Path(target), DEFAULT_NAME


def load(target: str, training: bool = True, device: str | torch.device = "cpu") -> Problem:
    """Runs the file of ``FILE.py:NAME``, makes its model and its inputs and moves both to ``device``.

    Args:
        target: the file and the class in it; the class is "Model" where none is named.
        training: the mode of the model; KernelBench runs its models in training mode.
        device: where model and inputs go.

    Raises:
        ProblemError: naming the missing or failing piece.
    """
    path, name = split_target(target)
    module = load_module(path)
    model_class = _model_class(module, path, name)
    init = _arguments(module, path, "get_init_inputs", f"the arguments of {name}(...)")
    model = _run(f"{path}: {name}(...)", lambda: init.call(model_class))
    inputs = _arguments(module, path, "get_inputs", f"the inputs of {name}.forward")
    model = _run(f"{path}: moving {name} to {device}", lambda: model.to(device).train(training))
    inputs = _run(f"{path}: moving the inputs to {device}", lambda: _to(inputs, device))
    return Problem(model, inputs)


def load_module(path: Path) -> ModuleType:
    """Runs a Python file as a module of its own. Raises ProblemError where it is missing or fails."""
    if path.suffix != ".py":
        raise ProblemError(f"{path}: not a .py file (give FILE.py or FILE.py:NAME)")
    if not path.is_file():
        raise ProblemError(f"{path}: no such file")
    # a dotless, unusual name: the file must not stand in for a module that something else imports
    spec = importlib.util.spec_from_file_location(f"gnfuse_problem_{path.stem}", path.resolve())
    assert spec is not None and spec.loader is not None  # a .py file has a loader
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    sys.modules[spec.name] = module
    sys.path.append(str(path.resolve().parent))  # last: a neighbour called random.py is not the standard library's
    try:
        _run(f"{path}: running the file", lambda: loader.exec_module(module))
    except ProblemError:
        del sys.modules[spec.name]
        raise
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(path.resolve().parent))
    return module


def _model_class(module: ModuleType, path: Path, name: str) -> type[torch.nn.Module]:
    found = getattr(module, name, None)
    if found is None:
        classes = [
            key
            for key, value in vars(module).items()
            if _is_model_class(value) and getattr(value, "__module__", "") == module.__name__
        ]
        near = difflib.get_close_matches(name, classes, n=3, cutoff=0.4) or classes[:3]
        there = f"; there is {', '.join(near)}" if near else ""
        raise ProblemError(f"{path}: no class {name}{there}")
    if not _is_model_class(found):
        raise ProblemError(f"{path}: {name} is not a class derived from torch.nn.Module")
    model_class: type[torch.nn.Module] = found
    return model_class


def _is_model_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module)


def _arguments(module: ModuleType, path: Path, function: str, meaning: str) -> Arguments:
    get = getattr(module, function, None)
    if not callable(get):
        raise ProblemError(f"{path}: no function {function}(), which gives {meaning}")
    value = _run(f"{path}: {function}()", get)
    if isinstance(value, dict):
        return Arguments(kwargs=value)
    if isinstance(value, (list, tuple)):
        return Arguments(tuple(value))
    raise ProblemError(f"{path}: {function}() gives {meaning} as a list, got {type(value).__name__}")


def _to(arguments: Arguments, device: str | torch.device) -> Arguments:
    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    kwargs = {key: move(value) for key, value in arguments.kwargs.items()}
    return Arguments(tuple(map(move, arguments.args)), kwargs)


def _run(what: str, function: Callable[[], Any]) -> Any:
    """What the function gives; whatever it raises, SystemExit too, becomes a ProblemError."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ProblemError(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """``ValueError: what it says first``."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
