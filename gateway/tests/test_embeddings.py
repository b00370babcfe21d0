"""/v1/embeddings over HTTP, with the SDK that applications use."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from headrace_contracts.usage.v1 import usage_pb2
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet


async def test_texts_and_ids_become_vectors(fleet: GatewayFleet) -> None:
    """One vector an input, the same by every encoding and for the same ids; billed once."""
    async with fleet.openai() as client:
        many = await client.embeddings.create(model=MODEL, input=["ab", "c"])
        plain = await client.embeddings.create(model=MODEL, input="ab", encoding_format="float")
        ids = await client.embeddings.create(model=MODEL, input=[list(b"ab"), list(b"c")])
    assert [it.index for it in many.data] == [0, 1]
    assert many.data[0].embedding == pytest.approx(plain.data[0].embedding)
    assert [it.embedding for it in ids.data] == [it.embedding for it in many.data]
    assert many.usage.prompt_tokens == many.usage.total_tokens == 3
    closed = fleet.usage.closed_events()
    assert [it.usage.prompt_tokens for it in closed] == [3, 2, 3]
    assert {(it.endpoint, it.ending, it.usage.output_tokens) for it in closed} == {
        ("embeddings", usage_pb2.ENDING_COMPLETED, 0)
    }
    assert not any(it.estimated for it in closed)
    assert [part.path for part in fleet.guard.inputs[-1].parts] == ["input[0]", "input[1]"]
    await fleet.settled()


async def test_fewer_dimensions_have_unit_length(fleet: GatewayFleet) -> None:
    """The first ones, brought back to length one; more than there are is refused."""
    async with fleet.openai() as client:
        whole = await client.embeddings.create(model=MODEL, input="abc")
        short = await client.embeddings.create(model=MODEL, input="abc", dimensions=3)
        vector = short.data[0].embedding
        assert len(vector) == 3
        assert math.isclose(sum(it * it for it in vector), 1.0, rel_tol=1e-5) or not any(vector)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model=MODEL, input="abc", dimensions=10_000)
    assert caught.value.param == "dimensions"
    assert len(whole.data[0].embedding) > 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [999_999]}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"extra_body": {"no_such": 1}}, "no_such"),
    ],
)
async def test_mistakes_are_named(fleet: GatewayFleet, fields: Any, param: str) -> None:
    """400 by the name of the field; nothing is billed."""
    async with fleet.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(**{"model": MODEL, "input": "a", **fields})
    assert caught.value.param == param
    assert fleet.usage.events == []
