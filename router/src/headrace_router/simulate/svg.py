"""Pure: the requests with a first token over time, one curve per policy, as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 34, 44
# Told apart by people who see few colours too (Okabe and Ito, 2008).
_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999",
)  # fmt: skip
_MAX_POINTS = 200


def picture(ttfts: Mapping[str, Sequence[float]], title: str) -> str:
    """Draw the share of requests that had their first token, by seconds on a logarithmic scale.

    Args:
        ttfts: seconds to the first token by policy; infinite = never.
        title: what was run.
    """
    seen = [one for values in ttfts.values() for one in values if math.isfinite(one)]
    low = max(min(seen, default=0.1), 0.01)
    high = max(max(seen, default=1.0), 2 * low)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20">{escape(title)}</text>',
        *_grid(low, high),
    ]
    for idx, (policy, values) in enumerate(ttfts.items()):
        colour = _COLOURS[idx % len(_COLOURS)]
        points = " ".join(f"{_x(s, low, high):.1f},{_y(share):.1f}" for s, share in _steps(values))
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>'
        )
        y = _TOP + 14 + 20 * idx
        x = _WIDTH - _RIGHT + 14
        parts.append(f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{escape(policy)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _steps(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return (seconds, share of requests up to there), at most so many."""
    ordered = sorted(values)
    stride = max(1, len(ordered) // _MAX_POINTS)
    found = [(s, (idx + 1) / len(ordered)) for idx, s in enumerate(ordered) if math.isfinite(s)]
    return found[::stride] + found[-1:]


def _grid(low: float, high: float) -> list[str]:
    bottom, right = _y(0.0), _WIDTH - _RIGHT
    lines = [f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#444444"/>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        lines.append(f'<path d="M{_LEFT} {y}H{right}" stroke="#dddddd"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        x = _x(10.0**power, low, high)
        lines.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#dddddd"/>')
        label = f"{10.0**power:g} s"
        lines.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    caption = "time to first token; share of requests"
    lines.append(f'<text x="{_LEFT}" y="{_HEIGHT - 8}">{caption}</text>')
    return lines


def _x(seconds: float, low: float, high: float) -> float:
    share = math.log(max(seconds, low) / low) / math.log(high / low)
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)
