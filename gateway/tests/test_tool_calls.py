"""Calls in a model's text: found whatever the pieces, never mixed up with text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_gateway.api_request import CustomInput
from headrace_gateway.tool_calls import CallArguments, CallStart, ToolCallReader, call_id

CUSTOMS = {"free": CustomInput(), "bare": CustomInput(regex=".*")}


def read(*parts: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls (name, arguments) of a text that comes in these parts."""
    reader, text, calls = ToolCallReader(CUSTOMS), "", list[tuple[str, str]]()
    for piece in [piece for part in parts for piece in reader.push(part)] + reader.finish():
        if isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
        else:
            text += piece
    assert reader.num_calls == len(calls)
    return text, calls


def spelled(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("whole", "text", "calls"),
    [
        ("just text", "just text", []),
        ("a < b and <tool", "a < b and <tool", []),
        ("ends in blanks  \n", "ends in blanks  \n", []),
        (spelled("f", "{}"), "", [("f", "{}")]),
        ("I look.\n" + spelled("f", '{"a": "}{"}'), "I look.", [("f", '{"a": "}{"}')]),
        (
            spelled("f", r'{"q": "\"}\\"}') + "\n" + spelled("g", '{"x": [1, {"y": 2}]}'),
            "",
            [("f", r'{"q": "\"}\\"}'), ("g", '{"x": [1, {"y": 2}]}')],
        ),
        (spelled("f", "{}") + "\n", "", [("f", "{}")]),
        (spelled("f", "{}") + "\nDone.", "Done.", [("f", "{}")]),
        # Cut by max_tokens: as far as it came.
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        ('I look.\n<tool_call>\n{"name": "f"', "I look.", []),
        ("<tool_call>\n", "", []),
        ("<tool_call> is a tag", "<tool_call> is a tag", []),
        # No call at all.
        ("<tool_call>f()</tool_call>", "<tool_call>f()</tool_call>", []),
        ('<tool_call>{"name": "f", "arguments": 5}</tool_call>', None, []),
        ("<tool_call>" + "x" * 600, "<tool_call>" + "x" * 600, []),
        # A call behind one that was none.
        (
            "<tool_call>f()</tool_call>\n" + spelled("f", "{}"),
            "<tool_call>f()</tool_call>",
            [("f", "{}")],
        ),
    ],
)
def test_text_and_calls_are_told_apart(
    whole: str, text: str | None, calls: list[tuple[str, str]]
) -> None:
    """In one piece and character by character."""
    expected = (whole if text is None else text, calls)
    assert read(whole) == expected
    assert read(*whole) == expected


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    calls=st.lists(
        st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.dictionaries(st.text(), _JSON)),
        max_size=3,
    ),
    before=st.text(alphabet="<tol_ca> \n"),
    cuts=st.lists(st.integers(min_value=1, max_value=9), min_size=1, max_size=40),
)
@settings(max_examples=60)
def test_any_arguments_come_back_whatever_the_pieces(
    calls: list[tuple[str, dict[str, object]]], before: str, cuts: list[int]
) -> None:
    """The joined pieces of arguments are the JSON that was spelled; text before stays."""
    whole = before + "\n".join(spelled(name, json.dumps(value)) for name, value in calls)
    parts, start = [], 0
    for cut in cuts * (len(whole) // sum(cuts) + 1):
        parts.append(whole[start : start + cut])
        start += cut
    text, found = read(*parts)
    if "<tool_call>" not in before:
        assert text == (before.rstrip() if calls else before)
        assert [(name, json.loads(value)) for name, value in found] == calls


BARE = '<tool_call>\n{"name": "bare", "arguments": '


@pytest.mark.parametrize(
    ("whole", "calls"),
    [
        (
            spelled("free", '{"input": "a\\n\\"b\\" \\\\n \\u00e9 \\ud83d\\ude00"}'),
            [("free", 'a\n"b" \\n é 😀')],
        ),
        (
            spelled("free", '{\n "input": ""\n}') + "\n" + spelled("f", "{}"),
            [("free", ""), ("f", "{}")],
        ),
        # No half of a pair goes out, nor is what follows it held for ever.
        (spelled("free", '{"input": "\\ud83dx\\ud83d\\n"}'), [("free", "�x�\n")]),
        # Cut by max_tokens, in an escape.
        ('<tool_call>\n{"name": "free", "arguments": {"input": "a\\u00', [("free", "a")]),
        # Before its text began.
        ('<tool_call>\n{"name": "free", "arguments": {"inp', [("free", "")]),
        # Of a model that was not held to the form.
        (spelled("free", '{"patch": "x"}'), [("free", '{"patch": "x"}')]),
        (BARE + ' {"a"}\n</tool_call>\nall of it', [("bare", ' {"a"}\n</tool_call>\nall of it')]),
        (spelled("f", "{}") + "\n" + BARE, [("f", "{}"), ("bare", "")]),
    ],
)
def test_an_input_is_read_whatever_the_pieces(whole: str, calls: list[tuple[str, str]]) -> None:
    """Free text out of its JSON, an input with a grammar as it is, to the end."""
    assert read(whole) == ("", calls)
    assert read(*whole) == ("", calls)


@settings(max_examples=100, deadline=None)
@given(st.text(), st.sampled_from([True, False]), st.integers(1, 7))
def test_every_text_is_the_input_that_was_spelled(text: str, is_ascii: bool, size: int) -> None:
    """Also where JSON escapes it."""
    whole = spelled("free", json.dumps({"input": text}, ensure_ascii=is_ascii))
    assert read(*(whole[i : i + size] for i in range(0, len(whole), size))) == (
        "",
        [("free", text)],
    )


def test_text_is_not_held_longer_than_it_must_be() -> None:
    """Only what may begin a call, and the blanks before it, wait."""
    reader = ToolCallReader()
    assert reader.push("Hello ") == ["Hello"]
    assert reader.push("world <") == [" world"]
    assert reader.push("b") == [" <b"]


def test_ids_of_calls_differ_and_are_the_same_when_read_again() -> None:
    """By answer, choice and place."""
    ids = {call_id(answer, choice, call) for answer in "ab" for choice in (0, 1) for call in (0, 1)}
    assert len(ids) == 8
    assert call_id("a", 0, 0) == call_id("a", 0, 0)
    assert call_id("a", 0, 0).startswith("call_")
