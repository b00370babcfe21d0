"""llama-index openai-like: chat, streamed chat, completion."""

from __future__ import annotations

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=os.environ["MODEL"],
    api_base=os.environ["BASE_URL"] + "/v1",
    api_key=os.environ["API_KEY"],
    is_chat_model=True,
    max_tokens=8,
    temperature=0,
)
hello = [ChatMessage(role="user", content="Say hello.")]
answer = model.chat(hello)
assert answer.message.content
streamed = "".join(chunk.delta or "" for chunk in model.stream_chat(hello))
assert streamed == answer.message.content, (streamed, answer)
assert model.complete("Say hello.").text
print("3 checks")
