"""From the engine's outputs to the contract's GenerateEvent."""

from __future__ import annotations

from headrace_contracts.types.v1.types_pb2 import ReplicaRef, TokenUsage
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.engine.output import ChoiceOutput, RequestOutput, Times, Usage
from headrace_worker.engine.request import Finish, Request
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.sampling import Sampled

_FINISH: dict[Finish | None, pb.FinishReason.ValueType] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.ABORT: pb.FINISH_REASON_ABORT,
}


class EventWriter:
    """Writes the events of one request.

    Args:
        request: what is being generated.
        table: bytes of tokens.
        replica: this life of this worker.
    """

    def __init__(self, request: Request, table: TokenTable, replica: ReplicaRef) -> None:
        self._request, self._table, self._replica = request, table, replica
        self._said_started = False
        self._owes_prompt_logprobs = request.wants_prompt_logprobs

    def event(self, output: RequestOutput) -> pb.GenerateEvent:
        """Render what one step, or several merged, did for the request."""
        event = pb.GenerateEvent(
            deltas=[self._delta(part) for part in output.choices],
            usage=token_usage(output.usage),
        )
        if self._owes_prompt_logprobs and output.choices:
            self._owes_prompt_logprobs = False
            event.prompt_logprobs.extend(self._prompt_logprobs(output.prompt_logprobs))
        if not self._said_started:
            self._said_started = True
            event.started.CopyFrom(pb.Started(replica=self._replica, queue_s=output.queue_s or 0.0))
        if output.is_last:
            event.timings.CopyFrom(_timings(output.times))
        return event

    def _delta(self, part: ChoiceOutput) -> pb.ChoiceDelta:
        with_logprobs = self._request.num_top_logprobs is not None
        return pb.ChoiceDelta(
            choice_idx=part.choice_idx,
            token_ids=[sampled.token_id for sampled in part.tokens],
            text=part.text,
            logprobs=map(self._logprob, part.tokens) if with_logprobs else (),
            finish_reason=_FINISH[part.finish],
            stop_matched=part.stop_matched,
        )

    def _prompt_logprobs(self, known: list[Sampled]) -> list[pb.TokenLogprob]:
        # Nothing comes before the first token, so it has no probability; 0 keeps the places right.
        first = Sampled(self._request.prompt_token_ids[0], 0.0)
        return [self._logprob(sampled) for sampled in (first, *known)]

    def _logprob(self, sampled: Sampled) -> pb.TokenLogprob:
        return pb.TokenLogprob(
            token_id=sampled.token_id,
            token=self._table.spelling(sampled.token_id),
            logprob=sampled.logprob or 0.0,
            top=[
                pb.TokenLogprob(
                    token_id=token_id, token=self._table.spelling(token_id), logprob=logprob
                )
                for token_id, logprob in sampled.top
            ],
        )


def token_usage(usage: Usage | None) -> TokenUsage:
    """Render the counts."""
    if usage is None:
        return TokenUsage()
    return TokenUsage(
        prompt_tokens=usage.prompt_tokens,
        cached_gpu_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
    )


def finish_reason(finish: Finish | None) -> pb.FinishReason.ValueType:
    """Render why a choice ended."""
    return _FINISH[finish]


def _timings(times: Times | None) -> pb.Timings:
    if times is None:
        return pb.Timings()
    return pb.Timings(
        queue_s=times.queue_s,
        prefill_s=times.prefill_s,
        decode_s=times.decode_s,
        num_preemptions=times.num_preemptions,
    )
