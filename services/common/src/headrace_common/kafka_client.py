"""Kafka producers and consumers with their timeouts set, and the topics' names.

Correctness never depends on Kafka transactions or idempotent producers: consumers deduplicate by
primary key (docs/adr/0004-ledger-dedupe.md).
"""

from __future__ import annotations

import asyncio
import logging

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import NoError, TopicAlreadyExistsError, for_code

_log = logging.getLogger(__name__)

USAGE_TOPIC = "usage.v1"
WORKER_USAGE_TOPIC = "usage.worker.v1"
GUARD_AUDIT_TOPIC = "guard.audit.v1"
NUM_PARTITIONS = 12
# Of each partition, where as many brokers are: one may be lost while another is being replaced.
_NUM_REPLICAS = 3
_MAX_BATCH_BYTES = 128 * 1024
_STOP_TIMEOUT_S = 10.0


def producer(bootstrap_servers: str, client_id: str) -> AIOKafkaProducer:
    """Return a producer, not started: acks from all replicas, lz4, 5 s to decide."""
    return AIOKafkaProducer(
        bootstrap_servers=bootstrap_servers,
        client_id=client_id,
        acks="all",
        compression_type="lz4",
        linger_ms=5,
        max_batch_size=_MAX_BATCH_BYTES,
        request_timeout_ms=5000,
        metadata_max_age_ms=30_000,
    )


def consumer(bootstrap_servers: str, client_id: str) -> AIOKafkaConsumer:
    """Return a consumer, not started, without a group: callers assign and keep offsets."""
    return AIOKafkaConsumer(
        bootstrap_servers=bootstrap_servers,
        client_id=client_id,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        request_timeout_ms=5000,
        metadata_max_age_ms=30_000,
    )


async def stop(client: AIOKafkaConsumer | AIOKafkaProducer) -> None:
    """Stop a client; one that cannot say good-bye to its broker is left behind."""
    # In a task of its own: with the broker gone, stop() may hang (aiokafka #1101) or let the
    # CancelledError of an inner task out, which would pass for ours.
    stopping = asyncio.create_task(client.stop())
    await asyncio.wait({stopping}, timeout=_STOP_TIMEOUT_S)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)


async def ensure_topics(bootstrap_servers: str, topics: list[str], num_replicas: int = 0) -> None:
    """Create the topics that do not exist yet; those that do stay as they are.

    Args:
        bootstrap_servers: host:port,... of brokers.
        topics: names.
        num_replicas: of each partition; 0 = three, or as many as there are brokers.

    Raises:
        KafkaError: no broker answered, or it refused a topic.
    """
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers, request_timeout_ms=5000)
    await admin.start()
    try:
        existing = set(await admin.list_topics())
        if missing := [topic for topic in topics if topic not in existing]:
            num_replicas = num_replicas or min(_NUM_REPLICAS, await _num_brokers(admin))
            _log.info("%s: made with %d replicas", ", ".join(missing), num_replicas)
            # The client does not look at what became of each topic.
            answer = await admin.create_topics(
                [NewTopic(topic, NUM_PARTITIONS, num_replicas) for topic in missing]
            )
            for topic, code, *message in answer.topic_errors:
                if (error := for_code(code)) not in (NoError, TopicAlreadyExistsError):
                    raise error(f"{topic}: {next(filter(None, message), 'refused')}")
    finally:
        await admin.close()


async def _num_brokers(admin: AIOKafkaAdminClient) -> int:
    return max(1, len((await admin.describe_cluster())["brokers"]))
