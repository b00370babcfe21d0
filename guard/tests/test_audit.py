"""The audit: a chain that shows changes, a journal that survives, a topic, and the comparison."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
from headrace_common.kafka_client import GUARD_AUDIT_TOPIC, NUM_PARTITIONS, consumer
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.audit_journal import AuditJournal
from headrace_guard.audit_log import AuditLog
from headrace_guard.metrics import AuditMetrics
from headrace_guard.reconcile import Leak, leak_in
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually


def record(request_id: str = "r", **fields: object) -> pb.AuditRecord:
    return pb.AuditRecord(request_id=request_id, kind=pb.AUDIT_KIND_INPUT, **fields)


def output(
    scanned: int, released: int, text: int, choice: int = 0, resumed: int = 0
) -> pb.AuditRecord:
    return pb.AuditRecord(
        resumed_chars=resumed,
        choice_idx=choice,
        kind=pb.AUDIT_KIND_OUTPUT,
        scanned_chars=scanned,
        released_chars=released,
        released_text_chars=text,
    )


def sent(chars: int, *choices: int, **flags: bool) -> pb.AuditRecord:
    return pb.AuditRecord(
        kind=pb.AUDIT_KIND_SENT,
        released_chars=chars,
        released_chars_by_choice=dict(enumerate(choices)),
        **flags,
    )


def test_the_chain_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Same chain, same key for spans, no gap; each record is found by its request."""
    path = tmp_path / "audit" / "a.sqlite3"
    first = AuditJournal(path, 100)
    first.append([record("a"), record("b")])
    first.close()
    second = AuditJournal(path, 100)
    second.append([record("a")])
    assert (second.chain_id, second.span_key) == (first.chain_id, first.span_key)
    assert [one.seq for one in second.find("a")] == [1, 3]
    assert second.find("c") == []
    assert second.verify() == (3, [])
    second.close()


def test_a_guard_and_its_successor_write_one_chain(tmp_path: Path) -> None:
    """In turns, without a gap; neither forgets what the other has published."""
    path = tmp_path / "a.sqlite3"
    first, second = AuditJournal(path, 1), AuditJournal(path, 1)
    for journal in (first, second, first):
        journal.append([record("a"), record("b")])
        assert journal.verify()[1] == []
    assert [one.seq for one in second.find("a")] == [1, 3, 5]
    second.mark_published(5)
    first.mark_published(2)
    assert first.published_seq() == 5
    first.close()
    assert second.verify() == (1, [])
    second.close()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("UPDATE records SET record = (SELECT record FROM records WHERE seq = 3) WHERE seq = 2",
         "record 3 stands where 2 is expected"),
        ("UPDATE records SET record = X'FF' WHERE seq = 2", "a record cannot be read"),
        ("DELETE FROM records WHERE seq = 2", "record 3 stands where 2 is expected"),
        ("DELETE FROM records WHERE seq = 4", "the last record is 3, 4 were written"),
    ],
)  # fmt: skip
def test_changes_and_gaps_show(tmp_path: Path, damage: str, problem: str) -> None:
    """In the middle and at the end."""
    path = tmp_path / "a.sqlite3"
    journal = AuditJournal(path, 100)
    journal.append([record(str(idx)) for idx in range(4)])
    with sqlite3.connect(path) as db:
        db.execute(damage)
    db.close()
    assert any(found.startswith(problem) for found in journal.verify()[1])
    journal.close()


def test_a_changed_field_shows(tmp_path: Path) -> None:
    """Even with everything else in place."""
    path = tmp_path / "a.sqlite3"
    journal = AuditJournal(path, 100)
    journal.append([record("x", scanned_chars=5), record("y")])
    (changed,) = journal.find("x")
    changed.scanned_chars = 6
    with sqlite3.connect(path) as db:
        db.execute("UPDATE records SET record = ? WHERE seq = 1", (changed.SerializeToString(),))
    db.close()
    assert journal.verify()[1] == ["record 1 was changed"]
    journal.close()


