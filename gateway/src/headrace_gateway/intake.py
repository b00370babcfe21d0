"""From a parsed request to jobs: templating and tokenising, off the loop when long, and sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from headrace_common import blocks
from headrace_common.errors import InvalidRequest
from headrace_common.fair_places import FairThreads
from headrace_common.ids import job_id
from headrace_common.proto_wire import bytes_tag, with_length
from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Amounts
from headrace_contracts.router.v1.router_pb2 import PickRequest
from headrace_contracts.types.v1.types_pb2 import PRIORITY_BATCH, Priority
from headrace_contracts.worker.v1.worker_pb2 import GenerateRequest, Stopping
from headrace_gateway.api_request import ApiRequest, Endpoint, Prompt, ServiceTier
from headrace_gateway.constraints import output_constraint
from headrace_gateway.job import Job
from headrace_gateway.model_directory import ServedModel
from headrace_gateway.principal import Principal
from headrace_gateway.prompt import LONG_CHARS, PromptEncoder
from headrace_gateway.prompt_sizes import check_ids, default_max_tokens, output_bound
from headrace_gateway.text_prompt import TextEncoder, text_prompt
from headrace_gateway.token_ids import ChainMemory, TokenIds

# One encodes the next while another renders; more would only take cores from the loop. The third is
# left to other tenants.
_NUM_THREADS = 3

_TOKEN_IDS = bytes_tag(GenerateRequest.DESCRIPTOR.fields_by_name["prompt_token_ids"].number)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted of one request: first token, tokens after it. Milliseconds; 0 = not told."""

    ttft_ms: int = 0
    tpot_ms: int = 0


@dataclass(frozen=True, slots=True)
class TierGoals:
    """The goals that router and workers are told, by tier."""

    priority: Goal = Goal()
    standard: Goal = Goal()
    flex: Goal = Goal()

    def of(self, request: ApiRequest, priority: Priority.ValueType) -> Goal:
        """Return the goal of a request of this class."""
        if priority == PRIORITY_BATCH:
            return self.flex
        if request.service_tier is ServiceTier.PRIORITY:
            return self.priority
        return self.standard


@dataclass(slots=True)
class EncodedPrompt:
    """A prompt as ids, with the chain of its block hashes joined."""

    token_ids: TokenIds
    block_hashes: bytes
    max_tokens: int


class Intake:
    """Makes prompts and jobs. Owns its threads, which tenants share.

    Args:
        default_max_tokens: where nothing else bounds the output.
        on_change: told how many long prompts are on threads or wait for one.
    """

    def __init__(
        self, default_max_tokens: int, on_change: Callable[[int], object] = lambda _: None
    ) -> None:
        self._default_max_tokens = default_max_tokens
        self._chains = ChainMemory()
        self._threads = FairThreads(_NUM_THREADS, "tokenise", on_change=on_change)

    async def encode(
        self, request: ApiRequest, model: ServedModel, principal: Principal
    ) -> list[EncodedPrompt]:
        """Encode every prompt of a request and check that it fits.

        Raises:
            InvalidRequest: the template refuses it, an id is unknown, or it is too long.
        """
        check_ids(request, model.card)
        if model.card.takes_text and request.endpoint is Endpoint.EMBEDDINGS:
            raise InvalidRequest("This model makes no embeddings.", param="model")
        return await self.run(
            principal, num_chars(request), lambda: self._encode(request, model, principal)
        )

    async def token_ids(
        self, principal: Principal, request: ApiRequest, encoder: PromptEncoder | TextEncoder
    ) -> list[TokenIds]:
        """Encode every prompt of a request, whether it fits or not."""
        return await self.run(principal, num_chars(request), lambda: _all_ids(request, encoder))

    async def run(self, principal: Principal, size: int, work: Callable[[], T]) -> T:
        """Do somebody's work on a text of this size: here if it is short, else on a thread."""
        if size <= LONG_CHARS:
            return work()
        return await self._threads.run(principal.tenant_id, size, work)

    def close(self) -> None:
        """End the threads; what runs is finished."""
        self._threads.close()

    def _encode(
        self, request: ApiRequest, model: ServedModel, principal: Principal
    ) -> list[EncodedPrompt]:
        card = model.card
        key = blocks.chain_key(card.hash_fingerprint, "", principal.cache_salt)
        encoded = []
        for ids in _all_ids(request, model.encoder, principal.cache_salt):
            num_choices = request.n * max(1, len(request.prompts))
            default = 0
            if request.limits.max_tokens is None:
                default = default_max_tokens(
                    principal, self._default_max_tokens, num_choices, len(ids)
                )
            bound = output_bound(request, len(ids), card, default)
            hashes = self._chains.chain(key, ids.packed, card.block_size_tokens)
            encoded.append(EncodedPrompt(ids, hashes, bound))
        return encoded


def num_chars(request: ApiRequest) -> int:
    """Return the size of everything that will be encoded, roughly."""
    size = 0
    for part in request.guard_parts:
        size += len(part.text)
    for prompt in request.prompts:
        if not isinstance(prompt, str):
            size += len(prompt)
    return size


