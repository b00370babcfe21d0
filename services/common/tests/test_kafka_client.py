"""Tests of making topics, with a stand-in for a broker that refuses."""

from __future__ import annotations

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import (
    BrokerResponseError,
    InvalidReplicationFactorError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
)
from aiokafka.protocol.admin import CreateTopicsResponse_v3

from headrace_common.kafka_client import ensure_topics


@pytest.fixture
def made() -> list[NewTopic]:
    """What was asked for."""
    return []


@pytest.fixture
def brokers() -> list[int]:
    """Which there are."""
    return [1]


@pytest.fixture
def answer(
    monkeypatch: pytest.MonkeyPatch, made: list[NewTopic], brokers: list[int]
) -> dict[str, type[BrokerResponseError]]:
    """Why the broker refuses each topic; the others it makes."""
    refusals: dict[str, type[BrokerResponseError]] = {}

    async def nothing(self: AIOKafkaAdminClient) -> None: ...

    async def list_topics(self: AIOKafkaAdminClient) -> list[str]:
        return []

    async def create_topics(
        self: AIOKafkaAdminClient, new_topics: list[NewTopic]
    ) -> CreateTopicsResponse_v3:
        made.extend(new_topics)
        codes = [refusals[t.name].errno if t.name in refusals else 0 for t in new_topics]
        rows = [(t.name, code, "because") for t, code in zip(new_topics, codes, strict=True)]
        return CreateTopicsResponse_v3(throttle_time_ms=0, topic_errors=rows)

    async def describe_cluster(self: AIOKafkaAdminClient) -> dict[str, list[int]]:
        return {"brokers": brokers}

    monkeypatch.setattr(AIOKafkaAdminClient, "start", nothing)
    monkeypatch.setattr(AIOKafkaAdminClient, "describe_cluster", describe_cluster)
    monkeypatch.setattr(AIOKafkaAdminClient, "close", nothing)
    monkeypatch.setattr(AIOKafkaAdminClient, "list_topics", list_topics)
    monkeypatch.setattr(AIOKafkaAdminClient, "create_topics", create_topics)
    return refusals


async def test_a_topic_that_another_made_first_is_there(
    answer: dict[str, type[BrokerResponseError]],
) -> None:
    answer["a.v1"] = TopicAlreadyExistsError
    await ensure_topics("127.0.0.1:1", ["a.v1", "b.v1"])


@pytest.mark.parametrize("why", [TopicAuthorizationFailedError, InvalidReplicationFactorError])
async def test_a_refused_topic_is_a_failure_that_names_it(
    answer: dict[str, type[BrokerResponseError]], why: type[BrokerResponseError]
) -> None:
    answer["a.v1"] = TopicAlreadyExistsError
    answer["b.v1"] = why
    with pytest.raises(why, match=r"b\.v1: because"):
        await ensure_topics("127.0.0.1:1", ["a.v1", "b.v1"])


@pytest.mark.usefixtures("answer")
@pytest.mark.parametrize(
    ("num_brokers", "asked", "expected"), [(0, 0, 1), (1, 0, 1), (2, 0, 2), (5, 0, 3), (5, 1, 1)]
)
async def test_a_topic_has_three_replicas_where_it_can(
    made: list[NewTopic], brokers: list[int], num_brokers: int, asked: int, expected: int
) -> None:
    """Unless an operator says otherwise: one broker that dies must not take usage along."""
    brokers[:] = range(num_brokers)
    await ensure_topics("127.0.0.1:1", ["a.v1"], asked)
    assert [topic.replication_factor for topic in made] == [expected]
