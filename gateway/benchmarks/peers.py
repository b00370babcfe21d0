"""The peers: installed into a folder of their own, started by the harness's launch lines."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from harness import MOCK_PORT

_UPSTREAM = f"x-portkey-custom-host: http://127.0.0.1:{MOCK_PORT}/v1"


@dataclass(frozen=True)
class Peer:
    """One peer: what pip or npm installs, and what else its requests must say."""

    name: str
    pip: str = ""
    npm: str = ""
    headers: tuple[str, ...] = ()


PEERS = (
    Peer("litellm", pip="litellm[proxy]"),
    Peer("portkey", npm="@portkey-ai/gateway", headers=("x-portkey-provider: openai", _UPSTREAM)),
    Peer("smg", pip="smg"),
)


def install(peer: Peer, folder: Path) -> str:
    """Install a peer where its launch line looks for it; empty, or why it could not be."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / f"installed-{peer.name}"
    if done.exists():
        return ""
    command = _npm(peer, folder) if peer.npm else _pip(peer, folder)
    try:
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=900, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return f"cannot be installed: {error}"
    if result.returncode:
        return "cannot be installed: " + (result.stderr.strip().splitlines() or ["?"])[-1][:200]
    done.touch()
    return ""


def launch(peer: Peer, harness: Path, folder: Path, port: int, cpu: int) -> subprocess.Popen[bytes]:
    """Start a peer on a port and a core, as the leader of a process group."""
    names = {"GWBENCH_VENVS": str(folder), "CPU_GW": str(cpu), "AGNICE": "0"}
    # Ours would reach into the peers' environments.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / f"log-{peer.name}").open("wb") as log:
        return subprocess.Popen(
            [str(harness / "peers" / "launch.sh"), peer.name, str(port)],
            env={**inherited, **names},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def _pip(peer: Peer, folder: Path) -> list[str]:
    home = folder / f"v-{peer.name}"
    if not (home / "bin" / "pip").exists():
        venv.create(home, with_pip=True)
    return [str(home / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", peer.pip]


def _npm(peer: Peer, folder: Path) -> list[str]:
    home = folder / peer.name
    home.mkdir(exist_ok=True)
    sys.stdout.flush()
    return [
        "npm",
        "install",
        "--prefix",
        str(home),
        "--silent",
        "--no-audit",
        "--no-fund",
        peer.npm,
    ]
