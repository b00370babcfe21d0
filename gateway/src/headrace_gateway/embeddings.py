"""/v1/embeddings: texts or token ids in, vectors of unit length out."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta, Struct

from headrace_common.clock import Clock
from headrace_common.errors import InvalidRequest
from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.worker.v1.worker_pb2 import (
    EmbedRequest,
    Sampling,
    TokenSequence,
)
from headrace_gateway.answer import VectorSink
from headrace_gateway.api_request import ApiRequest, Endpoint, Limits, StreamOptions, labels_of
from headrace_gateway.job import Job
from headrace_gateway.json_body import decode
from headrace_gateway.model_directory import ServedModel
from headrace_gateway.openai_bodies import Positive, Text
from headrace_gateway.openai_dialect import OpenAiErrors
from headrace_gateway.openai_schema import read_prompts
from headrace_gateway.principal import Principal
from headrace_gateway.visit import Caller, Exchange, Reading, Visit

MAX_INPUTS = 2048


class EmbeddingsBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings. Any: read by `read_prompts`."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    input: str | list[Any] | None = None
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: Text | None = None


_DECODER = msgspec.json.Decoder(EmbeddingsBody)


class EmbeddingsDialect(OpenAiErrors):
    """How /v1/embeddings is spoken."""

    def __init__(self) -> None:
        super().__init__(Endpoint.EMBEDDINGS)

    async def read(self, body: bytes, caller: Caller) -> Reading:
        """Parse a body.

        Raises:
            InvalidRequest: it is wrong.
        """
        asked = decode(_DECODER, body)
        inputs = read_prompts(asked.input, "input")
        if len(inputs) > MAX_INPUTS or "" in inputs:
            raise InvalidRequest(
                f"input may hold up to {MAX_INPUTS} texts, none empty.", param="input"
            )
        request = ApiRequest(
            endpoint=Endpoint.EMBEDDINGS,
            model=asked.model,
            sampling=Sampling(),
            limits=Limits(max_tokens=1),
            streaming=StreamOptions(),
            prompts=inputs,
            labels=labels_of(asked.user),
        )
        for idx, text in enumerate(inputs):
            if isinstance(text, str):
                slot = (request.prompts, idx)
                request.add_guarded(f"input[{idx}]", guard_pb2.TRUST_USER, text, slot)

        def make_sink(visit: Visit, model: ServedModel, _clock: Clock) -> VectorSink:
            return _EmbeddingSink(visit.exchange, model.card.model, asked)

        return Reading(request, make_sink)


class _EmbeddingSink(VectorSink):
    def __init__(self, exchange: Exchange, model: str, asked: EmbeddingsBody) -> None:
        self._exchange, self._model, self._asked = exchange, model, asked

    async def end(self, usage: TokenUsage) -> None:
        as_base64 = self._asked.encoding_format == "base64"
        data = []
        for idx, vector in enumerate(self.vectors):
            values = cut(vector.values, self._asked.dimensions)
            shown = _base64(values) if as_base64 else values
            data.append({"object": "embedding", "index": idx, "embedding": shown})
        tokens = usage.prompt_tokens
        body = {
            "object": "list",
            "data": data,
            "model": self._model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        await self._exchange.send_json(200, orjson.dumps(body))


def embed_request(request_id: str, jobs: Sequence[Job], principal: Principal) -> EmbedRequest:
    """Return the worker's request for the prompts of all jobs."""
    return EmbedRequest(
        request_id=request_id,
        model=jobs[0].generate.model,
        inputs=[TokenSequence(token_ids=job.generate.prompt_token_ids) for job in jobs],
        cache_salt=principal.cache_salt,
    )


def cut(values: Sequence[float], dimensions: int | None) -> list[float]:
    """Return the first *dimensions* values, brought back to unit length.

    Raises:
        InvalidRequest: the model makes fewer.
    """
    if dimensions is None or dimensions == len(values):
        return list(values)
    if dimensions > len(values):
        raise InvalidRequest(f"This model makes {len(values)} dimensions.", param="dimensions")
    kept = list(values[:dimensions])
    length = math.sqrt(sum(value * value for value in kept)) or 1.0
    return [value / length for value in kept]


def _base64(values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
