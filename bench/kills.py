"""Kills parts of a running fleet under load and counts what clients notice.

Usage: ``headrace up --detach``, then ``python bench/kills.py gateway router worker-1,worker-2``.
Half of the requests stream, none is tried again, and each opens a connection of its own but for
`--keep-alive`. `--term` stops the parts in good order instead. A fleet gives up on a part that
crashes five times within a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx

# Load before the kill, and pause between two kills, until the fleet is itself again.
_BEFORE_S = 5.0
_PAUSE_S = 15.0
_CLIENT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    started_s: float
    elapsed_s: float
    ending: str


class Fleet:
    """A fleet that runs, as its state directory shows it."""

    def __init__(self, state_dir: Path, max_tokens: int, *, keeps_alive: bool) -> None:
        self._max_tokens = max_tokens
        self._view_path = state_dir / "fleet.json"
        view = json.loads(self._view_path.read_text())
        self.url, self.model = f"{view['base_url']}/v1/chat/completions", view["model"]
        key = (state_dir / "first-key").read_text().strip()
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"},
            timeout=_CLIENT_TIMEOUT_S,
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None if keeps_alive else 0
            ),
        )

    def send(self, names: list[str], number: signal.Signals) -> None:
        """Send a signal to parts of it."""
        view = json.loads(self._view_path.read_text())
        for child in view["children"]:
            if child["name"] in names:
                os.kill(child["pid"], number)

    async def ask(self, idx: int, begun_s: float) -> Outcome:
        """Ask once; *begun_s* is the monotonic time from which times count."""
        started_s = time.monotonic()
        body = {
            "model": self.model,
            "max_tokens": self._max_tokens,
            "stream": bool(idx % 2),
            "messages": [{"role": "user", "content": f"A story of day {idx} at sea."}],
        }
        try:
            ending = _ending(await self._client.post(self.url, json=body))
        except httpx.TransportError as error:
            ending = type(error).__name__
        return Outcome(started_s - begun_s, time.monotonic() - started_s, ending)


def _ending(answer: httpx.Response) -> str:
    if answer.status_code != httpx.codes.OK:
        return f"{answer.status_code} {answer.json()['error']['code']}"
    is_broken = answer.text.startswith("data:") and '"error"' in answer.text
    return "error event" if is_broken else "answered"


async def measure(
    fleet: Fleet, names: list[str], number: signal.Signals, rate: float, after_s: float
) -> list[Outcome]:
    """Keep the load up, send the signal in the middle, return what became of all requests."""
    begun_s, asked = time.monotonic(), []
    is_sent = False
    for idx in range(round(rate * (_BEFORE_S + after_s))):
        await asyncio.sleep(max(0.0, begun_s + idx / rate - time.monotonic()))
        if not is_sent and time.monotonic() - begun_s >= _BEFORE_S:
            fleet.send(names, number)
            is_sent = True
        asked.append(asyncio.create_task(fleet.ask(idx, begun_s)))
    return await asyncio.gather(*asked)


async def run(options: argparse.Namespace) -> None:
    """One line for each group of parts."""
    fleet = Fleet(options.state_dir, options.max_tokens, keeps_alive=options.keep_alive)
    number = signal.SIGTERM if options.term else signal.SIGKILL
    for group in options.parts:
        outcomes = await measure(fleet, group.split(","), number, options.rate, options.after_s)
        endings = collections.Counter(it.ending for it in outcomes)
        longest = max(
            (it for it in outcomes if it.started_s >= _BEFORE_S - 1), key=lambda it: it.elapsed_s
        )
        before_s = [it.elapsed_s for it in outcomes if it.started_s < _BEFORE_S - 1]
        print(
            f"{group}: {dict(endings.most_common())}, p50 before {median(before_s):.2f} s, "
            f"longest from then on {longest.elapsed_s:.1f} s, "
            f"asked {longest.started_s - _BEFORE_S:+.1f} s from it",
            flush=True,
        )
        await asyncio.sleep(_PAUSE_S)


def main() -> None:
    """Parse the command line and run."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "headrace"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="+", help="names as of `headrace status`; a,b = both at once"
    )
    parser.add_argument("--state-dir", type=Path, default=state)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--max-tokens", type=int, default=2, help="of each answer")
    parser.add_argument("--after-s", type=float, default=20.0, help="load goes on so long")
    parser.add_argument("--keep-alive", action="store_true", help="use connections again")
    parser.add_argument("--term", action="store_true", help="SIGTERM instead of SIGKILL")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
