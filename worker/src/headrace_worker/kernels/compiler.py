"""Compiles the C kernels of `kernels/cpu` once per machine type, into a cache folder.

The file's name is a hash of the sources, the compiler and the CPU's features: a cache that several
kinds of machine share serves none of them another's code.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace_common.errors import Unavailable

SOURCES = Path(__file__).parent / "cpu"
FLAGS: tuple[str, ...] = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fPIC",
    "-pthread",
)
_TIMEOUT_S = 120
_CPU_INFO = Path("/proc/cpuinfo")


def default_cache_dir() -> Path:
    """Where compiled kernels are kept if nobody says otherwise."""
    return Path.home() / ".cache" / "headrace" / "kernels"


def ensure_compiled(cache_dir: Path, compiler: str = "cc") -> Path:
    """Return the shared library, compiling it if it is not there; takes seconds then.

    Raises:
        Unavailable: there is no compiler, it fails, or the folder cannot be written.
    """
    program = shutil.which(compiler)
    if program is None:
        raise Unavailable(f"there is no C compiler {compiler!r}")
    try:
        library = cache_dir / f"kernels-{_identity(program)}.so"
        if library.exists():
            return library
        cache_dir.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have made it while we waited.
            if not library.exists():
                _compile(program, library)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the kernels could not be compiled: {error}") from error
    return library


def _compile(program: str, library: Path) -> None:
    """Compile all sources side by side and put the library in its place in one go."""
    with TemporaryDirectory(prefix="tmp-", dir=library.parent) as folder:
        sources = sorted(SOURCES.glob("*.c"))
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        commands = [
            [program, *FLAGS, "-c", str(source), "-o", target]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for done in threads.map(_run, commands):
                _check(done)
        unfinished = Path(folder) / library.name
        _check(_run([program, *FLAGS, "-shared", *objects, "-lm", "-o", str(unfinished)]))
        unfinished.rename(library)


def _check(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"the kernels could not be compiled: {last}")


def _identity(program: str) -> str:
    digest = hashlib.sha256(" ".join((*FLAGS, platform.machine(), _cpu_features())).encode())
    digest.update(_run([program, "--version"]).stdout.encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_features() -> str:
    """Return the kernel's list of this CPU's features and its model."""
    names = ("flags", "Features", "model name", "CPU part")
    lines = _CPU_INFO.read_text(encoding="utf-8").splitlines() if _CPU_INFO.exists() else []
    return "|".join(sorted({line for line in lines if line.startswith(names)}))


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - fixed arguments, no shell
        argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