def test_only_published_records_are_forgotten(tmp_path: Path) -> None:
    """And the chain of the rest still adds up."""
    journal = AuditJournal(tmp_path / "a.sqlite3", 2)
    journal.append([record(str(idx)) for idx in range(6)])
    assert [one.seq for one in journal.unpublished(3)] == [1, 2, 3]
    journal.mark_published(3)
    assert journal.find("1") == []
    assert journal.find("3") != []
    assert journal.verify() == (3, [])
    journal.close()


def test_nothing_is_kept_for_a_topic_that_nobody_fills(tmp_path: Path) -> None:
    """A guard without Kafka keeps as many records as one with it."""
    journal = AuditJournal(tmp_path / "a.sqlite3", 2, is_published=False)
    for idx in range(6):
        journal.append([record(str(idx))])
    assert [bool(journal.find(str(idx))) for idx in range(6)] == [False] * 4 + [True] * 2
    assert journal.verify() == (2, [])
    journal.close()


@pytest.mark.parametrize(
    ("records", "leak"),
    [
        ([output(10, 10, 10), sent(10)], None),
        ([output(10, 4, 4), sent(4)], None),
        # A redaction makes the text longer.
        ([output(10, 10, 30), sent(30)], None),
        ([output(10, 10, 10), output(5, 5, 5), sent(15)], None),
        ([output(10, 10, 10), output(5, 5, 5, 1), sent(15, 10, 5)], None),
        ([output(10, 10, 10), output(5, 5, 5, 1), sent(6, 1, 5)], None),
        # Choice 1 was sent three characters that nobody let out; of choice 0 the client took one.
        ([output(10, 10, 10), output(5, 5, 5, 1), sent(9, 1, 8)], Leak.LEAK),
        ([output(10, 10, 10), sent(4, 0, 4)], Leak.LEAK),
        ([output(10, 11, 11), sent(11)], Leak.LEAK),
        ([output(10, 4, 4), sent(10)], Leak.LEAK),
        # No output record at all: the guard was passed by.
        ([sent(1)], Leak.LEAK),
        ([output(3, 3, 3), sent(9, fail_open=True)], Leak.FAIL_OPEN),
        ([sent(9, guard_lost=True)], Leak.GUARD_LOST),
        ([output(3, 3, 3), sent(3, guard_lost=True)], None),
        ([output(3, 4, 4), sent(4, guard_lost=True)], Leak.LEAK),
        ([sent(0)], None),
        # A report whose answer was lost is repeated; two that differ are of two answers.
        ([output(10, 10, 10), sent(10), sent(10)], None),
        ([output(10, 10, 10), sent(10), sent(9)], Leak.LEAK),
        ([output(10, 4, 4), sent(10), sent(10)], Leak.LEAK),
        # Repeated over another connection, to a guard that has the record or does not.
        ([output(10, 10, 10), sent(10), sent(10, guard_lost=True)], None),
        ([sent(10, guard_lost=True), sent(10)], Leak.GUARD_LOST),
        # Taken over from a guard that died, and from one that left a record of its part.
        ([output(10, 10, 10, resumed=6), sent(10, guard_lost=True)], None),
        ([output(8, 6, 6), output(10, 10, 10, resumed=6), sent(10, 10, guard_lost=True)], None),
        (
            [output(8, 6, 6), output(10, 10, 10, resumed=6), sent(12, 12, guard_lost=True)],
            Leak.GUARD_LOST,
        ),
    ],
)
def test_more_sent_than_released_is_a_leak(
    records: list[pb.AuditRecord], leak: Leak | None
) -> None:
    """Whoever says so."""
    assert leak_in(records) is leak


@asynccontextmanager
async def running_log(
    path: Path, registry: CollectorRegistry, kafka: str = "", max_waiting: int = 100
) -> AsyncIterator[AuditLog]:
    log = AuditLog(
        AuditJournal(path, 100),
        SystemClock(),
        AuditMetrics(registry),
        kafka_bootstrap=kafka,
        max_waiting=max_waiting,
        sent_grace_s=0.05,
    )
    log.start()
    yield log
    await log.close()


