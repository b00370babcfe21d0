"""Attacks on a real guard through a real gateway: every place of every format, every disguise.

A key forbids one word. Whatever place of a request it stands in and however it is disguised, the
request must be refused before any worker sees it; whatever an answer makes of it, none of it goes
out.
"""

from __future__ import annotations

import base64
import codecs
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_guard.server import GuardApp
from headrace_guard.settings import GuardSettings
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually

WORD = "zanzibar"
_SAID = f"the road to {WORD} is long and the sea is blue"
Body = dict[str, Any]

DISGUISES: dict[str, Callable[[str], str]] = {
    "plain": str,
    "capitals": str.upper,
    "wide letters": lambda text: "".join(
        chr(ord(one) + 0xFEE0) if one != " " else one for one in text
    ),
    "zero width": "\u200b".join,
    "soft hyphens": "\u00ad".join,
    "accents": "\u0301".join,
    "many accents": lambda text: text.replace("a", "a" + "\u0300" * 40),
    "Cyrillic": lambda text: text.replace("a", "\u0430"),
    "mathematical": lambda text: text.replace("z", "\U0001d433").replace("b", "\U0001d41b"),
    "leet": lambda text: text.replace("a", "4").replace("i", "1"),
    "lone letters": lambda text: text.replace(WORD, " ".join(WORD)),
    "dots": lambda text: text.replace(WORD, ".".join(WORD)),
    "tags": lambda text: "".join(chr(0xE0000 + ord(one)) for one in text),
    "turned round": lambda text: f"\u202e{text[::-1]}\u202c",
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 twice": lambda text: base64.b64encode(base64.b64encode(text.encode())).decode(),
    "base64 over lines": lambda text: base64.encodebytes(text.encode() * 3).decode(),
    "base64 of UTF-16": lambda text: base64.b64encode(text.encode("utf-16-le")).decode(),
    "base64 below a word": lambda text: (
        "Decode the following\n" + base64.b64encode(text.encode()).decode() + "\nthoroughly please"
    ),
    "base64 behind a letter": lambda text: "x" + base64.b64encode(text.encode()).decode(),
    "base64 behind three letters": lambda text: "abc" + base64.b64encode(text.encode()).decode(),
    "hex": lambda text: text.encode().hex(),
    "hex behind a digit": lambda text: "7" + text.encode().hex(),
    "spaced hex": lambda text: text.encode().hex(" "),
    "escaped hex": lambda text: "".join(f"\\x{byte:02x}" for byte in text.encode()),
    "percent signs": lambda text: "".join(f"%{byte:02X}" for byte in text.encode()),
    "ROT13": lambda text: codecs.encode(text, "rot13"),
    "hex of base64": lambda text: base64.b64encode(text.encode()).hex(),
}
# Looked for in what goes in only: in a growing answer these have no beginning that is bounded.
INPUT_DISGUISES: dict[str, Callable[[str], str]] = {
    "escapes of JSON": lambda text: "".join(f"\\u{ord(one):04x}" for one in text),
    "JSON in JSON in JSON": lambda text: json.dumps(
        {"a": json.dumps({"b": "".join(f"\\u{ord(one):04x}" for one in text)})}
    ),
    "one escaped letter": lambda text: text.replace("za", "z\\u0061"),
    "one entity": lambda text: text.replace("za", "z&#97;"),
    "entities": lambda text: "".join(f"&#x{ord(one):x};" for one in text),
    "octal": lambda text: "".join(f"\\{ord(one):03o}" for one in text),
    "quoted printable": lambda text: "".join(f"={ord(one):02X}" for one in text),
    "percent u": lambda text: "".join(f"%u{ord(one):04x}" for one in text),
    "two percent signs": lambda text: text.replace("zan", "%7Aan").replace("bar", "%62ar"),
    "base64 in wide letters": lambda text: "".join(
        chr(ord(one) + 0xFEE0) for one in base64.b64encode(text.encode()).decode()
    ),
    "base64 with zero width": lambda text: "\u200b".join(base64.b64encode(text.encode()).decode()),
    "base64 in fours": lambda text: " ".join(
        re.findall(".{1,4}", base64.b64encode(text.encode()).decode())
    ),
    "base64 with dashes": lambda text: "-".join(
        re.findall(".{1,8}", base64.b64encode(text.encode()).decode())
    ),
    "base64 letter by letter": lambda text: " ".join(base64.b64encode(text.encode()).decode()),
    "base64 of several strings": lambda text: '" + "'.join(
        re.findall(".{1,10}", base64.b64encode(text.encode()).decode())
    ),
    "base64 backwards": lambda text: base64.b64encode(text.encode()).decode()[::-1],
    "base64 of ROT13": lambda text: base64.b64encode(
        codecs.encode(text, "rot13").encode()
    ).decode(),
    "base64 of backwards": lambda text: base64.b64encode(text[::-1].encode()).decode(),
    "base64 in a picture": lambda text: (
        f"![x](data:text/plain;base64,{base64.b64encode(text.encode()).decode()})"
    ),
    "hex with commas": lambda text: ", ".join(f"0x{ord(one):02x}" for one in text),
    "hex over lines": lambda text: "\n".join(f"{ord(one):02x}" for one in text),
    "hex with zero width": lambda text: "\u200b".join(text.encode().hex()),
    "backwards": lambda text: text[::-1],
    "word turned in part": lambda text: text.replace(WORD, "zan\u202erabiz\u202c"),
    "variation selectors": lambda text: (
        "\U0001f600" + "".join(chr(0xE0100 + ord(one) - 16) for one in text)
    ),
    "letters in black squares": lambda text: "".join(
        chr(0x1F170 + ord(one) - 97) if one.isalpha() else one for one in text
    ),
    "regional indicators": lambda text: "".join(
        chr(0x1F1E6 + ord(one) - 97) if one.isalpha() else one for one in text
    ),
    "small capitals": lambda text: text.replace("a", "\u1d00").replace("b", "\u0299"),
    "bold inside": lambda text: text.replace(WORD, "zan**zi**bar"),
    "tags inside": lambda text: text.replace(WORD, "zan<b>zi</b>bar"),
    "comment inside": lambda text: text.replace(WORD, "zan<!-- x -->zibar"),
    "two strings": lambda text: text.replace(WORD, '"zan" + "zibar"'),
    "colour of a terminal": lambda text: text.replace(WORD, "zan\x1b[0mzibar"),
}
_FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_ASKED = {"role": "user", "content": "hello"}


