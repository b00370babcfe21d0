"""What an answer says about limits: OpenAI's headers, and the IETF's.

``x-ratelimit-{limit,remaining,reset}-{requests,tokens}`` tell of each kind the limit that is
nearest to its end. ``RateLimit-Policy`` and ``RateLimit`` (draft-ietf-httpapi-ratelimit-headers-10)
list all of them, each under a name of its own: quota ``q``, its unit ``qu`` and window ``w`` in
seconds; what remains ``r``, and the seconds ``t`` until it is whole again. Money is not told.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.limit_states import Limit, Standing

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

# The headers of each kind: its limit, what remains of it, and when it is whole again.
_NAMES = {
    suffix: (
        f"x-ratelimit-limit-{suffix}".encode(),
        f"x-ratelimit-remaining-{suffix}".encode(),
        f"x-ratelimit-reset-{suffix}".encode(),
    )
    for suffix, _ in _KINDS
}
# Names as the headers give them, by level and dimension.
_NAMED = {
    (level, dimension): f"{name}-{form.name}"
    for level, name in _LEVELS.items()
    for dimension, form in _FORMS.items()
}


class _Told(NamedTuple):
    """What the headers of some limits have in common."""

    policies: bytes
    # Where each limit that is told stands among all, and its name in the header.
    names: list[tuple[int, str]]
    # Of each kind that is told its headers' names, and where its limits stand.
    kinds: list[tuple[tuple[bytes, bytes, bytes], list[int]]]


def limit_headers(standing: Standing) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell of these limits; none if there are no limits."""
    limits, remaining, reset_us = standing
    told = _told(limits)
    if not told.names:
        return []
    headers: list[tuple[bytes, bytes]] = []
    for (of_limit, of_remaining, of_reset), places in told.kinds:
        nearest = min(places, key=remaining.__getitem__)
        headers += [
            (of_limit, b"%d" % limits[nearest][2]),
            (of_remaining, b"%d" % remaining[nearest]),
            (of_reset, duration_text(reset_us[nearest]).encode()),
        ]
    standings = []
    for idx, name in told.names:
        left = remaining[idx]
        text = f"{name};r={left if left < _MAX_INTEGER else _MAX_INTEGER}"
        standings.append(f"{text};t={-(-it // 1_000_000)}" if (it := reset_us[idx]) > 0 else text)
    headers.append((b"ratelimit-policy", told.policies))
    headers.append((b"ratelimit", ", ".join(standings).encode()))
    return headers


def header_pairs(standing: Standing) -> list[tuple[str, str]]:
    """Return the same as texts, for what an error tells."""
    return [(name.decode(), value.decode()) for name, value in limit_headers(standing)]


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
def _told(limits: tuple[Limit, ...]) -> _Told:
    told = [(idx, limit) for idx, limit in enumerate(limits) if limit[1] in _FORMS]
    kinds = []
    for suffix, dimensions in _KINDS:
        if places := [idx for idx, limit in told if limit[1] in dimensions]:
            kinds.append((_NAMES[suffix], places))
    policies = ", ".join(_policy(limit) for _, limit in told)
    return _Told(policies.encode(), [(idx, f'"{_name(limit)}"') for idx, limit in told], kinds)


def _policy(limit: Limit) -> str:
    form = _FORMS[limit[1]]
    window = f";w={form.window_s}" if form.window_s else ""
    return f'"{_name(limit)}";q={min(limit[2], _MAX_INTEGER)};qu="{form.unit}"{window}'


def _name(limit: Limit) -> str:
    level, dimension, _ = limit
    return _NAMED.get((level, dimension)) or f"key-{_FORMS[dimension].name}"
