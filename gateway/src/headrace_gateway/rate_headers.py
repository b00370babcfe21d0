"""What an answer says about limits: OpenAI's headers, and the IETF's.

``x-ratelimit-{limit,remaining,reset}-{requests,tokens}`` tell of each kind the limit that is
nearest to its end. ``RateLimit-Policy`` and ``RateLimit`` (draft-ietf-httpapi-ratelimit-headers-10)
list all of them, each under a name of its own: quota ``q``, its unit ``qu`` and window ``w`` in
seconds; what remains ``r``, and the seconds ``t`` until it is whole again. Money is not told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.limit_states import LimitState

_MINUTE_S, _DAY_S = 60, 86_400
# The largest integer of a structured field (RFC 9651, 3.3.1).
_MAX_INTEGER = 999_999_999_999_999


@dataclass(frozen=True)
class _Form:
    name: str
    unit: str
    # 0 = without a window.
    window_s: int


_FORMS = {
    pb.DIMENSION_REQUESTS_PER_MINUTE: _Form("requests-per-minute", "requests", _MINUTE_S),
    pb.DIMENSION_INPUT_TOKENS_PER_MINUTE: _Form("input-tokens-per-minute", "tokens", _MINUTE_S),
    pb.DIMENSION_OUTPUT_TOKENS_PER_MINUTE: _Form("output-tokens-per-minute", "tokens", _MINUTE_S),
    pb.DIMENSION_TOKENS_PER_MINUTE: _Form("tokens-per-minute", "tokens", _MINUTE_S),
    pb.DIMENSION_REQUESTS_PER_DAY: _Form("requests-per-day", "requests", _DAY_S),
    pb.DIMENSION_CONCURRENCY: _Form("concurrent-requests", "concurrent-requests", 0),
}
_LEVELS = {
    pb.LEVEL_KEY: "key",
    pb.LEVEL_PROJECT: "project",
    pb.LEVEL_TENANT: "organization",
    pb.LEVEL_MODEL: "model",
}
_KINDS = (
    ("requests", (pb.DIMENSION_REQUESTS_PER_MINUTE, pb.DIMENSION_REQUESTS_PER_DAY)),
    (
        "tokens",
        (
            pb.DIMENSION_TOKENS_PER_MINUTE,
            pb.DIMENSION_INPUT_TOKENS_PER_MINUTE,
            pb.DIMENSION_OUTPUT_TOKENS_PER_MINUTE,
        ),
    ),
)

_SUFFIXES = {dimension: suffix for suffix, dimensions in _KINDS for dimension in dimensions}
# The headers of each kind: its limit, what remains of it, and when it is whole again.
_NAMES = {
    suffix: [f"x-ratelimit-{what}-{suffix}".encode() for what in ("limit", "remaining", "reset")]
    for suffix, _ in _KINDS
}
# Names as the headers give them, by level and dimension.
_NAMED = {
    (level, dimension): f"{name}-{form.name}"
    for level, name in _LEVELS.items()
    for dimension, form in _FORMS.items()
}


def limit_headers(states: Iterable[LimitState]) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell of these limits; none if there are no limits."""
    nearest: dict[str, LimitState] = {}
    policies, standings = [], []
    for state in states:
        level, dimension, limit, remaining, reset_us = state
        if dimension not in _FORMS:
            continue
        policies.append(_policy(level, dimension, limit))
        left = remaining if remaining < _MAX_INTEGER else _MAX_INTEGER
        reset = f";t={-(-reset_us // 1_000_000)}" if reset_us > 0 else ""
        standings.append(f'"{_name(level, dimension)}";r={left}{reset}')
        suffix = _SUFFIXES.get(dimension)
        if suffix is not None:
            known = nearest.get(suffix)
            if known is None or remaining < known.remaining:
                nearest[suffix] = state
    if not policies:
        return []
    headers: list[tuple[bytes, bytes]] = []
    for suffix, (of_limit, of_remaining, of_reset) in _NAMES.items():
        if suffix in nearest:
            _, _, limit, remaining, reset_us = nearest[suffix]
            headers += [
                (of_limit, b"%d" % limit),
                (of_remaining, b"%d" % remaining),
                (of_reset, duration_text(reset_us).encode()),
            ]
    headers.append((b"ratelimit-policy", ", ".join(policies).encode()))
    headers.append((b"ratelimit", ", ".join(standings).encode()))
    return headers


def header_pairs(states: Iterable[LimitState]) -> list[tuple[str, str]]:
    """Return the same as texts, for what an error tells."""
    return [(name.decode(), value.decode()) for name, value in limit_headers(states)]


def is_limit_header(name: str) -> bool:
    """Whether a header is one of those."""
    return name.startswith("x-ratelimit-") or name in ("ratelimit", "ratelimit-policy")


def duration_text(duration_us: int) -> str:
    """Render a duration as OpenAI's headers do: 12ms, 1.5s, 6m0s. Rounded up to milliseconds."""
    milliseconds = -(-duration_us // 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds


# Limits are a key's own and change seldom.
@lru_cache(maxsize=4096)
def _policy(level: pb.Level.ValueType, dimension: pb.Dimension.ValueType, limit: int) -> str:
    form = _FORMS[dimension]
    window = f";w={form.window_s}" if form.window_s else ""
    name = _name(level, dimension)
    return f'"{name}";q={min(limit, _MAX_INTEGER)};qu="{form.unit}"{window}'


def _name(level: pb.Level.ValueType, dimension: pb.Dimension.ValueType) -> str:
    return _NAMED.get((level, dimension)) or f"key-{_FORMS[dimension].name}"
