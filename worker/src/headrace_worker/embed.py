"""The Embed call: each input is a request of its own to the engine, a few at a time.

Inputs go through the same queue, steps and cache as prompts do, so a long list of them neither
stalls running streams nor takes the queue from others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from headrace_common.blocks import chain_key
from headrace_common.errors import HeadraceError, InvalidRequest, ModelNotFound, Unimplemented
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.calls import Calls
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.output import RequestOutput, Usage
from headrace_worker.engine.pooling import Pooling
from headrace_worker.engine.request import Request, SamplingParams, StopParams
from headrace_worker.generate_events import token_usage
from headrace_worker.generate_request import RequestRules

MAX_INPUTS = 2048
_MAX_IN_ENGINE = 4
_POOLINGS = {
    pb.EmbedRequest.POOLING_UNSPECIFIED: Pooling.MEAN,
    pb.EmbedRequest.POOLING_MEAN: Pooling.MEAN,
    pb.EmbedRequest.POOLING_LAST: Pooling.LAST,
}


@dataclass(frozen=True)
class EmbedJob:
    """A checked call: one request per input, in order."""

    request_id: str
    requests: list[Request]


def parse_embed(
    message: pb.EmbedRequest, rules: RequestRules, keys: Iterator[int], now_s: float
) -> EmbedJob:
    """Check a call and make the engine's requests.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: another model.
        Unimplemented: a kind of pooling that is not known here.
    """
    if message.model != rules.model:
        raise ModelNotFound(f"Model {message.model!r} is not served here.", param="model")
    if message.pooling not in _POOLINGS:
        raise Unimplemented("This engine pools by mean or last token.", param="pooling")
    if not message.request_id:
        raise InvalidRequest("request_id: it must not be empty.", param="request_id")
    if not 0 < len(message.inputs) <= MAX_INPUTS:
        raise InvalidRequest(f"inputs: 1 to {MAX_INPUTS}.", param="inputs")
    for number, sequence in enumerate(message.inputs):
        if not sequence.token_ids or max(sequence.token_ids) >= rules.vocab_size:
            raise InvalidRequest(
                f"inputs[{number}]: at least one token id, all below {rules.vocab_size}.",
                param="inputs",
            )
    return EmbedJob(
        message.request_id,
        [
            Request(
                key=next(keys),
                request_id=message.request_id,
                prompt_token_ids=list(sequence.token_ids),
                sampling=SamplingParams(),
                stopping=StopParams(max_tokens=1),
                seed=0,
                chain_key=chain_key(rules.fingerprint, "", message.cache_salt),
                pooling=_POOLINGS[message.pooling],
                accepted_s=now_s,
            )
            for sequence in message.inputs
        ],
    )


async def embed(
    job: EmbedJob, calls: Calls, engine: Engine, on_change: Callable[[], None]
) -> pb.EmbedResponse:
    """Compute all of a job; if one input fails, or the caller leaves, the others are dropped.

    Raises:
        HeadraceError: what the engine said of an input.
    """
    room = asyncio.Semaphore(_MAX_IN_ENGINE)

    async def one(request: Request) -> RequestOutput:
        async with room:
            return await _run(request, calls, engine, on_change)

    tasks = [asyncio.create_task(one(request)) for request in job.requests]
    try:
        outputs = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return pb.EmbedResponse(
        embeddings=[pb.Embedding(values=output.embedding or []) for output in outputs],
        usage=token_usage(_sum(output.usage for output in outputs if output.usage is not None)),
    )


async def _run(
    request: Request, calls: Calls, engine: Engine, on_change: Callable[[], None]
) -> RequestOutput:
    call = calls.open(request)
    try:
        engine.submit(request)
        on_change()
        while True:
            output = await call.take()
            if output.error is not None:
                raise _about_inputs(output.error)
            if output.is_last:
                return output
    finally:
        if calls.close(call):
            engine.abort(request.key)
        on_change()


def _sum(usages: Iterable[Usage]) -> Usage:
    counts = [(u.prompt_tokens, u.cached_tokens, u.output_tokens) for u in usages]
    return Usage(*map(sum, zip(*counts, strict=True)))


def _about_inputs(error: HeadraceError) -> HeadraceError:
    if error.param == "prompt_token_ids":
        error.param = "inputs"
    return error
