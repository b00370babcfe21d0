"""instructor: a typed answer by a tool, by JSON schema, and in parts."""

from __future__ import annotations

import os
from typing import Literal

import instructor
import openai
from pydantic import BaseModel


class Mood(BaseModel):
    """How somebody feels."""

    mood: Literal["good", "bad"]
    is_sure: bool


client = openai.OpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key=os.environ["API_KEY"])
asked = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": "I am happy. How do I feel?"}],
    "max_tokens": 256,
    "response_model": Mood,
    "max_retries": 1,
}
num_checks = 0
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    answer = instructor.from_openai(client, mode=mode).chat.completions.create(**asked)
    assert answer.mood in ("good", "bad"), (mode, answer)
    num_checks += 1
parts = list(
    instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create_partial(
        **asked
    )
)
assert parts[-1].mood in ("good", "bad")
print(f"{num_checks + 1} checks")