def add_id_prompts(request: ApiRequest, encoder: PromptEncoder | TextEncoder) -> None:
    """Let the guard see prompts of token ids as the text they stand for."""
    for idx, prompt in enumerate(request.prompts):
        if not isinstance(prompt, str):
            text = encoder.decode(prompt)
            slot = (request.prompts, idx)
            path = f"{request.endpoint.prompt_field}[{idx}]"
            request.add_guarded(path, guard_pb2.TRUST_USER, text, slot)


def reservation(
    prompts: Sequence[EncodedPrompt], n: int, expected_output_tokens: int | None = None
) -> Amounts:
    """Return what to reserve, its cost not yet set.

    Args:
        prompts: as encoded.
        n: choices of each.
        expected_output_tokens: of one choice, where the request does not bound it.
    """
    num_input = num_output = 0
    for prompt in prompts:
        num_input += len(prompt.token_ids)
        num_output += min(prompt.max_tokens, expected_output_tokens or prompt.max_tokens) * n
    return Amounts(requests=1, input_tokens=num_input, output_tokens=num_output)


def most_output_tokens(prompts: Sequence[EncodedPrompt], n: int) -> int:
    """Return the most tokens that can be made."""
    return sum(prompt.max_tokens * n for prompt in prompts)


def make_jobs(
    request_id: str,
    request: ApiRequest,
    model: ServedModel,
    principal: Principal,
    prompts: Sequence[EncodedPrompt],
    goals: TierGoals,
) -> list[Job]:
    """Turn encoded prompts into jobs; several prompts get an id each, made from the request's."""
    seed = _drawn_seed(request_id) if request.seed is None else request.seed
    priority = priority_of(request, principal)
    goal = goals.of(request, priority)
    jobs = []
    for idx, prompt in enumerate(prompts):
        told_id = request_id if len(prompts) == 1 else job_id(request_id, idx)
        pick = PickRequest(
            request_id=told_id,
            model=model.card.model,
            block_hashes=prompt.block_hashes,
            block_size_tokens=model.card.block_size_tokens,
            prompt_tokens=len(prompt.token_ids),
            expected_output_tokens=prompt.max_tokens * request.n,
            priority=priority,
            tenant_id=principal.tenant_id,
            session_id=request.session_id,
            ttft_slo_ms=goal.ttft_ms,
        )
        generate = _generate(told_id, request, model, principal, prompt, seed, priority)
        if model.card.takes_text:
            text = text_prompt(request, idx, len(prompt.token_ids))
            model.card.sampling_defaults.fill(text.named_sampling, request.named_sampling)
            generate.text.CopyFrom(text)
        else:
            generate.MergeFromString(_TOKEN_IDS + with_length(prompt.token_ids.varints))
        generate.ttft_slo_ms, generate.tpot_slo_ms = goal.ttft_ms, goal.tpot_ms
        jobs.append(
            Job(
                pick,
                generate,
                idx * request.n,
                echo=_echo(request, idx, model.encoder),
            )
        )
    return jobs


def _drawn_seed(request_id: str) -> int:
    """Return the seed of a request that names none: whoever tries it again says the same."""
    digest = blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def priority_of(request: ApiRequest, principal: Principal) -> Priority.ValueType:
    """Return the request's class in queues: the key's, or a lower one that it asked for."""
    return PRIORITY_BATCH if request.service_tier is ServiceTier.FLEX else principal.priority


def _echo(request: ApiRequest, prompt_idx: int, encoder: PromptEncoder | TextEncoder) -> str:
    if not request.shown.echo:
        return ""
    prompt = request.prompts[prompt_idx]
    return prompt if isinstance(prompt, str) else encoder.decode(prompt)


def _generate(
    told_id: str,
    request: ApiRequest,
    model: ServedModel,
    principal: Principal,
    prompt: EncodedPrompt,
    seed: int,
    priority: Priority.ValueType,
) -> GenerateRequest:
    limits = request.limits
    stopping = Stopping(max_tokens=prompt.max_tokens)
    if limits.min_tokens:
        stopping.min_tokens = limits.min_tokens
    if limits.stop:
        stopping.stop.extend(limits.stop)
    if limits.stop_token_ids:
        stopping.stop_token_ids.extend(limits.stop_token_ids)
    if limits.ignore_eos:
        stopping.ignore_eos = True
    generate = GenerateRequest(
        request_id=told_id,
        model=model.card.model,
        cache_salt=principal.cache_salt,
        sampling=request.sampling,
        stopping=stopping,
        priority=priority,
        n=request.n,
        seed=seed,
        logprobs=request.logprobs,
        constraint=output_constraint(request),
        client_seed=request.seed is not None,
    )
    model.card.sampling_defaults.fill(generate.sampling, request.named_sampling)
    return generate


def _all_ids(
    request: ApiRequest, encoder: PromptEncoder | TextEncoder, owner: bytes | None = None
) -> list[TokenIds]:
    if request.endpoint.is_conversation:
        tools = request.tools
        shown = tools.functions if tools is not None and tools.is_offered else []
        return [encoder.encode_chat(request.messages, shown, request.template_args, owner)]
    return [_prompt_ids(prompt, encoder) for prompt in request.prompts]


def _prompt_ids(prompt: Prompt, encoder: PromptEncoder | TextEncoder) -> TokenIds:
    return encoder.encode_text(prompt) if isinstance(prompt, str) else TokenIds.of(prompt)
