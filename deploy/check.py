"""Build the images, start docker-compose.yml under another name, try it all, and remove it again.

`make compose-check` runs this. It needs some minutes, Docker (tried: 20.10 with Compose 2.40), and
of Python only what comes with it. What is tried: a missing password is refused; services start in
their order and become healthy; none is root or can write to its image; a key, and a streamed answer
through each gateway's own port; Prometheus finds every replica, can evaluate every rule, and has no
reason for an alert; answers while each service and store is away, and after its return; a stream
outlives the crash of its worker and the SIGTERM of its gateway; everything stops within its grace;
keys and ledger outlive down and up, and an upgrade to other numbers of gateways and workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
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
# The status of an answer while one is away: ARCHITECTURE, section 6.
AWAY = {
    "cache-index": 200,
    "router": 200,
    "ratelimit": 200,
    "redis": 200,
    "kafka": 200,
    "billing": 200,
    "postgres": 200,
    "guard": 503,
    "worker": 503,
}
_STREAM_S = 6.0
UP = ("up", "--detach", "--wait", "--wait-timeout", "1800")


class Fleet:
    """The composition, by its command line and its published ports."""

    def __init__(self, env_file: Path, port: int, prometheus_port: int) -> None:
        self._env_file, self._port, self.prometheus_port = env_file, port, prometheus_port
        self._password = secrets.token_hex(16)
        self.set_numbers(NUM_GATEWAYS, NUM_WORKERS)

    def set_numbers(self, num_gateways: int, num_workers: int) -> None:
        """Have so many of each from the next `up` on."""
        self.num_workers = num_workers
        self.ports = [self._port + number for number in range(num_gateways)]
        self._env_file.write_text(
            f"POSTGRES_PASSWORD={self._password}\n"
            f"HEADRACE_PORT={self.ports[0]}-{self.ports[-1]}\n"
            f"HEADRACE_PROMETHEUS_PORT={self.prometheus_port}\n"
            f"HEADRACE_GATEWAYS={num_gateways}\nHEADRACE_WORKERS={num_workers}\n"
        )

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

    def prometheus(self, what: str) -> Any:
        """Ask Prometheus' API."""
        url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/{what}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]


def ask(port: int, key: str, max_tokens: int, on_first: Callable[[str], None] | None = None) -> int:
    """Stream one answer, tell *on_first* its replica; the number of its events, if it ends well."""
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
                    on_first(answer.headers["x-headrace-replica"])
    assert events[-1] == b"data: [DONE]\n", events[-1]
    assert b'"finish_reason":"length"' in events[-2], events[-2]
    return len(events)


def check_refusal(fleet: Fleet, folder: Path) -> None:
    """Without a password nothing starts, and the message names what is missing."""
    empty = Fleet(folder / "empty.env", 1, 1)
    (folder / "empty.env").write_text("")
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
            with error:
                assert error.code == 401, error
        else:
            raise AssertionError("an unknown key was served")
    return len(fleet.ports)


def check_prometheus(fleet: Fleet) -> None:
    """Every service and every replica is scraped."""
    wanted = sorted(
        ["router", "cache-index", "guard", "ratelimit", "billing"]
        + ["gateway"] * len(fleet.ports)
        + ["worker"] * fleet.num_workers
    )
    found: list[str] = []
    for _ in range(30):
        targets = fleet.prometheus("targets?state=active")["activeTargets"]
        found = sorted(it["labels"]["service"] for it in targets if it["health"] == "up")
        if found == wanted:
            return
        time.sleep(2)
    raise AssertionError(f"scraped are {found}, not {wanted}")


