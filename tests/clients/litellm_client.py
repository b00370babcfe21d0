"""litellm as a client: OpenAI's and Anthropic's way, whole and streamed, embeddings, errors."""

from __future__ import annotations

import os

import litellm

BASE, KEY, MODEL = (os.environ[name] for name in ("BASE_URL", "API_KEY", "MODEL"))
HELLO = [{"role": "user", "content": "Say hello."}]
ours = {"model": f"openai/{MODEL}", "api_base": f"{BASE}/v1", "api_key": KEY}

answer = litellm.completion(messages=HELLO, max_tokens=8, temperature=0, **ours)
assert answer.choices[0].message.content
chunks = litellm.completion(messages=HELLO, max_tokens=8, temperature=0, stream=True, **ours)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
assert streamed == answer.choices[0].message.content
theirs = litellm.completion(
    model=f"anthropic/{MODEL}", api_base=BASE, api_key=KEY, messages=HELLO, max_tokens=8
)
assert theirs.choices[0].message.content
vectors = litellm.embedding(input=["one"], encoding_format="float", **ours)
assert len(vectors.data) == 1
try:
    litellm.completion(messages=HELLO, **{**ours, "model": "openai/nobody"})
except litellm.NotFoundError:
    print("5 checks")
else:
    raise AssertionError("an unknown model was taken")
