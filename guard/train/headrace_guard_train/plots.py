"""Small SVG plots, written by hand: the report needs lines and bars, not a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_WIDTH, _HEIGHT, _LEFT, _TOP, _SIDE = 560, 420, 60, 30, 340
_COLOURS = ("#1b6ca8", "#c0392b", "#27864a", "#8e5ea2", "#b8860b", "#444444")
Line = tuple[str, Sequence[tuple[float, float]]]


def line_plot(path: Path, title: str, axes: tuple[str, str], lines: Sequence[Line]) -> None:
    """Write lines over the unit square."""
    parts = _frame(title, axes)
    for number, (name, points) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        path_text = " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path_text}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        at = _TOP + 18 * number + 12
        parts.append(
            f'<text x="{_LEFT + _SIDE + 12}" y="{at}" font-size="11" fill="{colour}">{name}</text>'
        )
    path.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def _frame(title: str, axes: tuple[str, str]) -> list[str]:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{title}</text>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" '
        'fill="none" stroke="#999"/>',
        f'<text x="{_LEFT + 110}" y="{_TOP + _SIDE + 38}" font-size="12">{axes[0]}</text>',
        f'<text x="14" y="{_TOP + 200}" font-size="12" transform="rotate(-90 14 {_TOP + 200})">'
        f"{axes[1]}</text>",
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<text x="{_x(tick) - 8:.0f}" y="{_TOP + _SIDE + 18}" font-size="10">{tick}</text>'
        )
        parts.append(f'<text x="{_LEFT - 30}" y="{_y(tick) + 4:.0f}" font-size="10">{tick}</text>')
    return parts


def _x(value: float) -> float:
    return _LEFT + _SIDE * min(max(value, 0.0), 1.0)


def _y(value: float) -> float:
    return _TOP + _SIDE * (1 - min(max(value, 0.0), 1.0))
