"""A consumer to be killed, of one name in all its lives.

``python consume.py URL BROKER USAGE_TOPIC WORKER_TOPIC``
"""

import asyncio
import sys

from prometheus_client import CollectorRegistry

from headrace_billing.consumer import UsageConsumer
from headrace_billing.metrics import BillingMetrics
from headrace_billing.store import Database
from headrace_common.clock import SystemClock
from headrace_common.lifecycle import supervise


async def main(url: str, bootstrap: str, usage_topic: str, worker_topic: str) -> None:
    """Consume for ever."""
    consumer = UsageConsumer(
        bootstrap,
        Database(url),
        SystemClock(),
        BillingMetrics(CollectorRegistry()),
        consumer_id="killed",
        topics=(worker_topic, usage_topic),
    )
    await supervise("consumer", consumer.run)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
