"""Threads that encode long prompts are its tenants' together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from headrace_gateway.intake import Intake
from headrace_gateway.principal import Principal
from headrace_gateway.prompt import LONG_CHARS

LONG = LONG_CHARS + 1


@pytest.fixture
def here() -> list[int]:
    return []


@pytest.fixture
def intake(here: list[int]) -> Iterator[Intake]:
    made = Intake(16, here.append)
    yield made
    made.close()


def owner(tenant_id: str) -> Principal:
    return Principal(tenant_id=tenant_id, project_id="p", key_id="k")


async def test_one_tenants_long_prompts_hold_up_no_other(intake: Intake, here: list[int]) -> None:
    """However many of them wait; it is told how many do."""
    go = threading.Event()
    flood = [
        asyncio.create_task(intake.run(owner("flood"), LONG, lambda: go.wait(20)))
        for _ in range(50)
    ]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(30):
            assert await intake.run(owner("other"), LONG, lambda: "encoded") == "encoded"
        assert not any(one.done() for one in flood)
    finally:
        go.set()
    assert all(await asyncio.gather(*flood))
    assert (max(here), here[-1]) == (51, 0)


async def test_short_prompts_need_no_thread(intake: Intake) -> None:
    """They are encoded where they are."""
    thread = await intake.run(owner("t"), LONG_CHARS, threading.current_thread)
    assert thread is threading.current_thread()
