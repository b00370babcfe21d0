"""Tools in prompts: by the template where it knows them, by the system message where not."""

from __future__ import annotations

import json
from typing import Any

from headrace_contracts.worker.v1.worker_pb2 import ModelCard
from headrace_gateway.prompt import PromptEncoder
from headrace_gateway.tool_prompt import spells_hermes, tell_tools
from headrace_testing import byte_tokenizer as bt

FUNCTION = {"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}
HERMES = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>{% endfor %}"
)
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather here and there?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}},
            {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{cut"}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "tool", "tool_call_id": "2", "content": "sun"},
    {"role": "user", "content": "Thanks."},
]


def encoder(template: str) -> PromptEncoder:
    return PromptEncoder(ModelCard(chat_template=template), bt.tokenizer_json())


def test_history_is_told_in_plain_roles() -> None:
    """Calls are in the assistant's text, results of one turn in one user message."""
    told = tell_tools(CONVERSATION, [])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user", "user"]
    first, second = told[2]["content"].split("\n</tool_call>\n", 1)
    assert json.loads(first.removeprefix("<tool_call>\n")) == {"name": "f", "arguments": {"a": "é"}}
    assert '"arguments": {cut}' in second
    assert told[3]["content"].count("<tool_response>") == 2
    assert CONVERSATION[2]["content"] == ""


def test_functions_join_the_system_message() -> None:
    """One JSON object a line; a conversation without a system message gets one."""
    told = tell_tools(CONVERSATION, [FUNCTION])
    assert told[0]["content"].startswith("Be brief.\n\n")
    lines = told[0]["content"].splitlines()
    assert json.loads(lines[lines.index("<tools>") + 1]) == FUNCTION
    assert tell_tools([{"role": "user", "content": "x"}], [FUNCTION])[0]["role"] == "system"


def test_a_template_that_knows_tools_renders_them() -> None:
    """It gets the functions and the history as they are."""
    assert spells_hermes(HERMES)
    made = encoder(HERMES)
    ids = made.encode_chat([{"role": "user", "content": "x"}], [FUNCTION]).listed()
    text = made.decode(ids)
    assert text.startswith('{"type": "function", "function": {"name": "f"')
    assert "You can call functions" not in text


def test_control_tokens_in_tools_stay_text_either_way() -> None:
    """A function's description cannot end a turn."""
    for template in (HERMES, bt.CHAT_TEMPLATE):
        ids = encoder(template).encode_chat([{"role": "user", "content": "x"}], [FUNCTION]).listed()
        plain = encoder(template).encode_chat([{"role": "user", "content": "x"}]).listed()
        turns = 1 if template == bt.CHAT_TEMPLATE else 0  # the added system message
        assert ids.count(bt.IM_END_ID) == plain.count(bt.IM_END_ID) + turns


def test_templates_with_other_spellings_are_treated_as_without() -> None:
    """Answers can be read in one spelling only, so prompts are written in it."""
    assert not spells_hermes("{{ tools }}{{ m.tool_calls }}[TOOL_CALLS]")
    assert not spells_hermes("{{ tools }}{{ m.tool_calls }}<tool_call><function=x>")
