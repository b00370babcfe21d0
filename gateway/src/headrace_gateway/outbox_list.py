"""Lists the events in outboxes, for whoever compares them with the ledger.

``python -m headrace_gateway.outbox_list FOLDER`` prints one JSON object a line: request_id, kind.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError

from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_gateway.segments import list_segments, read_segment


def events_in(folder: Path) -> Iterator[UsageEvent]:
    """Yield the events of every outbox in and below *folder*, as far as they were written whole."""
    for place in sorted({path.parent for path in folder.rglob("*.seg")}):
        for segment in list_segments(place):
            try:
                for payload in read_segment(place, segment):
                    yield UsageEvent.FromString(payload)
            except FileNotFoundError:
                # Booked and removed meanwhile.
                continue
            except DecodeError as error:
                raise ValueError(f"{place}: segment {segment} holds no usage event") from error


def main() -> None:
    """Print what is in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not folder.is_dir():
        sys.stderr.write(f"there is no folder {folder}\n")
        raise SystemExit(2)
    for event in events_in(folder):
        sys.stdout.write(json.dumps({"request_id": event.request_id, "kind": event.kind}) + "\n")


if __name__ == "__main__":
    main()
