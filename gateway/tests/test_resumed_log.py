"""Events of a background response that was begun anew: nothing twice, nothing lost."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_gateway.event_stream import named_event
from headrace_gateway.responses_api.resumed_log import DivergedError, ResumedLog

ITEM = {"item_id": "msg_1", "output_index": 0}
# What is told of an item but its text, before and behind it.
BEFORE = ("response.in_progress", "response.output_item.added", "response.content_part.added")
BEHIND = ("response.output_text.done", "response.content_part.done", "response.output_item.done")


def _events(pieces: list[str], *, is_resumed: bool) -> list[dict[str, Any]]:
    """One answer; each character has a log probability."""
    deltas = [
        {"type": "response.output_text.delta", **ITEM, "delta": it, "logprobs": [*it]}
        for it in pieces
    ]
    kinds = ("response.created", "response.queued", *BEFORE) if not is_resumed else BEFORE
    before = [{"type": kind} for kind in kinds]
    return [*before, *deltas, *({"type": kind} for kind in BEHIND)]


def _framed(events: list[dict[str, Any]]) -> list[bytes]:
    return [
        named_event(it["type"], orjson.dumps({**it, "sequence_number": idx}))
        for idx, it in enumerate(events)
    ]


def _read(log: ResumedLog) -> list[dict[str, Any]]:
    return [orjson.loads(it.partition(b"\ndata: ")[2]) for it in log.events]


@st.composite
def _cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=12)))
    ends = [*places, len(text)]
    return [text[a:b] for a, b in zip([0, *places], ends, strict=True) if a < b]


@given(st.data(), st.text("ab\n\u2028水", min_size=1, max_size=40))
async def test_who_reads_on_has_the_text_once(data: st.DataObject, text: str) -> None:
    """However it was cut, wherever it broke off and however it is cut the second time."""
    first = _framed(_events(data.draw(_cut(text)), is_resumed=False))
    told = first[: data.draw(st.integers(2, len(first)))]
    again = _framed(_events(data.draw(_cut(text)), is_resumed=True))
    log = ResumedLog("resp_1", 10.0, 2, told)
    while again:
        num = data.draw(st.integers(1, len(again)))
        await log.send_events(b"".join(again[:num]))
        again = again[num:]
    events = _read(log)
    assert log.events[: len(told)] == told
    assert [it["sequence_number"] for it in events] == list(range(len(events)))
    deltas = [it for it in events if it["type"].endswith(".delta")]
    assert "".join(it["delta"] for it in deltas) == text
    assert "".join(char for it in deltas for char in it["logprobs"]) == text
    assert all(it["delta"] for it in deltas)
    kinds = [it["type"] for it in events if not it["type"].endswith(".delta")]
    assert kinds == ["response.created", "response.queued", *BEFORE, *BEHIND]


@pytest.mark.parametrize("text", ["abX", "aX", "X"])
async def test_another_text_is_not_told_as_the_rest(text: str) -> None:
    """A model that was exchanged meanwhile, say."""
    told = _framed(_events(["ab", "c"], is_resumed=False))[:7]
    log = ResumedLog("resp_1", 10.0, 2, told)
    with pytest.raises(DivergedError):
        await log.send_events(b"".join(_framed(_events([text, "de"], is_resumed=True))))


async def test_what_ends_sooner_is_not_told_as_the_rest() -> None:
    """The text was told to be longer."""
    told = _framed(_events(["ab", "c"], is_resumed=False))[:7]
    log = ResumedLog("resp_1", 10.0, 2, told)
    with pytest.raises(DivergedError):
        await log.send_events(b"".join(_framed(_events(["ab"], is_resumed=True))))
