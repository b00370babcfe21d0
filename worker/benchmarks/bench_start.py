"""How long a worker takes from its start until it is ready, model prepared and kernels compiled.

``python worker/benchmarks/bench_start.py [MODEL] [--runs 3]`` starts a worker that many times
after a first start that prepares everything, and prints of the best run: seconds from the start of
the process to `/ready` saying yes, the CPU seconds the process spent until then, and of these what
importing torch, and all that the worker imports, take by themselves. Exit code 1 = above 5 s.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

from headrace_worker.settings import default_cache_dir

_GOAL_S = 5.0
_MOST_S = 120.0


def main() -> int:
    """Measure; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    home = default_cache_dir().parent / "models"
    parser.add_argument(
        "model", type=Path, nargs="?", default=home / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    _start(args.model)
    runs = [_start(args.model) for _ in range(args.runs)]
    ready_s, cpu_s = min(runs)
    torch_s, all_s = (_import_cpu_s(name) for name in ("torch", "headrace_worker.__main__"))
    sys.stdout.write(
        f"ready after {ready_s:.2f} s (goal {_GOAL_S:g}), {cpu_s:.2f} s of CPU;"
        f" imports {all_s:.2f} s of CPU, torch alone {torch_s:.2f} s\n"
    )
    return int(ready_s > _GOAL_S)


def _start(model: Path) -> tuple[float, float]:
    """Start a worker, wait until it is ready, end it; return seconds of wall and of CPU."""
    port, metrics_port = _free_port(), _free_port()
    values = {
        "HEADRACE_WORKER_MODEL_PATH": str(model),
        "HEADRACE_WORKER_LISTEN": f"127.0.0.1:{port}",
        "HEADRACE_WORKER_METRICS_LISTEN": f"127.0.0.1:{metrics_port}",
        "HEADRACE_WORKER_DRAIN_GRACE_S": "0",
    }
    started_s = time.perf_counter()
    command = [sys.executable, "-m", "headrace_worker"]
    process = subprocess.Popen(command, env={**os.environ, **values}, stderr=subprocess.DEVNULL)
    try:
        _wait_ready(f"http://127.0.0.1:{metrics_port}/ready", process)
        ready_s = time.perf_counter() - started_s
        times = psutil.Process(process.pid).cpu_times()
        return ready_s, times.user + times.system
    finally:
        process.terminate()
        process.wait(30)


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.perf_counter() + _MOST_S
    with httpx.Client(timeout=1.0) as client:
        while time.perf_counter() < deadline_s and process.poll() is None:
            try:
                if client.get(url).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
    sys.exit("the worker did not become ready")


def _import_cpu_s(module: str) -> float:
    code = f"import time, {module}; print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
