"""Real clients against a running fleet, each in an environment of its own.

    BASE_URL=http://127.0.0.1:8080 API_KEY=... MODEL=... python tests/clients/run.py [NAME...]

Makes an environment per client under ``CLIENTS_DIR`` (``~/.cache/headrace/clients``), runs the
client's script there, and prints a Markdown table; exits 1 if one failed. `make clients` calls it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_DEFAULT_DIR = Path.home() / ".cache" / "headrace" / "clients"
# A busy machine with a small model needs minutes for a client with many long answers.
_TIMEOUT_S = 900


@dataclass(frozen=True)
class Client:
    """What pip installs, and the script beside this one that is run."""

    name: str
    packages: tuple[str, ...]
    script: str


CLIENTS = (
    Client("openai-2", ("openai>=2,<3",), "openai_sdk.py"),
    Client("openai-3", ("openai>=3,<4",), "openai_sdk.py"),
    Client("strict types", ("openai>=3,<4", "anthropic", "httpx"), "strict_answers.py"),
    Client("anthropic", ("anthropic>=0.60",), "anthropic_sdk.py"),
    Client("langchain-openai", ("langchain-openai>=1",), "langchain_client.py"),
    Client("llama-index", ("llama-index-llms-openai-like",), "llama_index_client.py"),
    Client("instructor", ("instructor>=1.10",), "instructor_client.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]",), "pydantic_ai_client.py"),
    Client("litellm", ("litellm",), "litellm_client.py"),
    Client("llm", ("llm",), "llm_command.py"),
    Client("llm-comply", ("llm-comply",), "comply.py"),
    Client("compatcanary", (), "canary.py"),
    Client("node", (), "node_sdks.py"),
    Client("schemathesis", ("schemathesis>=4",), "fuzz_openapi.py"),
)


def main() -> int:
    """Run the named clients, or all."""
    missing = [name for name in ("BASE_URL", "API_KEY", "MODEL") if not os.environ.get(name)]
    if missing:
        sys.exit(f"set {', '.join(missing)}; `headrace up` prints them")
    wanted = sys.argv[1:]
    unknown = set(wanted) - {client.name for client in CLIENTS}
    if unknown:
        sys.exit(f"no such client: {', '.join(sorted(unknown))}")
    folder = Path(os.environ.get("CLIENTS_DIR", _DEFAULT_DIR))
    rows = [_run(client, folder) for client in CLIENTS if not wanted or client.name in wanted]
    print("| client | version | seconds | outcome |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return 1 if any(not row[-1].startswith("passed") for row in rows) else 0


def _run(client: Client, folder: Path) -> tuple[str, str, str, str]:
    print(f"--- {client.name}", flush=True)
    home = folder / client.name
    started_s = time.monotonic()
    try:
        python = _environment(client, home)
        done = subprocess.run(
            [str(python), str(_HERE / client.script)],
            cwd=home,
            env=_environ(home),
            timeout=_TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.CalledProcessError as error:
        return client.name, "", "", f"cannot be installed: {str(error.stderr)[-200:].strip()}"
    except subprocess.TimeoutExpired:
        return client.name, "", "", f"not over after {_TIMEOUT_S} s"
    seconds = f"{time.monotonic() - started_s:.0f}"
    lines = done.stdout.strip().splitlines() or [""]
    print(done.stdout[-3000:] + done.stderr[-3000:], flush=True)
    outcome = f"passed: {lines[-1]}" if done.returncode == 0 else f"failed: {lines[-1][:200]}"
    return client.name, _version(python, client), seconds, outcome


def _environment(client: Client, home: Path) -> Path:
    """Make the client's environment, once; return its Python."""
    python = home / "bin" / "python"
    stamp = home / ".installed"
    if not stamp.exists():
        if not python.exists():
            venv.create(home, with_pip=True)
        if client.packages:
            command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*command, *client.packages], check=True, capture_output=True, text=True)
        stamp.touch()
    return python


def _environ(home: Path) -> dict[str, str]:
    """Return our environment without this project's packages, with the client's commands first."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "PYTHONNOUSERSITE": "1"}


def _version(python: Path, client: Client) -> str:
    if not client.packages:
        return ""
    package = client.packages[0].partition("[")[0].partition(">")[0]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    shown = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return shown.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
