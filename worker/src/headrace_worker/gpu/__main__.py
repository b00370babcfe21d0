"""`python -m headrace_worker.gpu check`, and `bench --out FOLDER [--tune]`.

*check* compares every kernel with float32, whole models with plain torch, and recorded decode steps
with eager ones. *bench* measures the device's limits and what share of them each kernel, a decode
step of a model of eight billion weights and the whole engine reach. With *--tune* it first finds
how kernels are best cut for this device, and writes the table that workers read: commit it. Exit
code: 0 = all holds, 1 = something is wrong or missed its goal, 2 = there is no GPU to do it on.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace_common.errors import Unavailable
from headrace_worker.gpu import device as gpu


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see the module."""
    parser = argparse.ArgumentParser(prog="headrace_worker.gpu", description=__doc__)
    parser.add_argument("what", choices=["check", "bench"])
    parser.add_argument("--out", type=Path, default=Path("gpu-bench"), help="folder for figures")
    parser.add_argument("--tune", action="store_true", help="find this device's cuts first")
    args = parser.parse_args(arguments)
    try:
        device = gpu.require()
    except Unavailable as error:
        sys.stderr.write(f"{error.public_message}\n")
        return 2
    sys.stdout.write(f"{device.name}, torch {device.torch}, triton {device.triton}\n")
    # It loads triton, which is known to be there only now.
    run = importlib.import_module(f"{__package__}.run")
    code: int = run.check_gpu() if args.what == "check" else run.bench(device, args.out, args.tune)
    return code


if __name__ == "__main__":
    sys.exit(main())
