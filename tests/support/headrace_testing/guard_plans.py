"""What several tests make: policies, plans, deadlines, judges, and runs of an output check."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from prometheus_client import Gauge

from headrace_common.clock import SystemClock
from headrace_guard.classifiers.blocklist import BlocklistCache
from headrace_guard.classifiers.text_model import TextModels
from headrace_guard.cpu_pool import CpuPool
from headrace_guard.deadline import Deadline
from headrace_guard.input_judge import InputJudge
from headrace_guard.output_check import OutputCheck
from headrace_guard.plan import Plan, Planner
from headrace_guard.policy import Direction, parse_policies
from headrace_guard.verdict import Finding, Reason
from headrace_guard.verdict_cache import VerdictCache

MAX_HELD_CHARS = 2048


def plan(
    *,
    output: str = "",
    input_: str = "",
    terms: tuple[str, ...] = (),
    own_terms: tuple[str, ...] = (),
    fails_open: bool = False,
    owner_exempt: tuple[str, ...] = (),
    direction: Direction = Direction.OUTPUT,
    asks_models: bool = False,
) -> Plan:
    """A plan from TOML lines for the actions and a key's terms, without trained classifiers."""
    policies = parse_policies(
        f"""
version = "test"
[policies.default]
fails_open = {str(fails_open).lower()}
blocklist = {list(own_terms)!r}
owner_exempt = {list(owner_exempt)!r}
[policies.default.input]
{input_}
[policies.default.output]
{output}
"""
    )
    planner = Planner(policies, BlocklistCache(8, 100, 10_000))
    made = planner.plan("default", direction)
    assert made is not None
    return planner.with_terms(made if asks_models else replace(made, asked=None), terms)


def fullwidth(text: str) -> str:
    """The same ASCII letters in their wide form."""
    return "".join(chr(ord(char) + 0xFEE0) for char in text)


def no_deadline() -> Deadline:
    """A deadline far away."""
    return Deadline(SystemClock(), 3600.0)


@dataclass
class Run:
    """Everything that came out of one choice."""

    released: str = ""
    findings: list[Finding] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    is_over: bool = False
    max_held_chars: int = 0
    # Original text whose fate was decided, and what had been read by then, after each piece.
    progress: list[tuple[int, int]] = field(default_factory=list)


@contextmanager
def input_judge(
    *, max_chars: int = 100_000, models: TextModels | None = None, cached: int = 0
) -> Iterator[InputJudge]:
    """A judge of whole requests with one thread."""
    pool = CpuPool(1, 1, Gauge("waiting", "Unused.", registry=None))
    yield InputJudge(pool, models, VerdictCache(cached), max_chars, lambda *_: None)
    pool.close()


def run(
    made: Plan,
    chunks: list[str],
    max_held_chars: int = MAX_HELD_CHARS,
    models: TextModels | None = None,
) -> Run:
    """Send *chunks* through one choice; the last one is marked so."""
    check, result = OutputCheck(made, 0, max_held_chars, models), Run()
    for idx, chunk in enumerate(chunks):
        piece = check.feed(chunk, idx == len(chunks) - 1, no_deadline())
        result.released += piece.text
        result.findings += piece.findings
        result.reasons += [piece.not_evaluated] if piece.not_evaluated else []
        result.is_over = check.is_over
        result.max_held_chars = max(result.max_held_chars, check.num_held_chars)
        result.progress.append((check.num_released_chars, check.num_scanned_chars))
    return result
