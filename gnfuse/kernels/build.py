"""Builds the C++ library once, and finds it again: a keyed folder, a file lock, an atomic rename.

The library is one shared object that registers ``torch.ops.gnfuse``; it needs no Python headers. Its folder is keyed
by all that its machine code depends on: the sources, torch's build, the flags and the CPU capability that ATen uses
(``ATEN_CPU_CAPABILITY`` may differ between runs). The compiler is not part of the key: torch fixes the ABI, and a
machine without a compiler must find what another one built. Its version is in ``build.txt`` beside the library.

``python -m gnfuse.kernels`` builds with visible progress.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libgnfuse.so"

# As ATen compiles its own kernels for each capability (cmake/Codegen.cmake in pytorch).
_CAPABILITY_FLAGS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
}


class KernelsUnavailable(RuntimeError):
    """The C++ kernels cannot be used here; the message says why."""


def capability() -> str:
    """The instruction set that ATen's kernels use in this process: AVX512, AVX2 or DEFAULT."""
    name = str(torch.backends.cpu.get_cpu_capability())
    return name if name in _CAPABILITY_FLAGS else "DEFAULT"


def compile_flags() -> list[str]:
    """Flags that decide the library's machine code, but for the instruction set."""
    flags = ["-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-DNDEBUG"]
    return [*flags, "-DAT_PER_OPERATOR_HEADERS", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


def capability_flags(source: str) -> list[str]:
    """The instruction set of one source file."""
    name = capability()
    if source == "moments.cpp" and name == "AVX512":
        # ATen registers no AVX512 kernel for GroupNorm: its statistics are AVX2's, and the lanes decide the sums' order
        name = "AVX2"
    return [f"-DCPU_CAPABILITY={name}", f"-DCPU_CAPABILITY_{name}", *_CAPABILITY_FLAGS.get(name, [])]


def cache_key() -> str:
    """A hash of all that the library depends on; reads the sources, runs no process."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    parts = [torch.__version__, str(torch.version.git_version), platform.machine(), *compile_flags()]
    parts += [*capability_flags("moments.cpp"), *capability_flags("")]
    digest.update("\0".join(parts).encode())
    return f"{digest.hexdigest()[:20]}-{capability().lower()}"


def cache_folders() -> list[Path]:
    """Where a library may be, best first: GNFUSE_CACHE_DIR or the user's cache, then a temporary folder of the user."""
    configured = os.environ.get("GNFUSE_CACHE_DIR")
    if configured:
        first = Path(configured)
    else:
        first = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gnfuse"
    user = str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return [first, Path(tempfile.gettempdir()) / f"gnfuse-{user}"]


def find_library(key: str) -> Path | None:
    """The library of this key if some cache folder holds it."""
    for folder in cache_folders():
        path = folder / key / LIBRARY
        if path.is_file():
            return path
    return None


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, else g++, clang++ or c++ on the path."""
    named = os.environ.get("CXX")
    for candidate in [named] if named else ["g++", "clang++", "c++"]:
        path = shutil.which(candidate)
        if path:
            return path
    return None


def _find_ninja() -> str | None:
    beside = Path(sysconfig.get_path("scripts")) / "ninja"  # installed with pip, in an environment not activated
    return shutil.which("ninja") or (str(beside) if beside.is_file() else None)


def why_not_buildable() -> str | None:
    """None when a library can be built here, else what is missing."""
    if sys.platform != "linux":
        return f"the C++ kernels are built on Linux only, not on {sys.platform}"
    if find_compiler() is None:
        named = os.environ.get("CXX")
        return f"no C++ compiler: $CXX is {named!r}" if named else "no C++ compiler (g++ or clang++) on the path"
    if _find_ninja() is None:
        return "no ninja: pip install ninja"
    if not any(_writable(folder) for folder in cache_folders()):
        return f"no cache folder is writable: {', '.join(map(str, cache_folders()))}"
    return None


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def ensure_built(*, verbose: bool = False) -> Path:
    """The library's path, built first if need be.

    Raises:
        KernelsUnavailable: it is not there and cannot be built; the message ends with the compiler's output, if any.
    """
    key = cache_key()
    found = find_library(key)
    if found is not None:
        return found
    reason = why_not_buildable()
    if reason is not None:
        raise KernelsUnavailable(reason)
    folder = next(folder for folder in cache_folders() if _writable(folder))
    return _build_locked(folder, key, verbose)


def _build_locked(folder: Path, key: str, verbose: bool) -> Path:
    import fcntl

    with open(folder / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed; another process waits here
        found = find_library(key)  # and then finds the library
        if found is not None:
            return found
        work = Path(tempfile.mkdtemp(prefix=f"{key}.building-", dir=folder))
        try:
            _run_ninja(work, verbose)
            target = folder / key
            shutil.rmtree(target, ignore_errors=True)  # without the library in it, or we would not be here
            work.chmod(0o755)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder / key / LIBRARY


def _run_ninja(work: Path, verbose: bool) -> None:
    compiler, ninja = find_compiler(), _find_ninja()
    assert compiler is not None and ninja is not None
    (work / "build.ninja").write_text(_ninja_file(compiler))
    begin = time.monotonic()
    if verbose:
        print(f"gnfuse: building the CPU kernels ({capability()}, {compiler}) in {work}", flush=True)
    command = [ninja, "-C", str(work)]
    done = subprocess.run(command, stdout=None if verbose else subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        tail = "\n".join((done.stdout or "").splitlines()[-30:])
        raise KernelsUnavailable(f"the C++ kernels do not compile with {compiler}:\n{tail}".rstrip())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    seconds = time.monotonic() - begin
    (work / "build.txt").write_text(f"torch {torch.__version__}\n{version}\n{seconds:.1f} s\n")
    for leftover in work.glob("*.o"):
        leftover.unlink()
    if verbose:
        print(f"gnfuse: built in {seconds:.1f} s", flush=True)


def _cpp_standard() -> str:
    """The C++ standard that this torch's headers want: what its own extension builder passes."""
    from torch.utils import cpp_extension

    text = Path(cpp_extension.__file__).read_text()
    return "-std=c++20" if "-std=c++20" in text else "-std=c++17"


def _ninja_file(compiler: str) -> str:
    from torch.utils import cpp_extension

    includes = " ".join(f"-isystem {path}" for path in cpp_extension.include_paths())
    flags = " ".join([_cpp_standard(), *compile_flags()])
    torch_lib = Path(torch.__file__).parent / "lib"
    # ATen's thread pool is the one of the libgomp that came with torch: link that file, not the compiler's
    gomp = " ".join(str(path) for path in sorted(torch_lib.glob("libgomp*.so*"))[:1]) or "-lgomp"
    lines = [
        "ninja_required_version = 1.5",
        "rule compile",
        f"  command = {compiler} {flags} $isa {includes} -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule link",
        f"  command = {compiler} -shared $in -o $out -L{torch_lib} -ltorch_cpu -lc10 {gomp}",
        "  description = link $out",
    ]
    units = _units()
    for path in units:
        lines += [f"build {path.stem}.o: compile {path}", f"  isa = {' '.join(capability_flags(path.name))}"]
    lines += [f"build {LIBRARY}: link {' '.join(path.stem + '.o' for path in units)}", f"default {LIBRARY}"]
    return "\n".join(lines) + "\n"


def _units() -> list[Path]:
    """What is compiled: the sources, but for those that tensors.cc includes; long ones first."""
    first = [SOURCES / "tensors.cc", SOURCES / "registration.cpp"]
    included = {SOURCES / f"{name}.cpp" for name in ("arguments", "constant", "generator", "operators")}
    return [*first, *sorted(set(SOURCES.glob("*.cpp")) - included - set(first))]
