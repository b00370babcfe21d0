"""What the engine knows of a request: its parameters, its sequences (one per choice), its times."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace_worker.engine.constraint import Constraint
from headrace_worker.engine.pooling import Pooling


class Priority(enum.IntEnum):
    """Class of service; a higher one is scheduled first."""

    BATCH = 1
    STANDARD = 2
    HIGH = 3


class SequenceState(enum.Enum):
    """See `Sequence`."""

    NEW = "new"
    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Finish(enum.Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. 0 means off for top_k and min_p, 1 for top_p and repetition."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()

    @property
    def uses_counts(self) -> bool:
        """Whether a draw depends on which tokens came before."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True)
class StopParams:
    """When a choice ends. `end_token_ids` holds the model's own and the caller's end tokens."""

    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    end_token_ids: frozenset[int] = frozenset()


@dataclass(eq=False)
class Request:
    """One call of Generate, from its acceptance to its last token.

    Owned by the engine's thread once it is submitted. Times are monotonic seconds.

    Args:
        key: number of the call, unique in this process (a request id may come twice).
        request_id: the public id.
        prompt_token_ids: at least one id.
        sampling: how tokens are drawn.
        stopping: when choices end.
        seed: with choice and position it fixes every draw.
        chain_key: key of the block-hash chain; separates tenants and adapters.
        num_choices: sequences to make, at least 1.
        resume: output made elsewhere, by choice.
        priority: class of service.
        num_top_logprobs: None = no log probabilities of the output are wanted.
        wants_prompt_logprobs: the prompt's are wanted; then nothing of it is reused.
        num_prompt_top_logprobs: alternatives for each of the prompt's tokens.
        skip_prefix_cache: compute the whole prompt here.
        pooling: an embedding of the prompt is wanted, and no output; None = output.
        ttft_slo_s: time in which the first token is wanted; orders the queue. None = not said.
        tpot_slo_s: longest time between tokens that is wanted; bounds the prompts' share of steps
            in which this request has a stream. None = not said.
        accepted_s: when the worker took it in.
        constraint: what each choice's text must be; None = anything.
    """

    key: int
    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stopping: StopParams
    seed: int
    chain_key: bytes
    num_choices: int = 1
    resume: Mapping[int, list[int]] = field(default_factory=dict)
    priority: Priority = Priority.STANDARD
    num_top_logprobs: int | None = None
    wants_prompt_logprobs: bool = False
    num_prompt_top_logprobs: int = 0
    skip_prefix_cache: bool = False
    pooling: Pooling | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    accepted_s: float = 0.0
    constraint: Constraint | None = None
    # Set by scheduler and engine.
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int = 0
    num_preemptions: int = 0
    # Prompt tokens that another worker computed for this very request: found in the cache here,
    # and yet not reused.
    handed_tokens: int = 0
    # A prefill for another worker: its usage is the other one's to report.
    is_for_transfer: bool = False
    # Place in the queue: smaller goes first. Static, so that waiting is ageing (see scheduler).
    rank: tuple[float, int] = (0.0, 0)
    sequences: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = [Sequence(self, idx) for idx in range(self.num_choices)]

    @property
    def reuses_prefix(self) -> bool:
        """Whether KV of earlier requests may stand for a part of the prompt."""
        needs_all = self.wants_prompt_logprobs or self.pooling is Pooling.MEAN
        return not (self.skip_prefix_cache or needs_all)

    @property
    def is_finished(self) -> bool:
        """Whether no choice goes on."""
        return all(seq.state is SequenceState.FINISHED for seq in self.sequences)

    @property
    def output_tokens(self) -> int:
        """Output of all choices, what was resumed included."""
        return sum(seq.num_output for seq in self.sequences)


class Sequence:
    """One choice of a request: its tokens and the blocks that hold their KV.

    ::

        NEW ---accepted---> WAITING, or HELD if it will go on from choice 0's prompt
        HELD --prompt of choice 0 is computed (fork)--> RUNNING, or WAITING if there is no room
        WAITING --admitted--> RUNNING --end, abort--> FINISHED
                                 |  ^
                        preempted|  |admitted again
                                 v  |
                              PREEMPTED

    An abort leads to FINISHED from everywhere. Blocks are held in RUNNING only.
    """

    def __init__(self, request: Request, choice_idx: int) -> None:
        resumed = request.resume.get(choice_idx, [])
        self.request = request
        self.choice_idx = choice_idx
        # Prompt, then output.
        self.token_ids = [*request.prompt_token_ids, *resumed]
        self.num_prompt = len(request.prompt_token_ids)
        self.state = SequenceState.NEW
        # Leading tokens whose KV lies in the blocks of `block_table`.
        self.num_computed = 0
        self.block_table: list[int] = []
        # Hashes of leading full blocks as far as they were needed; never shrinks.
        self.block_hashes: list[bytes] = []
        # Leading blocks of `block_table` that the prefix cache knows by hash.
        self.num_named_blocks = 0
        self.finish: Finish | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Output so far, what was resumed included."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed
