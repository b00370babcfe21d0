"""Time of a whole input check: extraction's parts in, verdict out, everything but the embedding.

    OPENBLAS_NUM_THREADS=1 python guard/benchmarks/bench_check.py [--embedding DIR] [--repeats 300]

with one thread for numpy, as `headrace up` and the image start the guard.

Rules, blocklist of 1,000 words, normalising, decoding, cache and the linear heads, with DIR also
the words stage; each text is new, so the cache misses, and once
more for the row "cached". CPU times of the process, so that other load shows less. Beside each: the
share of the budget (p99 of 3 ms at about 500 tokens, 8 ms at about 2,000), and the ratio to hashing
the same text with SHA-256 a hundred times in the same run. Then hostile texts of growing length:
the worst milliseconds per KB, and how much a text eight times as long costs (8 = linear).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from statistics import median, quantiles
from time import process_time

from prometheus_client import Gauge

from headrace_common.clock import SystemClock
from headrace_guard.classifiers.artefact import ArtefactError, load_packaged
from headrace_guard.classifiers.blocklist import BlocklistCache
from headrace_guard.classifiers.cascade import CascadeModels
from headrace_guard.classifiers.embedding import Embedder
from headrace_guard.classifiers.text_model import TextModels, Trust
from headrace_guard.cpu_pool import CpuPool
from headrace_guard.deadline import Deadline
from headrace_guard.input_check import Part, check_part
from headrace_guard.input_judge import InputJudge, Question
from headrace_guard.plan import Plan, Planner
from headrace_guard.policy import Direction, load_policies, parse_policies
from headrace_guard.verdict_cache import VerdictCache

_SENTENCES = (
    "Each row of the table names a river, its length in km (1,234.5) and the sea it meets. ",
    "Could you write to the office and ask when the next delivery of paper will arrive? ",
    "    total += rates['EUR'] * 1.25  # see the note of 3 May\n",
)
_TOKENS = ((500, 2_000, 3.0), (2_000, 8_000, 8.0))
_HOSTILE: dict[str, Callable[[int], str]] = {
    "digits": lambda n: "4" * n,
    "digit soup": lambda n: ("4 1-2 3 " * n)[:n],
    "local parts": lambda n: ("a.b-c_" * n)[:n],
    "keys begun": lambda n: ("-----BEGIN PRIVATE KEY" * n)[:n],
    "tokens begun": lambda n: ("eyJaaaaaaaaaa." * n)[:n],
    "assignments": lambda n: ('password = "' * n)[:n],
    "streets": lambda n: ("12 Mill Lane, York " * n)[:n],
    "percent": lambda n: ("%41" * n)[:n],
    "base64": lambda n: ("QUJD" * n)[:n],
    "base64 in fours": lambda n: ("QUFB " * n)[:n],
    "base64 begun": lambda n: ("aB1c MTEx " * n)[:n],
    "base64 reversed": lambda n: ("=DUQ" * n)[:n],
    "escapes": lambda n: ("\\u0061" * n)[:n],
    "escaped words": lambda n: ("\\u0061b " * n)[:n],
    "escaped addresses": lambda n: ("\\ta@b.co" * n)[:n],
    "backslashes": lambda n: "\\" * n,
    "markup": lambda n: ("can**a**ry " * n)[:n],
    "tags": lambda n: ("can<b>ary " * n)[:n],
    "lone letters": lambda n: ("a " * n)[:n],
    "leet": lambda n: ("c4n4 " * n)[:n],
    "invisible": lambda n: ("ca\u200bna\u200bry " * n)[:n],
    "accents": lambda n: "a" + "\u0301" * (n - 1),
    "lookalikes": lambda n: ("\u0441\u0430n\u0430 " * n)[:n],
}
_LENGTHS = (4_000, 32_000)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--embedding", type=Path, help="folder of the embedding model")
    given = parser.parse_args()
    repeats = given.repeats
    pool = CpuPool(2, 32, Gauge("waiting", "Unused.", registry=None))
    models = _models(pool, given.embedding)
    plan = _plan(asks_models=models is not None)
    _say(f"cheap stages: {models.version if models else 'not packaged'}")
    asyncio.run(
        _checks(plan, InputJudge(pool, models, VerdictCache(10_000), 10**7, _ignore), repeats)
    )
    _hostile(plan)
    pool.close()


def _models(pool: CpuPool, folder: Path | None) -> TextModels | None:
    embedder = None if folder is None else Embedder(folder)
    try:
        artefact = load_packaged()
        # Nothing is in doubt: the embedding stage is not timed here.
        heads = {name: replace(one, band_from=inf) for name, one in artefact.heads.items()}
        return CascadeModels(replace(artefact, heads=heads), embedder, pool, pool)
    except ArtefactError:
        return None


def _plan(*, asks_models: bool) -> Plan:
    categories = 'injection = "flag"\ntoxicity = "flag"\n"harm.*" = "flag"\n' if asks_models else ""
    policies = parse_policies(
        'version = "bench"\n[policies.default]\nfails_open = false\nblocklist = []\n'
        "owner_exempt = []\n[policies.default.input]\n"
        f'blocklist = "block"\n"pii.*" = "flag"\n"secret.*" = "flag"\n{categories}'
        "[policies.default.output]\n"
    )
    planner = Planner({**load_policies(None), **policies}, BlocklistCache(8, 2000, 40_000))
    plan = planner.plan("default", Direction.INPUT)
    if plan is None:
        raise LookupError("default")
    return planner.with_terms(plan, tuple(f"forbidden{idx} word" for idx in range(1000)))


async def _checks(plan: Plan, judge: InputJudge, repeats: int) -> None:
    async def check(text: str) -> None:
        question = Question(plan, "t", [Part(text, Trust.USER)])
        await judge.judge(question, Deadline(SystemClock(), 60.0))

    _row("input", "p50 ms", "p99 ms", "of budget", "x reference")
    serial = count()
    for tokens, num_chars, budget_ms in _TOKENS:
        same = _text(num_chars, next(serial))
        reference_s = median(_timed(partial(_reference, same.encode())) for _ in range(20))
        await check(same)
        for name, is_new in (("new", True), ("cached", False)):
            texts = [_text(num_chars, next(serial)) if is_new else same for _ in range(repeats)]
            times = [await _timed_async(check, text) for text in texts]
            p50_s, p99_s = median(times), quantiles(times, n=100)[98]
            _row(
                f"{tokens} tokens, {name}",
                f"{p50_s * 1e3:.3f}",
                f"{p99_s * 1e3:.3f}",
                f"{p99_s * 1e3 / budget_ms:.2f}",
                f"{p50_s / reference_s:.1f}",
            )


def _reference(data: bytes) -> None:
    for _ in range(100):
        hashlib.sha256(data)


def _hostile(plan: Plan) -> None:
    _row("hostile text", "ms per KB", "x for 8 x", "", "")
    for name, make in _HOSTILE.items():
        times = []
        for length in _LENGTHS:
            part = Part(make(length), Trust.USER)
            times.append(
                min(_timed(lambda p=part: check_part(plan, p, _no_deadline())) for _ in range(3))
            )
        kilobytes = len(make(_LENGTHS[1]).encode()) / 1000
        _row(name, f"{times[1] * 1e3 / kilobytes:.3f}", f"{times[1] / times[0]:.1f}", "", "")


def _text(num_chars: int, number: int) -> str:
    lines = [_SENTENCES[idx % len(_SENTENCES)] for idx in range(num_chars // 60 + 1)]
    return (f"Letter {number}. " + "".join(lines))[:num_chars]


def _timed(work: Callable[[], object]) -> float:
    started_s = process_time()
    work()
    return process_time() - started_s


async def _timed_async(work: Callable[[str], Awaitable[None]], text: str) -> float:
    started_s = process_time()
    await work(text)
    return process_time() - started_s


def _no_deadline() -> Deadline:
    return Deadline(SystemClock(), 600.0)


def _ignore(_num_hits: int, _num_misses: int) -> None:
    return


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _row(*cells: str) -> None:
    _say(f"| {cells[0]:24} | " + " | ".join(f"{cell:>11}" for cell in cells[1:]) + " |")


if __name__ == "__main__":
    main()
