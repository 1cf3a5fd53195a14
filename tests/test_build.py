"""gnfuse/kernels/build.py: the cache, its lock, and machines where nothing can be built."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gnfuse.kernels import build, load

ROOT = Path(__file__).parent.parent
SLOW_STUB = """#!{python}
import pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("-C") + 1])
time.sleep(0.5)
(folder / "libgnfuse.so").write_bytes(b"stub")
with open({log!r}, "a") as log:
    log.write("built\\n")
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def stub_ninja(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with a `ninja` that writes an empty library and logs that it ran, and the log."""
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    (tools / "ninja").write_text(SLOW_STUB.format(python=sys.executable, log=str(log)))
    (tools / "ninja").chmod(0o755)
    return tools, log


def test_two_processes_at_once_build_once(tmp_path: Path, stub_ninja: tuple[Path, Path]) -> None:
    tools, log = stub_ninja
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "GNFUSE_CACHE_DIR": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path),
    }
    code = "from gnfuse.kernels import build; print(build.ensure_built())"
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = [process.communicate(timeout=100)[0].strip() for process in both]
    assert paths[0] == paths[1] and Path(paths[0]).read_bytes() == b"stub"
    assert log.read_text() == "built\n"
    assert not list((tmp_path / "cache").glob("*building*"))


def test_read_only_cache_that_holds_the_library_works(tmp_path: Path) -> None:
    load()
    library = build.find_library(build.cache_key())
    assert library is not None
    cache = tmp_path / "cache"
    target = cache / build.cache_key()
    target.mkdir(parents=True)
    (target / build.LIBRARY).symlink_to(library)
    for path in (target, cache):
        path.chmod(0o555)
    code = "from gnfuse.kernels import available, load; load(); print(available())"
    done = run_python(code, GNFUSE_CACHE_DIR=str(cache), PATH="/nowhere", TMPDIR=str(tmp_path / "none"))
    assert done.stdout.strip() == "None", done.stderr
    for path in (target, cache):
        path.chmod(0o755)


def test_cache_that_cannot_be_written_falls_back_to_a_temporary_folder(
    tmp_path: Path, stub_ninja: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, _ = stub_ninja
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(build, "cache_folders", lambda: [blocked / "cache", tmp_path / "fallback"])
    assert build.ensure_built() == tmp_path / "fallback" / build.cache_key() / build.LIBRARY


def test_no_compiler_is_a_clear_reason_and_available_never_raises(tmp_path: Path) -> None:
    code = (
        "from gnfuse.kernels import KernelsUnavailable, available, load\n"
        "print(available())\n"
        "try:\n    load()\nexcept KernelsUnavailable as error:\n    print(error)\n"
    )
    done = run_python(code, GNFUSE_CACHE_DIR=str(tmp_path), TMPDIR=str(tmp_path), PATH="/nowhere", CXX="")
    assert done.stdout.splitlines() == ["no C++ compiler (g++ or clang++) on the path"] * 2, done.stderr


def test_compiler_error_is_reported_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cache_folders", lambda: [tmp_path])
    monkeypatch.setattr(build, "compile_flags", lambda: ["--no-such-flag"])
    with pytest.raises(build.KernelsUnavailable, match=r"do not compile.*(?s:.*)no-such-flag"):
        build.ensure_built()
    assert not list(tmp_path.glob("*building*"))


def test_key_depends_on_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    key = build.cache_key()
    monkeypatch.setattr(build, "capability", lambda: "DEFAULT")
    assert build.cache_key() != key


def test_warm_load_starts_no_process() -> None:
    code = (
        "import subprocess, torch, torch._dynamo, gnfuse.kernels as k\n"
        "def refuse(*a, **k): raise AssertionError('a process was started')\n"
        "subprocess.Popen.__init__ = refuse\n"
        "k.load(); print(k.available())"
    )
    load()
    assert run_python(code).stdout.strip() == "None"


def test_lock_is_released_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cache_folders", lambda: [tmp_path])
    monkeypatch.setattr(build, "compile_flags", lambda: ["--no-such-flag"])
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(build.KernelsUnavailable):
            build.ensure_built()
        assert time.monotonic() - begin < 60
