"""A deploy: processes that are asked to leave finish what they have begun and nobody notices."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from headrace_testing.api import Answer, chat, stream, whole_stream
from headrace_testing.processes import ApiKey, Fleet
from headrace_testing.waiting import eventually_sync

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.chaos, pytest.mark.timeout(300)]

PROMPTS = [f"Tell a long story about the {idx}. day on a river." for idx in range(6)]
FIELDS = {"max_tokens": 120, "temperature": 0}


@pytest.fixture(scope="module")
def key(fleet: Fleet) -> ApiKey:
    return fleet.create_key("drain")


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet, key: ApiKey) -> list[Answer]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: whole_stream(fleet, key, prompt, **FIELDS), PROMPTS))


def _started_streams(
    fleet: Fleet, key: ApiKey, pool: ThreadPoolExecutor
) -> tuple[list[Future[Answer]], list[str]]:
    """Open a stream for each prompt; return once each has some text, with their replicas."""
    replicas: list[str] = []
    all_begun = threading.Barrier(len(PROMPTS) + 1, timeout=60)

    def run(prompt: str) -> Answer:
        has_begun = False
        for answer in stream(fleet, key, prompt, **FIELDS):
            assert answer.status == 200, answer.body
            if len(answer.pieces) >= 3 and not has_begun:
                has_begun = True
                replicas.append(answer.replica)
                all_begun.wait()
        return answer

    running = [pool.submit(run, prompt) for prompt in PROMPTS]
    all_begun.wait()
    return running, replicas


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _assert_equal(answers: list[Answer], undisturbed: list[Answer]) -> None:
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert answer.error is None
        assert answer.is_done
        assert answer.text == expected.text
        assert answer.finish_reason == expected.finish_reason
        assert answer.usage is not None
        assert expected.usage is not None
        assert answer.usage["completion_tokens"] == expected.usage["completion_tokens"]


def test_a_worker_told_to_leave_takes_nothing_new_and_cuts_nothing(
    fleet: Fleet, key: ApiKey, undisturbed: list[Answer]
) -> None:
    """SIGTERM with six streams open: they end as ever, short requests meanwhile go elsewhere."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        running, replicas = _started_streams(fleet, key, pool)
        leaving = max(set(replicas), key=replicas.count)
        pid = fleet.worker_pid(leaving)
        os.kill(pid, signal.SIGTERM)
        told_at = time.monotonic()
        taken_while_leaving = []
        while not all(stream.done() for stream in running):
            answer = chat(fleet, key, "Say one word.", max_tokens=2, temperature=0)
            assert answer.status_code == 200, answer.text
            # Its successor comes up under the same name, so only while the old process is there.
            if _is_there(pid) and time.monotonic() - told_at > 2:
                taken_while_leaving.append(answer.headers["x-headrace-replica"])
        _assert_equal([stream.result() for stream in running], undisturbed)
    assert leaving not in taken_while_leaving
    eventually_sync(lambda: fleet.worker_pid(leaving) != pid, within_s=40)
    fleet.wait_ready()


def test_a_gateway_told_to_leave_ends_its_streams(
    fleet: Fleet, key: ApiKey, undisturbed: list[Answer]
) -> None:
    """SIGTERM with six streams open: each gets its last word, its usage and its `[DONE]`."""
    pid = fleet.service_pid("gateway")
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        running, _ = _started_streams(fleet, key, pool)
        os.kill(pid, signal.SIGTERM)
        _assert_equal([stream.result() for stream in running], undisturbed)
    eventually_sync(lambda: fleet.service_pid("gateway") != pid, within_s=40)
    fleet.wait_ready()
    eventually_sync(lambda: fleet.verify_ledger()["num_open"] == 0, within_s=30, every_s=0.5)


@pytest.mark.parametrize("name", ["gateway", "guard"])
def test_who_comes_while_one_is_replaced_is_answered(fleet: Fleet, key: ApiKey, name: str) -> None:
    """SIGTERM to the only one there is: no request is refused, and the books are right."""
    pid = fleet.service_pid(name)
    os.kill(pid, signal.SIGTERM)
    num_answered = 0
    while _is_there(pid):
        answer = chat(fleet, key, "Say one word.", max_tokens=2, temperature=0)
        assert answer.status_code == 200, answer.text
        num_answered += 1
    assert num_answered > 0
    fleet.wait_ready()
    assert chat(fleet, key, "Say one word.", max_tokens=2, temperature=0).status_code == 200
    eventually_sync(lambda: fleet.verify_ledger()["num_open"] == 0, within_s=30, every_s=0.5)
    assert fleet.verify_ledger()["ok"]
