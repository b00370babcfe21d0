"""Ask a Prometheus every query of the dashboards: what finds nothing, or not what its legend names?

Usage: ``python deploy/grafana/ask.py http://127.0.0.1:9090``, while a fleet is watched and works.
Exit code 1: a query is wrong, or its lines lack a label of its legend. One that finds nothing is
only named: of what did not happen, such as alerts, there are no lines.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BOARDS = Path(__file__).parent / "boards"
_TIMEOUT_S = 30.0


def lines() -> Iterator[tuple[str, str, str]]:
    """Yield dashboard and panel, query and legend of each line."""
    for path in sorted(BOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                where = f"{path.stem}: {panel['title']}"
                yield where, target["expr"], target["legendFormat"]


def ask(address: str, query: str) -> dict[str, Any]:  # Any: JSON
    """Ask one query."""
    parameters = urllib.parse.urlencode({"query": query.replace("$__rate_interval", "1m")})
    try:
        url = f"{address}/api/v1/query?{parameters}"
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        return dict(json.load(error))


def faults(legend: str, answer: dict[str, Any]) -> list[str]:  # Any: JSON
    """Return what is wrong with an answer."""
    if answer["status"] != "success":
        return [answer["error"]]
    wanted = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))
    found = answer["data"]["result"]
    return sorted({f"no label {it}" for line in found for it in wanted - set(line["metric"])})


def main(arguments: Sequence[str]) -> int:
    """Ask them all."""
    (address,) = arguments
    num_asked = num_wrong = 0
    for where, query, legend in lines():
        answer = ask(address, query)
        told = faults(legend, answer)
        num_asked, num_wrong = num_asked + 1, num_wrong + bool(told)
        if not answer.get("data", {}).get("result"):
            told.append("nothing")
        for it in told:
            sys.stdout.write(f"{where}: {it}: {query}\n")
    sys.stdout.write(f"{num_asked} queries, {num_wrong} wrong\n")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
