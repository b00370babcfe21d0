"""Build the images, start docker-compose.yml under another name, try it all, and remove it again.

`make compose-check` runs this. It needs some minutes, Docker (tried: 20.10 with Compose 2.40), and
of Python only what comes with it. What is tried: a missing password is refused; services start in
their order and become healthy; none is root or can write to its image; a key, and a streamed answer
through each gateway's own port; Prometheus finds every replica and can evaluate every rule; a
stream outlives the SIGTERM of its gateway; everything stops within its grace; keys and ledger
outlive down and up.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROJECT = "headrace-check"
COMPOSE = shlex.split(os.environ.get("COMPOSE") or "docker compose")
MODEL = "smollm2-135m-instruct"
NUM_GATEWAYS = NUM_WORKERS = 2
STORES = {"redis", "kafka", "postgres", "prometheus"}
_STREAM_S = 6.0
UP = ("up", "--detach", "--wait", "--wait-timeout", "1800")


class Fleet:
    """The composition, by its command line and its published ports."""

    def __init__(self, env_file: Path, port: int, prometheus_port: int) -> None:
        self._env_file, self.prometheus_port = env_file, prometheus_port
        self.ports = [port + number for number in range(NUM_GATEWAYS)]

    def compose(self, *words: str, fails: bool = False, given: str = "") -> str:
        """Run one command; its output. Ends the check if it fails, or if it does not but should."""
        argv = [*COMPOSE, "--project-name", PROJECT, "--env-file", str(self._env_file), *words]
        done = subprocess.run(
            argv, cwd=ROOT, input=given, capture_output=True, text=True, check=False
        )
        if bool(done.returncode) != fails:
            raise SystemExit(f"{shlex.join(argv)}: exit code {done.returncode}\n{done.stderr}")
        return done.stderr if fails else done.stdout

    def containers(self) -> list[dict[str, Any]]:
        """List all containers, also those that have ended."""
        lines = self.compose("ps", "--all", "--format", "json").strip().splitlines()
        return [json.loads(line) for line in lines]

    def admin(self, *words: str, given: str = "") -> str:
        """Run a command of `headrace`."""
        return self.compose("run", "--rm", "-T", "admin", *words, given=given)


def ask(port: int, key: str, max_tokens: int, on_first: Callable[[], None] | None = None) -> int:
    """Stream one answer; the number of its events. Raises if it does not end as it should."""
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "Tell me a long story."}],
    }
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        events = []
        for line in answer:
            if line.startswith(b"data: "):
                events.append(line)
                if on_first is not None and len(events) == 2:
                    on_first()
    assert events[-1] == b"data: [DONE]\n", events[-1]
    assert b'"finish_reason":"length"' in events[-2], events[-2]
    return len(events)


def check_refusal(fleet: Fleet, folder: Path) -> None:
    """Without a password nothing starts, and the message names what is missing."""
    empty = Fleet(folder / "empty.env", 1, 1)
    (folder / "empty.env").touch()
    assert "POSTGRES_PASSWORD is missing a value" in (
        said := empty.compose("config", fails=True)
    ), said
    assert "see .env.example" in said, said


def check_confinement(fleet: Fleet) -> None:
    """No service of ours is root, has a capability, or can write where its program lies."""
    for one in fleet.containers():
        if one["Service"] in STORES or one["State"] != "running":
            continue
        index = one["Name"].rsplit("-", 1)[-1]
        probe = "id -u; grep CapEff /proc/self/status | cut -f2; touch /app/x 2>/dev/null && echo w"
        said = fleet.compose(
            "exec", "-T", "--index", index, one["Service"], "bash", "-c", f"{probe}; true"
        )
        assert said.split() == ["10001", "0000000000000000"], (one["Name"], said)


def check_answers(fleet: Fleet, key: str) -> int:
    """Each gateway answers holders of a key, and nobody else; the number of answers."""
    for port in fleet.ports:
        ask(port, key, 8)
        try:
            ask(port, "sk-hr-nonsense", 8)
        except urllib.error.HTTPError as error:
            assert error.code == 401, error
        else:
            raise AssertionError("an unknown key was served")
    return len(fleet.ports)


def check_prometheus(fleet: Fleet) -> None:
    """Every service and every replica is scraped."""
    wanted = sorted(
        ["router", "cache-index", "guard", "ratelimit", "billing"]
        + ["gateway"] * NUM_GATEWAYS
        + ["worker"] * NUM_WORKERS
    )
    url = f"http://127.0.0.1:{fleet.prometheus_port}/api/v1/targets?state=active"
    found: list[str] = []
    for _ in range(30):
        with urllib.request.urlopen(url, timeout=10) as answer:
            targets = json.load(answer)["data"]["activeTargets"]
        found = sorted(it["labels"]["service"] for it in targets if it["health"] == "up")
        if found == wanted:
            return
        time.sleep(2)
    raise AssertionError(f"scraped are {found}, not {wanted}")


def check_rules(fleet: Fleet) -> int:
    """Every rule is loaded and evaluated without an error; the number of alerts."""
    url = f"http://127.0.0.1:{fleet.prometheus_port}/api/v1/rules"
    wanted = {path.name for path in (ROOT / "deploy/prometheus/rules").glob("*.yml")}
    for _ in range(30):
        with urllib.request.urlopen(url, timeout=10) as answer:
            groups = json.load(answer)["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert {Path(group["file"]).name for group in groups} == wanted, groups
        if {rule["health"] for rule in rules} == {"ok"}:
            return sum(rule["type"] == "alerting" for rule in rules)
        time.sleep(2)
    raise AssertionError([rule for rule in rules if rule["health"] != "ok"])


def check_drain(fleet: Fleet, key: str) -> int:
    """A stream ends whole although its gateway is told to stop as it begins; 2 answers."""
    started_s = time.monotonic()
    ask(fleet.ports[0], key, 64)
    # So long that it ends well within the grace, and well after the signal.
    max_tokens = int(64 * _STREAM_S / (time.monotonic() - started_s))
    stop = threading.Thread(target=fleet.compose, args=("stop", "gateway"))
    ask(fleet.ports[0], key, max_tokens, on_first=stop.start)
    assert stop.is_alive(), "the gateway had already gone, or the stream was too short to tell"
    stop.join()
    return 2


def check_end(fleet: Fleet) -> None:
    """All stop by themselves: nobody had to be killed."""
    fleet.compose("stop")
    codes = {one["Name"]: one["ExitCode"] for one in fleet.containers()}
    assert codes, "there are no containers"
    assert set(codes.values()) == {0}, codes


def check_memory(fleet: Fleet, key: str, num_answers: int) -> None:
    """Keys, ledger and what waited in the outbox outlive their containers."""
    fleet.compose("down")
    fleet.compose(*UP)
    num_answers += check_answers(fleet, key)
    wanted = f" {num_answers} entries, 0 open, 0 dead letters"
    for _ in range(30):
        if wanted in (said := fleet.admin("ledger", "verify")):
            break
        time.sleep(1)
    else:
        raise AssertionError(f"{num_answers} answers were given; {said}")
    lister = ("python", "-m", "headrace_gateway.outbox_list", "/var/lib/headrace/outbox")
    waiting = fleet.compose("exec", "-T", "gateway", *lister)
    found = json.loads(fleet.admin("ledger", "reconcile", "--outbox", "-", given=waiting))
    assert found["ok"], found


def try_all(fleet: Fleet, folder: Path) -> None:
    """Do one after the other, saying what."""
    check_refusal(fleet, folder)
    say("missing secrets are refused; building")
    fleet.compose("build")
    say("images are built; starting")
    fleet.compose(*UP)
    say("all are healthy")
    check_confinement(fleet)
    say("none is root, has capabilities or a writable image")
    made = fleet.admin("keys", "create", "--tenant", "default", "--name", "check", "--json")
    key = json.loads(made)["api_key"]
    num_answers = check_answers(fleet, key)
    say(f"{num_answers} gateways answer")
    check_prometheus(fleet)
    say("Prometheus scrapes all")
    say(f"Prometheus evaluates {check_rules(fleet)} alerts")
    num_answers += check_drain(fleet, key)
    say("a stream outlived the end of its gateway")
    check_end(fleet)
    say("all stopped within their grace")
    check_memory(fleet, key, num_answers)
    say("keys and ledger are still there after down and up: all is well")


def say(text: str) -> None:
    """Say what has been seen, and when."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


