"""Traces of requests."""

import json
from pathlib import Path

import pytest
import zstandard

from headrace_router.simulate.trace import TraceError, read_trace

ROWS = [
    {"timestamp": 6000, "input_length": 1025, "output_length": 0, "hash_ids": [1, 2, 9]},
    {"timestamp": 4000, "input_length": 512, "output_length": 7, "hash_ids": [1]},
]


def write(path: Path, rows: list[dict]) -> Path:
    text = "\n".join(json.dumps(row) for row in rows) + "\n"
    data = text.encode()
    path.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.zst"])
def test_reads_in_order_from_time_zero(tmp_path: Path, name: str) -> None:
    """Half a trace starts at its own beginning; load makes it faster; partial blocks are none."""
    first, second = read_trace(write(tmp_path / name, ROWS), load=2.0)
    assert (first.at_s, first.chain, first.output_tokens) == (0.0, (1,), 7)
    assert (second.at_s, second.chain, second.prompt_tokens) == (1.0, (1, 2), 1025)
    assert second.output_tokens == 1


def test_only_the_first_requests_on_demand(tmp_path: Path) -> None:
    """For a quick look."""
    assert len(read_trace(write(tmp_path / "t.jsonl", ROWS), max_requests=1)) == 1


@pytest.mark.parametrize("name", ["trace.first_half.csv", "trace.csv.zst"])
def test_a_table_without_hashes_is_read_as_new_prompts(tmp_path: Path, name: str) -> None:
    """Fractions of seconds have seven digits there; nobody shares a block."""
    path, head = tmp_path / name, "TIMESTAMP,ContextTokens,GeneratedTokens"
    rows = ["2023-11-16 18:17:05.5000000,1030,8", "2023-11-16 18:17:04.0000000,512,0"]
    data = "\n".join([head, *rows]).encode()
    path.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)
    first, second = read_trace(path)
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 512, 1)
    assert (second.at_s, len(first.chain), len(second.chain)) == (1.5, 1, 2)
    assert not set(first.chain) & set(second.chain)


def test_a_table_of_other_columns_is_named(tmp_path: Path) -> None:
    """With its line."""
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,Tokens\n2023-11-16 18:17:05,7\n")
    with pytest.raises(TraceError, match=r"t\.csv, line 2"):
        read_trace(path)


@pytest.mark.parametrize("text", ["{", '{"timestamp": 1}', "[]", ""], ids=range(4))
def test_what_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    """With its line."""
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"t\.jsonl"):
        read_trace(path)