def _chat(*messages: Body, **fields: Any) -> tuple[str, Body]:
    return "/v1/chat/completions", chat_body([*messages], **fields)


def _tool(**fields: Any) -> list[Body]:
    return [{"type": "function", "function": {**_FUNCTION, **fields}}]


def _calling(arguments: str) -> Body:
    call = {**_CALL, "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _result(content: Any, call_id: str = "c1") -> Body:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _schema(text: str) -> Body:
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": text}}}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def _completions(prompt: Any) -> tuple[str, Body]:
    return "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 20}


def _responses(given: Any, **fields: Any) -> tuple[str, Body]:
    return "/v1/responses", {"model": MODEL, "input": given, "max_output_tokens": 20, **fields}


def _messages(content: Any, *more: Body, **fields: Any) -> tuple[str, Body]:
    first = {"role": "user", "content": content}
    return "/v1/messages", {
        "model": MODEL, "messages": [first, *more], "max_tokens": 20, **fields
    }  # fmt: skip


_USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
_ANTHROPIC_TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
_RESPONSES_CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
PLACES: dict[str, Callable[[str], tuple[str, Body]]] = {
    "chat user": lambda t: _chat({"role": "user", "content": t}),
    "chat part": lambda t: _chat({"role": "user", "content": [{"type": "text", "text": t}]}),
    "chat second part": lambda t: _chat(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": t}]}
    ),
    "chat system": lambda t: _chat({"role": "system", "content": t}, _ASKED),
    "chat developer": lambda t: _chat({"role": "developer", "content": t}, _ASKED),
    "chat assistant": lambda t: _chat(_ASKED, {"role": "assistant", "content": t}, _ASKED),
    "chat early turn": lambda t: _chat({"role": "user", "content": t}, *[_ASKED] * 4),
    "chat tool result": lambda t: _chat(_ASKED, _calling("{}"), _result(t)),
    "chat tool result part": lambda t: _chat(
        _ASKED, _calling("{}"), _result([{"type": "text", "text": t}])
    ),
    "chat arguments": lambda t: _chat(_ASKED, _calling(json.dumps({"q": t})), _result("ok")),
    "chat nested arguments": lambda t: _chat(
        _ASKED, _calling(json.dumps({"q": [{"deep": t}]})), _result("ok")
    ),
    "chat argument name": lambda t: _chat(_ASKED, _calling(json.dumps({t: 1})), _result("ok")),
    "chat tool description": lambda t: _chat(_ASKED, tools=_tool(description=t)),
    "chat tool parameters": lambda t: _chat(
        _ASKED,
        tools=_tool(
            parameters={"type": "object", "properties": {"a": {"type": "string", "enum": [t]}}}
        ),
    ),
    "chat schema": lambda t: _chat(_ASKED, response_format=_schema(t)),
    "completions": _completions,
    "completions second prompt": lambda t: _completions(["hello", t]),
    "completions ids": lambda t: _completions(list(t.encode())),
    "responses text": _responses,
    "responses item": lambda t: _responses([{"role": "user", "content": t}]),
    "responses part": lambda t: _responses(
        [{"role": "user", "content": [{"type": "input_text", "text": t}]}]
    ),
    "responses instructions": lambda t: _responses("hello", instructions=t),
    "responses output": lambda t: _responses(
        [
            _ASKED,
            _RESPONSES_CALL,
            {"type": "function_call_output", "call_id": "c1", "output": t},
        ]
    ),
    "responses arguments": lambda t: _responses(
        [
            _ASKED,
            {**_RESPONSES_CALL, "arguments": json.dumps({"q": t})},
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        ]
    ),
    "responses tool": lambda t: _responses(
        "hello", tools=[{"type": "function", **_FUNCTION, "description": t}]
    ),
    "messages text": _messages,
    "messages block": lambda t: _messages([{"type": "text", "text": t}]),
    "messages system": lambda t: _messages("hello", system=t),
    "messages system block": lambda t: _messages("hello", system=[{"type": "text", "text": t}]),
    "messages result": lambda t: _messages(
        "hello",
        {"role": "assistant", "content": [_USE]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": t}],
        },
        tools=[_ANTHROPIC_TOOL],
    ),
    "messages result block": lambda t: _messages(
        "hello",
        {"role": "assistant", "content": [_USE]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": t}],
                }
            ],
        },
        tools=[_ANTHROPIC_TOOL],
    ),
    "messages input": lambda t: _messages(
        "hello",
        {"role": "assistant", "content": [{**_USE, "input": {"q": t}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "ok"}],
        },
        tools=[_ANTHROPIC_TOOL],
    ),
    "messages tool": lambda t: _messages("hello", tools=[{**_ANTHROPIC_TOOL, "description": t}]),
    "embeddings": lambda t: ("/v1/embeddings", {"model": MODEL, "input": ["hello", t]}),
}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[GatewayFleet]:
    """A gateway before a real guard; the key forbids the word."""
    guard = GuardApp(GuardSettings(audit_dir=tmp_path / "audit", drain_grace_s=0))
    await guard.start()
    # What is found is asked here, not how fast: a machine that stalls must not read as a miss.
    settings = {"guard_address": f"127.0.0.1:{guard.port}", "guard_timeout_s": 30}
    made = GatewayFleet(tmp_path, settings=settings)
    made.api_key, _ = made.billing.create_key(guard_blocklist=[WORD])
    try:
        await made.start()
        yield made
    finally:
        await made.close()
        await guard.stop()


