"""What billing answered as an operator reads it: JSON for scripts, else a table."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from google.protobuf.message import Message

from headrace_common.proto_json import to_json
from headrace_launcher.exit_codes import EXIT_OK
from headrace_launcher.text import table_text


def show(
    args: Namespace,
    answer: Message,
    rows: Iterable[Message] | None = None,
    columns: Sequence[str] = (),
) -> int:
    """Print an answer: its rows as a table, if it has any and nobody asked for JSON."""
    if args.json or rows is None:
        print(json.dumps(to_json(answer), indent=2))
        return EXIT_OK
    found = [to_json(row) for row in rows]
    print(table_text(columns, ([row.get(name, "") for name in columns] for row in found)))
    return EXIT_OK


def moment_text(unix_s: int) -> str:
    """Write a moment as the options take it, UTC."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
