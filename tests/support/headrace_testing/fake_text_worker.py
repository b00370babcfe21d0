"""A worker whose engine takes text, without one: the part of the contract that upstreams speak."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace_common.errors import InvalidRequest, NotFound, Unimplemented
from headrace_common.rpc import Call
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_testing.fake_worker import FakeWorker


@dataclass
class FakeTextWorker(FakeWorker):
    """`FakeWorker`, seen through text: its tokens are the bytes of the prompt."""

    async def Generate(  # noqa: N802 - contract name
        self, request: pb.GenerateRequest, call: Call
    ) -> AsyncIterator[pb.GenerateEvent]:
        """Stream the scripted answer without ids."""
        if not request.HasField("text"):
            raise InvalidRequest("This engine takes text.", param="prompt_token_ids")
        if request.resume:
            raise Unimplemented("This engine cannot take over a stream.", param="resume")
        if request.logprobs.prompt:
            raise InvalidRequest("The prompt's are not told.", param="prompt_logprobs")
        inner = pb.GenerateRequest()
        inner.CopyFrom(request)
        inner.prompt_token_ids.extend((request.text.messages_json or request.text.prompt).encode())
        async for event in super().Generate(inner, call):
            for delta in event.deltas:
                del delta.token_ids[:]
            yield event

    async def Embed(self, _request: pb.EmbedRequest, _call: Call) -> pb.EmbedResponse:  # noqa: N802 - contract name
        """Not offered."""
        raise Unimplemented("This model makes no embeddings here.", param="model")

    async def FetchTokenizer(  # noqa: N802 - contract name
        self, _request: pb.FetchTokenizerRequest, _call: Call
    ) -> AsyncIterator[pb.TokenizerChunk]:
        """There is none."""
        raise NotFound("This engine tokenises by itself.", param="model")
        yield  # a stream that ends before its first chunk

    def card(self) -> pb.ModelCard:
        """A card without tokenizer, template and vocabulary."""
        whole = super().card()
        return pb.ModelCard(
            model=whole.model,
            fingerprint=whole.fingerprint,
            context_tokens=whole.context_tokens,
            recipe=whole.recipe,
            takes_text=True,
        )