def check_rules(fleet: Fleet) -> int:
    """Every rule is loaded, evaluated without an error and soon quiet; the number of alerts.

    `ServiceDown` has fired until there was a gateway: workers fetch and prepare their model first.
    """
    wanted = {path.name for path in (ROOT / "deploy/prometheus/rules").glob("*.yml")}
    for _ in range(30):
        groups = fleet.prometheus("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert {Path(group["file"]).name for group in groups} == wanted, groups
        alerts = [rule for rule in rules if rule["type"] == "alerting"]
        wrong = [rule for rule in rules if rule["health"] != "ok"]
        wrong += [rule for rule in alerts if rule["state"] == "firing"]
        if not wrong:
            return len(alerts)
        time.sleep(2)
    raise AssertionError(wrong)


def check_outages(fleet: Fleet, key: str) -> int:
    """Without a service answers are as ARCHITECTURE has it, and whole again after its return.

    Returns the number of entries: the guard refuses before a request is opened in the books.
    """
    num_entries = 0
    for service, wanted in AWAY.items():
        fleet.compose("kill", service)
        try:
            ask(fleet.ports[0], key, 8)
            status = 200
        except urllib.error.HTTPError as error:
            with error:
                status = error.code
        assert status == wanted, (service, status)
        fleet.compose(*UP)
        ask(fleet.ports[0], key, 8)
        num_entries += 1 if service == "guard" else 2
    return num_entries


def check_crash(fleet: Fleet, key: str) -> int:
    """A stream ends whole although its worker dies, which Docker starts again; 1 answer."""
    died: list[str] = []

    def kill(replica: str) -> None:
        (index,) = (
            one["Name"].rsplit("-", 1)[-1]
            for one in fleet.containers()
            if one["Service"] == "worker" and one["ID"].startswith(replica)
        )
        # All that the container's user may kill: the worker, not the init above it.
        fleet.compose("exec", "-T", "--index", index, "worker", "bash", "-c", "kill -9 -1")
        died.append(replica)

    ask(fleet.ports[0], key, 400, on_first=kill)
    for _ in range(120):
        health = {one["Health"] for one in fleet.containers() if one["Service"] == "worker"}
        moved = fleet.prometheus("query?query=sum(headrace_gateway_resumes_total)")["result"]
        if health == {"healthy"} and moved and float(moved[0]["value"][1]) >= 1:
            return 1
        time.sleep(1)
    raise AssertionError(f"{died}: {health}, streams moved: {moved}")


def check_drain(fleet: Fleet, key: str) -> int:
    """A stream ends whole although its gateway is told to stop as it begins; 2 answers."""
    started_s = time.monotonic()
    ask(fleet.ports[0], key, 64)
    # So long that it ends well within the grace, and well after the signal.
    max_tokens = int(64 * _STREAM_S / (time.monotonic() - started_s))
    stop = threading.Thread(target=fleet.compose, args=("stop", "gateway"))
    ask(fleet.ports[0], key, max_tokens, on_first=lambda _: stop.start())
    assert stop.is_alive(), "the gateway had already gone, or the stream was too short to tell"
    stop.join()
    return 2


def check_end(fleet: Fleet) -> None:
    """All stop by themselves: nobody had to be killed."""
    fleet.compose("stop")
    codes = {one["Name"]: one["ExitCode"] for one in fleet.containers()}
    assert codes, "there are no containers"
    assert set(codes.values()) == {0}, codes


def check_books(fleet: Fleet, num_answers: int) -> None:
    """Each answer is booked once; outboxes, log and ledger agree."""
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


def check_upgrade(fleet: Fleet) -> None:
    """`up --build` of a fleet that runs, with fewer gateways and more workers."""
    fleet.set_numbers(NUM_GATEWAYS - 1, NUM_WORKERS + 1)
    fleet.compose(*UP, "--build")
    check_prometheus(fleet)


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
    say(f"Prometheus evaluates {check_rules(fleet)} alerts, none fires")
    num_answers += check_drain(fleet, key)
    say("a stream outlived the end of its gateway")
    check_end(fleet)
    say("all stopped within their grace")
    fleet.compose("down")
    fleet.compose(*UP)
    num_answers += check_answers(fleet, key)
    check_books(fleet, num_answers)
    say("keys and ledger are still there after down and up")
    num_answers += check_outages(fleet, key)
    check_books(fleet, num_answers)
    say("each service was killed and came back, and all is booked")
    num_answers += check_crash(fleet, key)
    say("a stream outlived the crash of its worker")
    check_upgrade(fleet)
    num_answers += check_answers(fleet, key)
    check_books(fleet, num_answers)
    say("after an upgrade to other numbers the books are whole: all is well")


def say(text: str) -> None:
    """Say what has been seen, and when."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


@contextlib.contextmanager
def composition() -> Iterator[tuple[Fleet, Path]]:
    """Make an environment of its own, and remove containers and volumes at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder, port, prometheus_port = Path(name), free_port(), free_port()
        fleet = Fleet(folder / "check.env", port, prometheus_port)
        try:
            yield fleet, folder
        except BaseException:
            sys.stdout.write(fleet.compose("logs", "--tail", "20"))
            raise
        finally:
            fleet.compose("down", "--volumes", "--timeout", "30")


def free_port() -> int:
    """Return a port with free ones behind it, below those that outgoing connections may take."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            for number in range(NUM_GATEWAYS):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port + number))
        except OSError:
            continue
        return port


if __name__ == "__main__":
    with composition() as (the_fleet, the_folder):
        try_all(the_fleet, the_folder)
