"""Kafka producers and consumers with their timeouts set, and the topics' names.

Correctness never depends on Kafka transactions or idempotent producers: consumers deduplicate by
primary key (docs/adr/0004-ledger-dedupe.md).
"""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import NoError, TopicAlreadyExistsError, for_code

USAGE_TOPIC = "usage.v1"
WORKER_USAGE_TOPIC = "usage.worker.v1"
GUARD_AUDIT_TOPIC = "guard.audit.v1"
NUM_PARTITIONS = 12
_MAX_BATCH_BYTES = 128 * 1024


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


async def ensure_topics(
    bootstrap_servers: str, topics: list[str], partitions: int = NUM_PARTITIONS
) -> None:
    """Create the topics that do not exist yet, with one replica of each partition.

    Raises:
        KafkaError: no broker answered, or it refused a topic.
    """
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers, request_timeout_ms=5000)
    await admin.start()
    try:
        existing = set(await admin.list_topics())
        missing = [
            NewTopic(t, partitions, replication_factor=1) for t in topics if t not in existing
        ]
        if missing:
            # The client does not look at what became of each topic.
            answer = await admin.create_topics(missing)
            for topic, code, *message in answer.topic_errors:
                if (error := for_code(code)) not in (NoError, TopicAlreadyExistsError):
                    raise error(f"{topic}: {next(filter(None, message), 'refused')}")
    finally:
        await admin.close()
