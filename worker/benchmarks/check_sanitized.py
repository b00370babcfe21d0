"""Run the C kernels under the address and undefined-behaviour sanitizers.

``python worker/benchmarks/check_sanitized.py`` compiles them so into a temporary folder and
computes a small model's prompts, chunks and decodes with each rounding on one thread and on three:
every tile, odd sizes and block borders included. Exit code 0 = no sanitizer said anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace_worker.kernels import compiler

_FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
_SANITIZERS = "-fsanitize=address,undefined"
_CHILD = """
import sys
from pathlib import Path
import torch
from headrace_testing.tiny_model import TOKENS, TinyShape, write_hf_folder
from headrace_worker.kernels.native import NativeKernels
from headrace_worker.kernels.rounding import Rounding
from headrace_worker.model import runner
library, folder = Path(sys.argv[1]), Path(sys.argv[2])
runner.native_for = lambda backend, cache, threads: NativeKernels(library, threads)
write_hf_folder(folder, TinyShape())
for rounding in Rounding:
    for threads in (1, 3):
        each = runner.ModelRunner(folder, 40, 16, threads, rounding=rounding)
        assert each.uses_compiled_kernels
        ids = [(7 * i * i + i) % len(TOKENS) for i in range(241)]
        whole = each.forward([runner.Row(ids, 0, range(16), 3)])
        for start, end in ((0, 1), (1, 40), (40, 240)):
            part = each.forward([runner.Row(ids[start:end], start, range(20, 36), 0)])
        rows = [runner.Row(ids[240:], 240, range(20, 36), 1)]
        rows += [runner.Row([5], 0, [36 + i], 1) for i in range(4)]
        assert torch.equal(each.forward(rows)[0], whole[2])
print("clean")
"""


def main() -> int:
    """Compile, run, and pass on what the child said."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        sources = sorted(str(path) for path in compiler.SOURCES.glob("*.c"))
        command = [
            "cc",
            *compiler.FLAGS,
            *_FLAGS,
            _SANITIZERS,
            "-shared",
            *sources,
            "-lm",
            "-o",
            library,
        ]
        subprocess.run(command, check=True)
        preloaded = [
            subprocess.run(
                ["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for name in ("libasan.so", "libubsan.so")
        ]
        # The interpreter itself leaks; and memory that a kernel does not own is what this is about.
        environment = dict(
            os.environ, LD_PRELOAD=" ".join(preloaded), ASAN_OPTIONS="detect_leaks=0"
        )
        child = [sys.executable, "-c", _CHILD, library, Path(folder) / "model"]
        return subprocess.run(child, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
