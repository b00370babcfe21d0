"""The table of a run, and the ratios that the goals are about."""

from __future__ import annotations

from typing import Any, TextIO

Figures = dict[str, Any]  # Any: numbers, by measurement
_OURS = ("ours", "ours-keys-only")
_PEERS = ("litellm", "portkey", "smg")


def print_report(results: dict[str, Figures], out: TextIO) -> None:
    """Print everything as Markdown."""
    _table(
        out,
        (
            "gateway", "requests/s c1 / c16 / c64", "CPU us/request", "added ms c16 p50 / p99",
            "CPU us/event burst", "CPU us/event paced", "paced events/s", "added TTFT ms p50",
            "gap ms p99 (direct)", "left of 8 mid / before", "RSS MB start / end", "errors",
        ),
        [_row(name, one) for name, one in results.items()],
    )  # fmt: skip
    ratios = [
        (ours, peer, *_ratio_row(results[ours], results[peer]))
        for ours in _OURS
        for peer in _PEERS
        if _is_measured(results, ours) and _is_measured(results, peer)
    ]
    if ratios:
        print(file=out)
        _table(
            out, ("ours", "peer", "requests/s c16", "c64", "CPU/request", "CPU/paced event"), ratios
        )


def _row(name: str, one: Figures) -> tuple[str, ...]:
    if "failed" in one:
        return (name, one["failed"], *[""] * 10)
    steps = [one[key] for key in ("whole1", "whole16", "whole64", "burst16", "paced1", "paced64")]
    added = [
        (one["whole16"]["lat_us"][p] - one["whole16_direct"]["lat_us"][p]) / 1e3
        for p in ("p50", "p99")
    ]
    ttft_ms = (one["paced64"]["ttft_us"]["p50"] - one["paced64_direct"]["ttft_us"]["p50"]) / 1e3
    ttft1_ms = (one["paced1"]["ttft_us"]["p50"] - one["paced1_direct"]["ttft_us"]["p50"]) / 1e3
    gaps = [one[key]["gap_us"]["p99"] / 1e3 for key in ("paced64", "paced64_direct")]
    errors = sum(step["bad_status"] + step["io_err"] for step in steps)
    return (
        name,
        " / ".join(f"{one[key]['rps']:.0f}" for key in ("whole1", "whole16", "whole64")),
        f"{_per(one['whole16'], 'ok'):.0f}",
        f"{added[0]:.2f} / {added[1]:.2f}",
        f"{_per(one['burst16'], 'events'):.1f}",
        f"{_per(one['paced64'], 'events'):.1f}",
        f"{one['paced64']['events_per_s']:.0f}",
        f"{ttft1_ms:.2f} c1, {ttft_ms:.2f} c64",
        f"{gaps[0]:.1f} ({gaps[1]:.1f})",
        f"{one['gone_mid']} / {one['gone_before']}",
        f"{one['rss_mb_start']:.0f} / {one['rss_mb']:.0f}",
        str(errors),
    )


def _per(step: Figures, unit: str) -> float:
    """CPU microseconds per unit."""
    per: float = step["cpu_s"] / max(1, step[unit]) * 1e6
    return per


def _ratio_row(ours: Figures, peer: Figures) -> list[str]:
    def rate(key: str) -> str:
        return f"{ours[key]['rps'] / peer[key]['rps']:.2f}x" if peer[key]["ok"] else "-"

    def cpu(key: str, unit: str) -> str:
        if not peer[key]["ok"]:
            return "-"
        return f"{_per(ours[key], unit) / _per(peer[key], unit):.3f}x"

    return [rate("whole16"), rate("whole64"), cpu("whole16", "ok"), cpu("paced64", "events")]


def _is_measured(results: dict[str, Figures], name: str) -> bool:
    return name in results and "failed" not in results[name]


def _table(out: TextIO, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print("| " + " | ".join(head) + " |", file=out)
    print("|" + "---|" * len(head), file=out)
    for row in rows:
        print("| " + " | ".join(row) + " |", file=out, flush=True)
