"""Reads request traces: JSON lines with block hashes, or CSV without; plain or as `.zst`.

JSON lines: one per request, `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids`, one per block of the prompt, chained, so that equal ids mean equal prefixes (the format
of Mooncake's public traces). The last id may stand for a partial block, which no cache shares.

CSV: `TIMESTAMP` (date and time), `ContextTokens`, `GeneratedTokens` (Azure's public traces). They
do not tell what prompts share, so every prompt is taken for a new one.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

TRACE_BLOCK_TOKENS: Final = 512


class TraceError(Exception):
    """The file is no such trace."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    request_id: str
    # Since the first request of the trace. Seconds.
    at_s: float
    prompt_tokens: int
    output_tokens: int
    # Hashes of the full blocks of the prompt.
    chain: tuple[int, ...]


# Milliseconds, prompt tokens, output tokens, hashes of the prompt's full blocks.
_Row: TypeAlias = tuple[float, int, int, tuple[int, ...]]


def read_trace(
    path: Path, load: float = 1.0, max_requests: int | None = None
) -> list[TraceRequest]:
    """Read a trace in order of arrival.

    Args:
        path: `.jsonl` or `.csv`, or one of them with `.zst`.
        load: requests come this many times faster than recorded.
        max_requests: read no more than so many; None = all.

    Raises:
        TraceError: a line says something else.
        OSError: the file cannot be read.
    """
    is_table = ".csv" in path.suffixes
    rows: list[_Row] = []
    for row in _read_table(path) if is_table else _read_lines(path):
        if max_requests is not None and len(rows) >= max_requests:
            break
        rows.append(row)
    if not rows:
        raise TraceError(f"{path} holds no requests")
    rows.sort(key=lambda row: row[0])
    start_ms = rows[0][0]
    return [
        TraceRequest(f"r{idx}", (at_ms - start_ms) / 1000 / load, prompt, output, chain)
        for idx, (at_ms, prompt, output, chain) in enumerate(rows)
    ]


def _lines(path: Path) -> list[str]:
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = _decompress(path, data)
    try:
        return data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: {error}") from error


def _decompress(path: Path, data: bytes) -> bytes:
    try:
        zstandard = import_module("zstandard")
    except ImportError as error:
        raise TraceError(f"{path}: install headrace[simulate] to read .zst files") from error
    try:
        plain: bytes = zstandard.ZstdDecompressor().stream_reader(data).read()
    except zstandard.ZstdError as error:
        raise TraceError(f"{path}: {error}") from error
    return plain


def _read_lines(path: Path) -> Iterator[_Row]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield _parse(path, number, line)


def _read_table(path: Path) -> Iterator[_Row]:
    num_blocks = 0
    for number, row in enumerate(csv.DictReader(_lines(path)), 2):
        try:
            at_ms = _utc(datetime.fromisoformat(row["TIMESTAMP"])).timestamp() * 1000
            prompt = max(int(row["ContextTokens"]), 1)
            output = max(int(row["GeneratedTokens"]), 1)
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}, line {number}: {error!r}") from error
        first, num_blocks = num_blocks, num_blocks + prompt // TRACE_BLOCK_TOKENS
        yield at_ms, prompt, output, tuple(range(first, num_blocks))


def _utc(when: datetime) -> datetime:
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when


def _parse(path: Path, number: int, line: str) -> _Row:
    try:
        row: dict[str, Any] = json.loads(line)  # Any: JSON
        prompt = max(int(row["input_length"]), 1)
        num_full = prompt // TRACE_BLOCK_TOKENS
        chain = tuple(int(one) for one in row["hash_ids"][:num_full])
        return float(row["timestamp"]), prompt, max(int(row["output_length"]), 1), chain
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}, line {number}: {error!r}") from error