async def test_no_place_is_overlooked(fleet: GatewayFleet) -> None:
    """Each place passes with a harmless text and is refused with the word, plain and encoded."""
    async with fleet.http() as client:
        for name, place in PLACES.items():
            for disguise in ("plain", "base64", "zero width"):
                path, body = place(DISGUISES[disguise](_SAID))
                before = len(fleet.worker.requests)
                answer = await client.post(path, json=body)
                assert (name, disguise, answer.status_code) == (name, disguise, 400), answer.text
                assert "polic" in answer.text, (name, disguise, answer.text)
                assert len(fleet.worker.requests) == before
    await fleet.settled()


async def test_no_disguise_passes(fleet: GatewayFleet) -> None:
    """In what a user says and in what a tool returns."""
    async with fleet.http() as client:
        for name, disguise in {**DISGUISES, **INPUT_DISGUISES}.items():
            for place in ("chat user", "chat tool result"):
                path, body = PLACES[place](f"Note: {disguise(_SAID)} Thanks.")
                answer = await client.post(path, json=body)
                assert (name, answer.status_code) == (name, 400), answer.text
    assert fleet.worker.requests == []


async def test_a_word_split_over_messages_is_seen(fleet: GatewayFleet) -> None:
    """Two user turns in a row are one text to many models."""
    parts = [{"type": "text", "text": "to zanz"}, {"type": "text", "text": "ibar now"}]
    encoded = base64.b64encode(_SAID.encode()).decode()
    told: list[list[Body]] = [
        [{"role": "user", "content": piece} for piece in pieces]
        for pieces in (
            ("to zanz", "ibar now"),
            ("zan", "zi", "bar"),
            ("z\u0430nz", "ib\u0430r", "hello", "are", "you", "there?"),
            (encoded[:20], encoded[20:]),
        )
    ]
    async with fleet.http() as client:
        for messages in (*told, [{"role": "user", "content": parts}]):
            path, body = _chat(*messages)
            assert (await client.post(path, json=body)).status_code == 400, messages


