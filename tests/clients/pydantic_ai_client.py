"""pydantic-ai: text, streamed text, a typed output by its own tool call."""

from __future__ import annotations

import asyncio
import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Mood(BaseModel):
    """How somebody feels."""

    mood: Literal["good", "bad"]


provider = OpenAIProvider(base_url=os.environ["BASE_URL"] + "/v1", api_key=os.environ["API_KEY"])
model = OpenAIChatModel(os.environ["MODEL"], provider=provider)
SETTINGS = {"max_tokens": 64, "temperature": 0}


async def main() -> None:
    """Run all."""
    agent = Agent(model, model_settings=SETTINGS)
    answer = await agent.run("Say hello.")
    assert answer.output
    async with agent.run_stream("Say hello.") as stream:
        text = await stream.get_output()
    assert text == answer.output, (text, answer.output)
    by_tool = await Agent(model, output_type=Mood, model_settings=SETTINGS).run("I am happy.")
    assert by_tool.output.mood in ("good", "bad")
    native = Agent(model, output_type=NativeOutput(Mood), model_settings=SETTINGS)
    assert (await native.run("I am happy.")).output.mood in ("good", "bad")
    print("4 checks")


asyncio.run(main())
