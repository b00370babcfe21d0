"""langchain-openai: invoke, stream, structured output, a bound tool, embeddings."""

from __future__ import annotations

import os

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    is_capital: bool


where = {"base_url": os.environ["BASE_URL"] + "/v1", "api_key": os.environ["API_KEY"]}
model = ChatOpenAI(model=os.environ["MODEL"], max_tokens=64, temperature=0, **where)

answer = model.invoke("Say hello.")
assert answer.content
assert answer.usage_metadata["output_tokens"] > 0
streamed = "".join(chunk.content for chunk in model.stream("Say hello."))
assert streamed == answer.content
city = model.with_structured_output(City, method="json_schema").invoke("Paris, as JSON.")
assert isinstance(city, City)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


called = model.bind_tools([add], tool_choice="add").invoke("What is 1 + 2?")
assert called.tool_calls[0]["name"] == "add"
vectors = OpenAIEmbeddings(
    model=os.environ["MODEL"], check_embedding_ctx_length=False, **where
).embed_documents(["one", "two"])
assert len(vectors) == 2
print("5 checks")
