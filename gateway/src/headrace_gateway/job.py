"""One prompt to be answered, and what has come of it, over all replicas that worked on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace_contracts.router.v1.router_pb2 import PickRequest
from headrace_contracts.types.v1.types_pb2 import ReplicaRef, TokenUsage
from headrace_contracts.worker.v1 import worker_pb2 as pb


@dataclass(slots=True)
class Job:
    """One prompt to be answered, and what has come of it."""

    pick: PickRequest
    generate: pb.GenerateRequest
    # Index of its first choice in the whole answer.
    first_choice_idx: int = 0
    replicas: list[ReplicaRef] = field(default_factory=list)
    # The newest event with counts that nobody has asked for yet, and those before it.
    counted: pb.GenerateEvent | None = None
    counts: TokenUsage = field(default_factory=TokenUsage)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    # Of `tokens`, all choices together; of an engine that tells no ids, as it counts.
    num_output: int = 0
    finished: set[int] = field(default_factory=set)
    # Time that the first attempt spent in queues, of router and worker; None = not known yet.
    queue_s: float | None = None
    # As the last worker told them.
    timings: pb.Timings | None = None
    # Whether another model stands ready for it, so that it waits for no replica of this one.
    has_spare: bool = False
    # Text that goes before each choice's own.
    echo: str = ""
    prompt_logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    # Of an engine that tells no ids: whether any output came, and whether its counts are a guess.
    has_text: bool = False
    is_estimate: bool = False
    # Whether its engine tells no ids.
    is_text: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_text = self.generate.HasField("text")

    def read_usage(self) -> TokenUsage:
        """Return the counts so far; the newest event's are read now."""
        if self.counted is not None:
            usage, self.counted = self.counted.usage, None
            if usage.prompt_tokens:
                # Not copied: nobody else has the event.
                self.counts = usage
        if not self.is_text:
            # Counted here: a worker that took over counts again what it redid of ended choices.
            self.counts.output_tokens = self.num_output
        return self.counts

    @property
    def is_resumable(self) -> bool:
        """Whether another replica could go on where one was lost."""
        return not (self.has_text and self.is_text)

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return len(self.finished) >= self.generate.n

    @property
    def has_tokens(self) -> bool:
        """Whether any output exists."""
        return self.has_text or any(self.tokens.values())

    def resumed(self) -> pb.GenerateRequest:
        """Return the request for the next attempt: with what was made so far."""
        if not self.tokens:
            return self.generate
        request = copied(self.generate)
        for choice_idx in sorted(self.tokens):
            request.resume.append(
                pb.ResumeChoice(choice_idx=choice_idx, output_token_ids=self.tokens[choice_idx])
            )
        return request


def copied(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Return a copy that may be changed."""
    copy = pb.GenerateRequest()
    copy.CopyFrom(request)
    return copy
