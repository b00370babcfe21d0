"""What a fleet of `headrace up` holds after so many requests, process by process.

``python bench/soak_fleet.py [--requests 20000] [--real 0.02] [--port 8180] [--keep DIR]`` starts a
fleet with one worker and an adapter to a server that answers at once (so that most requests cost
nothing but the fleet's own work), sends requests of all kinds, and prints every 1,000 how much
memory is each process's own (MiB) and how many files it has open; then what each grew in the second
half, for 1,000 requests, and what lies on disk. At the end the ledger must be right. Limits are
taken from the environment as ever: HEADRACE_LAUNCHER_KAFKA_MAX_BYTES=67108864 shows the broker
start anew several times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from headrace_testing.fake_openai import FakeOpenAi

_EVERY = 1000
_AT_ONCE = 8
_INSTANT, _REAL = "instant", "smollm2-135m-instruct"
_KINDS = ("whole", "streamed", "broken off", "kept", "messages", "named", "unknown", "stranger")
_WORDS = (
    "water wheel stone mill river grain flour sluice timber axle spring frost reed bank".split()
)

# Of a process: MiB of its own, open files.
Held = tuple[float, int]


def headrace(folder: Path, *arguments: str) -> str:
    """Run a command of the launcher; what it printed."""
    command = [sys.executable, "-m", "headrace_launcher", *arguments, "--state-dir", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    return done.stdout


def held(folder: Path) -> dict[str, Held]:
    """Measure every process of the fleet."""
    fleet = json.loads((folder / "fleet.json").read_text())
    pids = {it["name"]: it["pid"] for it in fleet["children"] if it["pid"]}
    found: dict[str, Held] = {}
    for name, pid in {"launcher": fleet["pid"], **pids}.items():
        try:
            process = psutil.Process(pid)
            found[name] = process.memory_full_info().uss / 2**20, process.num_fds()
        except psutil.NoSuchProcess:  # between two lives
            continue
    return found


class Traffic:
    """Requests of all kinds, each with words of its own."""

    def __init__(self, base_url: str, api_key: str, real_ratio: float) -> None:
        self._rng, self._real_ratio, self._api_key = random.Random(0), real_ratio, api_key
        self._http = httpx.AsyncClient(base_url=base_url, timeout=120)
        self.outcomes: Counter[str] = Counter()

    async def close(self) -> None:
        """Disconnect."""
        await self._http.aclose()

    async def send_all(self, numbers: Iterator[int]) -> None:
        """Send one request for each number; several share them."""
        for _ in numbers:
            await self.send()

    async def send(self) -> None:
        """Send one request and note how it ended."""
        kind, number = self._rng.choice(_KINDS), self._rng.getrandbits(64)
        path, body = "/v1/chat/completions", self._body()
        headers = {"Authorization": f"Bearer {self._api_key}"}
        match kind:
            case "kept":
                path, words = "/v1/responses", body.pop("messages")
                body = {"model": body["model"], "max_output_tokens": 16, "input": words}
            case "messages":
                path = "/v1/messages"
            case "named":
                headers["Idempotency-Key"] = f"soak-{number}"
                body |= {"user": f"user-{number}", "prompt_cache_key": f"session-{number}"}
            case "unknown":
                body["model"] = f"model-{number}"
            case "stranger":
                headers["Authorization"] = f"Bearer sk-hr-{number:043d}"
        if kind in ("streamed", "broken off"):
            outcome = await self._stream(body, headers, is_left=kind == "broken off")
        else:
            answer = await self._http.post(path, json=body, headers=headers)
            outcome = str(answer.status_code)
        self.outcomes[f"{kind} {outcome}"] += 1

    async def _stream(
        self, body: dict[str, object], headers: dict[str, str], *, is_left: bool
    ) -> str:
        body["stream"] = True
        url = "/v1/chat/completions"
        async with self._http.stream("POST", url, json=body, headers=headers) as answer:
            async for _ in answer.aiter_raw():
                if is_left:
                    break
        return str(answer.status_code)

    def _body(self) -> dict[str, object]:
        is_real = self._rng.random() < self._real_ratio
        words = " ".join(self._rng.choices(_WORDS, k=self._rng.choice([3, 10, 40, 150])))
        return {
            "model": _REAL if is_real else _INSTANT,
            "max_tokens": 1 if is_real else 5,
            "messages": [{"role": "user", "content": words}],
        }


async def soak(folder: Path, server: FakeOpenAi, traffic: Traffic, num_requests: int) -> None:
    """Send the requests, print what the processes hold meanwhile and what they grew."""
    pieces = [held(folder)]
    print(" " * 8, *(f"{name:>14}" for name in pieces[0]))
    for done in range(_EVERY, num_requests + 1, _EVERY):
        left = iter(range(_EVERY))
        await asyncio.gather(*(traffic.send_all(left) for _ in range(_AT_ONCE)))
        server.bodies.clear()
        pieces.append(held(folder))
        cells = [pieces[-1].get(name, (0.0, 0)) for name in pieces[0]]
        print(f"{done:8}", *(f"{own:9.1f}/{files:4}" for own, files in cells), flush=True)
    middle, end = pieces[len(pieces) // 2], pieces[-1]
    num = (len(pieces) - 1 - len(pieces) // 2) * _EVERY / 1000
    rates = [(end[it][0] - middle[it][0]) / num if it in end else 0.0 for it in middle]
    print("MiB/1000", *(f"{rate:14.2f}" for rate in rates))
    print(dict(traffic.outcomes))


def show_disk(folder: Path) -> None:
    """Print how large everything in a folder is."""
    for path in sorted(folder.iterdir()):
        files = [path] if path.is_file() else [it for it in path.rglob("*") if it.is_file()]
        print(f"{sum(it.stat().st_size for it in files) / 2**20:9.1f} MiB {path.name}")


async def run(folder: Path, options: argparse.Namespace) -> None:
    """Start a fleet, load it, look at its books, stop it."""
    async with FakeOpenAi() as server:
        upstreams = folder / "upstreams.toml"
        upstreams.write_text(
            f'version = 1\n[upstreams.{_INSTANT}]\nurl = "{server.url}"\n'
            f'model = "{server.model}"\nserved_as = "{_INSTANT}"\n'
        )
        up = ("up", "--detach", "--workers", "1", "--port", str(options.port))
        await asyncio.to_thread(headrace, folder, *up, "--upstreams", str(upstreams))
        try:
            key = (folder / "first-key").read_text().strip()
            traffic = Traffic(f"http://127.0.0.1:{options.port}", key, options.real)
            await soak(folder, server, traffic, options.requests)
            await traffic.close()
            await asyncio.sleep(15)  # what a broker lost is sent again after ten
            for command in ("verify", "reconcile"):
                print((await asyncio.to_thread(headrace, folder, "ledger", command))[:300])
        finally:
            await asyncio.to_thread(headrace, folder, "down")
    await asyncio.to_thread(show_disk, folder)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--real", type=float, default=0.02, help="share that the worker computes")
    parser.add_argument("--port", type=int, default=8180)
    parser.add_argument("--keep", type=Path, help="state directory that is not removed")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        asyncio.run(run(options.keep, options))
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder), options))


if __name__ == "__main__":
    main()
