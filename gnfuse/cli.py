"""The ``gnfuse`` command: ``gnfuse explain FILE.py:NAME`` and ``gnfuse doctor``.

Exit codes: 0 done; 1 the tracing failed, or the doctor found that the kernels cannot be used; 2 wrong arguments or a
file that lacks a piece.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

import gnfuse
from gnfuse import doctor, kernelbench


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and gives its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows ? for an arrow
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `gnfuse explain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gnfuse", description="Folds and fuses group_norm → pointwise chain → dropout, and says what it did."
    )
    parser.add_argument("--version", action="version", version=f"gnfuse {gnfuse.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    explain = commands.add_parser(
        "explain",
        help="what gnfuse would do to a model, and why",
        description="Traces the model, runs and changes nothing, and prints the report.",
    )
    explain.add_argument(
        "target",
        metavar="FILE.py[:NAME]",
        help="a file in KernelBench's convention: a class (NAME, by default Model), get_inputs() and get_init_inputs()",
    )
    mode = explain.add_mutually_exclusive_group()
    mode.add_argument(
        "--train", dest="training", action="store_true", help="in training mode (the default, as KernelBench runs it)"
    )
    mode.add_argument("--eval", dest="training", action="store_false", help="in evaluation mode")
    explain.add_argument("--grad", action="store_true", help="with gradients recorded (without it: under no_grad)")
    explain.add_argument("--device", default="cpu", help="where model and inputs are put (default: cpu)")
    explain.add_argument("--json", action="store_true", help="print the report as JSON")
    explain.add_argument("--html", metavar="PATH", type=Path, help="also write the report as a page")
    explain.set_defaults(run=_explain, training=True)

    examine = commands.add_parser(
        "doctor",
        help="what gnfuse finds on this machine",
        description="Lists versions, compiler, GPUs, caches, kernels, and how eager PyTorch behaves here.",
    )
    examine.add_argument("--json", action="store_true", help="print it as JSON")
    examine.set_defaults(run=_doctor)
    return parser


def _explain(arguments: argparse.Namespace) -> int:
    html: Path | None = arguments.html
    if html is not None and not html.parent.is_dir():
        return _fail("explain", f"--html {html}: no folder {html.parent}", 2)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the file prints is not part of the report
            problem = kernelbench.load(arguments.target, arguments.training, arguments.device)
    except kernelbench.ProblemError as error:
        return _fail("explain", str(error), 2)
    try:
        with torch.set_grad_enabled(arguments.grad), contextlib.redirect_stdout(sys.stderr):
            report = gnfuse.explain(problem.model, *problem.inputs.args, **problem.inputs.kwargs)
    except Exception as error:
        return _fail("explain", f"tracing {arguments.target}: {kernelbench.first_line(error)}", 1)
    if html is not None:
        report.save_html(html)
    if arguments.json:
        print(report.to_json())
    else:
        _show(report)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    examination = doctor.examine()
    if arguments.json:
        print(examination.to_json())
    else:
        _show(examination)
    return 0 if examination.healthy else 1


def _show(shown: object) -> None:
    """In colours on a terminal, else as plain text."""
    if sys.stdout.isatty():
        Console(highlight=False).print(shown)
    else:
        print(shown)


def _fail(command: str, message: str, code: int) -> int:
    print(f"gnfuse {command}: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
