"""Time of the rules: whole inputs per KB and per 500-token request, outputs per token.

    python guard/benchmarks/bench_rules.py [--repeats 200]

Times are CPU times of the judging thread, so that other load shows less. Absolute times depend on
the machine; each row also gives the ratio to a reference measured in the same run: one search of
the same text for a word with Python's `re`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from time import thread_time

from headrace_common.clock import SystemClock
from headrace_guard.classifiers.blocklist import BlocklistCache
from headrace_guard.classifiers.text_model import Trust
from headrace_guard.deadline import Deadline
from headrace_guard.input_check import Part, check_part
from headrace_guard.output_check import OutputCheck
from headrace_guard.plan import Plan, Planner
from headrace_guard.policy import Direction, load_policies

_CHARS = 2000  # about 500 tokens of English
_ENGLISH = "Each row of the table names a river, its length in km (1,234.5) and the sea it meets. "
_TEXTS = {
    "English": _ENGLISH * 40,
    "code": "    if value[idx] == 0x1F:  # see RFC 5321\n        total += rates['EUR'] * 1.25\n"
    * 40,
    "accented": "L'été dernier, la rivière était déjà très haute après l'orage de février. " * 40,
    "Chinese": "水车是一种利用水流能量的机械\uff0c它把河水的动能变成转动的力量。" * 80,
    "dense PII": "Jo <jo.doe@example.org>, +49 30 1234567, card 4111 1111 1111 1111, 203.0.113.9; "
    * 40,
    "digit soup": "4 1-2 3 " * 400,
    "invisible": "ca\u200bna\u200bry " * 300,
}
_REFERENCE = re.compile("zanzibar")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    planner = Planner(load_policies(None), BlocklistCache(8, 2000, 40_000))
    terms = tuple(f"forbidden{idx} word" for idx in range(1000))
    made = [planner.plan(name, way) for name in ("default", "strict") for way in Direction]
    default_in, default_out, strict_in, strict_out = (
        planner.with_terms(one, terms) for one in made if one is not None
    )
    _inputs([("default", default_in), ("strict", strict_in)], repeats)
    _outputs([("default", default_out), ("strict", strict_out)], max(3, repeats // 20))


def _inputs(plans: list[tuple[str, Plan]], repeats: int) -> None:
    _row("input, 2000 characters, 1000 terms", "p50 ms", "p99 ms", "ms/KB", "x reference")
    for kind, text in _TEXTS.items():
        part = Part(text[:_CHARS], Trust.USER)
        reference_s = median(_times(partial(_REFERENCE.search, part.text), repeats))
        for name, plan in plans:
            times = _times(partial(check_part, plan, part, _deadline()), repeats)
            p50_s, p99_s = median(times), quantiles(times, n=100)[98]
            kilobytes = len(part.text.encode()) / 1000
            _row(
                f"{kind}, {name}",
                f"{p50_s * 1e3:.3f}",
                f"{p99_s * 1e3:.3f}",
                f"{p50_s * 1e3 / kilobytes:.3f}",
                f"{p50_s / reference_s:.0f}",
            )


def _outputs(plans: list[tuple[str, Plan]], repeats: int) -> None:
    _row("output, token by token", "us/token p50", "most held", "", "")
    tokens = re.findall(r"\s?\S{1,4}", _TEXTS["English"][:_CHARS])
    for name, plan in plans:
        held: list[int] = []

        def stream(plan: Plan = plan, held: list[int] = held) -> None:
            # Rules and blocklists alone: without models a policy that asks for them would stop.
            check = OutputCheck(replace(plan, asked=None), 0, 8192)
            for token in tokens:
                check.feed(token, False, _deadline())
                held.append(check.num_held_chars)

        p50_s = median(_times(stream, repeats)) / len(tokens)
        _row(name, f"{p50_s * 1e6:.1f}", str(max(held)), "", "")


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        started_s = thread_time()
        work()
        times.append(thread_time() - started_s)
    return times


def _deadline() -> Deadline:
    return Deadline(SystemClock(), 60.0)


def _row(*cells: str) -> None:
    sys.stdout.write(
        f"| {cells[0]:36} | " + " | ".join(f"{cell:>12}" for cell in cells[1:]) + " |\n"
    )


if __name__ == "__main__":
    main()