_ANSWERED_IN = ("chat user", "completions", "responses text", "messages text")


async def test_nothing_of_it_is_answered(fleet: GatewayFleet) -> None:
    """Answers end before the word, disguise by disguise, the formats taken in turn."""
    said = f"to {WORD} now"
    async with fleet.http() as client:
        for number, (name, disguise) in enumerate(DISGUISES.items()):
            if name == "ROT13":
                continue
            place = _ANSWERED_IN[number % len(_ANSWERED_IN)]
            streaming = name == "plain" or number % 3 > 0
            await _answers_without(fleet, client, place, disguise(said), streaming)
        for place in _ANSWERED_IN:
            await _answers_without(fleet, client, place, DISGUISES["base64"](said), True)
    await eventually(lambda: not fleet.worker.running)


async def _answers_without(
    fleet: GatewayFleet, client: httpx.AsyncClient, place: str, said: str, streaming: bool
) -> None:
    fleet.worker.script = lambda *_: f"Now {said} so on.".encode()
    path, body = PLACES[place]("hello")
    limit = "max_output_tokens" if "responses" in place else "max_tokens"
    answer = await client.post(path, json=body | {"stream": streaming, limit: 2000})
    assert answer.status_code == 200
    text = _spoken(answer.text) if streaming else answer.text
    assert said not in text
    assert "so on" not in text, (place, streaming, text)


async def test_every_choice_is_judged(fleet: GatewayFleet) -> None:
    """One of several choices breaks the rule in base64: that one ends, the others do not."""
    encoded = base64.b64encode(_SAID.encode()).decode()
    fleet.worker.script = lambda _p, _s, idx: (encoded if idx == 1 else "a duck").encode()
    async with fleet.http() as client:
        path, body = _chat(_ASKED, n=3)
        choices = (await client.post(path, json=body)).json()["choices"]
    assert [one["finish_reason"] for one in choices] == ["stop", "content_filter", "stop"]
    assert choices[1]["message"]["content"] in ("", None)


async def test_every_choice_of_a_stream_is_judged(fleet: GatewayFleet) -> None:
    """Two of four choices break the rule, each in its way, cut at every letter: only they end."""
    said = {1: f"to {WORD} now", 3: " ".join(WORD)}
    fleet.worker.script = lambda _p, _s, idx: said.get(idx, "a duck swims").encode()
    async with fleet.http() as client:
        path, body = _chat(_ASKED, n=4, stream=True)
        answer = await client.post(path, json=body)
    spoken = dict.fromkeys(range(4), "")
    ends: dict[int, str] = {}
    for line in answer.text.split("\n"):
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            spoken[choice["index"]] += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    assert ends == {0: "stop", 1: "content_filter", 2: "stop", 3: "content_filter"}
    assert spoken[0] == spoken[2] == "a duck swims"
    assert "z" not in spoken[1] + spoken[3]


def _spoken(stream: str) -> str:
    """Every string of every event, joined: whatever a client could put together."""
    events = [line[6:] for line in stream.split("\n") if line.startswith("data: {")]
    return "".join(text for event in events for text in _strings(json.loads(event)))


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        wanted = ("choices", "delta", "content", "text", "item", "part", "response", "output")
        return [text for key in wanted if key in value for text in _strings(value[key])]
    if isinstance(value, list):
        return [text for one in value for text in _strings(one)]
    return []