async def test_a_leak_is_alarmed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By metric and log, once the output's own record had its time to come."""
    registry = CollectorRegistry()
    async with running_log(tmp_path / "a.sqlite3", registry) as log:
        report = sent(7)
        report.request_id = "leaky"
        log.note(report)
        fine = [output(7, 7, 7), sent(7)]
        for one in fine:
            one.request_id = "fine"
            log.note(one)

        def alarmed() -> bool:
            value = registry.get_sample_value
            return value("headrace_guard_released_unscanned_total", {"kind": "leak"}) == 1

        await eventually(alarmed)
        assert [one.kind for one in await log.find("fine")] == [
            pb.AUDIT_KIND_OUTPUT,
            pb.AUDIT_KIND_SENT,
        ]
    assert "leaky: more text went out" in caplog.text
    assert "fine: more text" not in caplog.text


async def test_a_record_that_was_dropped_is_no_leak(tmp_path: Path) -> None:
    """But what a record shows to be one stays one."""
    registry = CollectorRegistry()
    async with running_log(tmp_path / "a.sqlite3", registry, max_waiting=3) as log:
        let_out = [output(7, 7, 7), output(7, 8, 8), output(7, 7, 7), output(7, 7, 7)]
        for one, request_id in zip(let_out, ("a", "b", "b", "a"), strict=True):
            one.request_id = request_id
            log.note(one)
        for request_id in ("a", "b"):
            report = sent(14)
            report.request_id = request_id
            await eventually(lambda: not log._waiting)
            log.note(report)

        def counted(kind: str) -> float | None:
            labels = {"kind": kind}
            return registry.get_sample_value("headrace_guard_released_unscanned_total", labels)

        await eventually(lambda: counted("leak") == counted("guard_lost") == 1)


async def test_what_waits_is_written_at_the_end_and_too_much_is_counted(tmp_path: Path) -> None:
    """A drain loses nothing; a flood loses only what is beyond the bound."""
    registry, path = CollectorRegistry(), tmp_path / "a.sqlite3"
    async with running_log(path, registry, max_waiting=3) as log:
        for idx in range(5):
            log.note(record(str(idx)))
    assert registry.get_sample_value("headrace_guard_audit_dropped_total") == 2
    journal = AuditJournal(path, 100)
    assert journal.verify() == (3, [])
    assert journal.find("2")[0].unix_us > 0
    journal.close()


async def test_a_full_disk_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not take is lost, counted, and keeps nothing open."""

    def refuse(_journal: AuditJournal, _records: list[pb.AuditRecord]) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(AuditJournal, "append", refuse)
    registry = CollectorRegistry()
    async with running_log(tmp_path / "a.sqlite3", registry) as log:
        log.note(record("a"))
    assert registry.get_sample_value("headrace_guard_audit_dropped_total") == 1
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        log._journal.find("a")


@pytest.mark.kafka
async def test_kafka_gets_every_record_once_it_is_there(
    tmp_path: Path, own_kafka: LocalServer
) -> None:
    """Records of a time without a broker included; each one as it stands in the chain."""
    path, bootstrap = tmp_path / "a.sqlite3", f"127.0.0.1:{own_kafka.port}"
    journal = AuditJournal(path, 100)
    journal.append([record("early")])
    journal.close()
    async with running_log(path, CollectorRegistry(), bootstrap) as log:
        log.note(record("late"))
        got = await _read_topic(bootstrap, 2)
        verified = await log.verify()
    assert {one.request_id for one in got} == {"early", "late"}
    assert sorted(one.seq for one in got) == [1, 2]
    assert verified == (2, [])


async def _read_topic(bootstrap: str, count: int) -> list[pb.AuditRecord]:
    async def exists() -> bool:
        reader = consumer(bootstrap, "test")
        await reader.start()
        try:
            return GUARD_AUDIT_TOPIC in await reader.topics()
        finally:
            await reader.stop()

    await eventually(exists, within_s=20)
    reader = consumer(bootstrap, "test")
    await reader.start()
    try:
        reader.assign([TopicPartition(GUARD_AUDIT_TOPIC, idx) for idx in range(NUM_PARTITIONS)])
        records: list[pb.AuditRecord] = []

        async def all_there() -> bool:
            for batch in (await reader.getmany(timeout_ms=200)).values():
                records.extend(pb.AuditRecord.FromString(one.value) for one in batch)
            return len(records) >= count

        await eventually(all_there, within_s=20)
        return records
    finally:
        await reader.stop()