@contextlib.contextmanager
def composition() -> Iterator[tuple[Fleet, Path]]:
    """Make an environment of its own, and remove containers and volumes at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder, port, prometheus_port = Path(name), free_port(), free_port()
        env = folder / "check.env"
        env.write_text(
            f"POSTGRES_PASSWORD={secrets.token_hex(16)}\n"
            f"HEADRACE_PORT={port}-{port + NUM_GATEWAYS - 1}\n"
            f"HEADRACE_PROMETHEUS_PORT={prometheus_port}\n"
            f"HEADRACE_GATEWAYS={NUM_GATEWAYS}\nHEADRACE_WORKERS={NUM_WORKERS}\n"
        )
        fleet = Fleet(env, port, prometheus_port)
        try:
            yield fleet, folder
        except BaseException:
            sys.stdout.write(fleet.compose("logs", "--tail", "20"))
            raise
        finally:
            fleet.compose("down", "--volumes", "--timeout", "30")


def free_port() -> int:
    """Return a port with free ones behind it, as far as can be known."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
        try:
            for number in range(1, NUM_GATEWAYS):
                with socket.socket() as other:
                    other.bind(("127.0.0.1", port + number))
        except OSError:
            continue
        return port


if __name__ == "__main__":
    with composition() as (the_fleet, the_folder):
        try_all(the_fleet, the_folder)
