"""A process that writes events until it is killed; prints each one that is durable.

Run as: python outbox_writer.py FOLDER FIRST_NUMBER
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_gateway.outbox import Outbox
from headrace_gateway.outbox_metrics import OutboxMetrics


async def main(folder: Path, first: int) -> None:
    """Write from several tasks at once, so that groups have more than one event."""
    outbox = Outbox(folder, SystemClock(), OutboxMetrics(CollectorRegistry()), segment_bytes=20_000)
    await outbox.start()
    numbers = itertools.count(first)

    async def write() -> None:
        for number in numbers:
            event = UsageEvent(
                kind=UsageEvent.KIND_CLOSED,
                request_id=f"req_{number}",
                tenant_id="acme",
                model="m" * (number % 300),
            )
            await outbox.append_hurried(event)
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()

    await asyncio.gather(*(write() for _ in range(20)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
