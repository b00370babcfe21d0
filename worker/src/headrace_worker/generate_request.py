"""From the contract's GenerateRequest to the engine's Request; refuses what is wrong, by field."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace_common.blocks import chain_key
from headrace_common.errors import InvalidRequest, ModelNotFound
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.engine.request import Priority, Request, SamplingParams, StopParams

MAX_CHOICES = 64
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class RequestRules:
    """What requests are checked against.

    Args:
        model: served name.
        fingerprint: of the model; part of the chain key.
        vocab_size: ids are below it.
        end_token_ids: the model's own end tokens.
    """

    model: str
    fingerprint: str
    vocab_size: int
    end_token_ids: frozenset[int]


def parse(message: pb.GenerateRequest, rules: RequestRules, key: int, now_s: float) -> Request:
    """Build the engine's request; its constraint is not made ready here.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: neither this model nor this adapter is served here.
    """
    _refuse_unknown(message, rules)
    n = message.n or 1
    _require(n <= MAX_CHOICES, "n", f"at most {MAX_CHOICES} choices")
    _require(bool(message.request_id), "request_id", "it must not be empty")
    _require(bool(message.prompt_token_ids), "prompt_token_ids", "at least one token")
    _check_ids(message.prompt_token_ids, "prompt_token_ids", rules.vocab_size)
    _require(
        message.logprobs.top <= MAX_TOP_LOGPROBS, "logprobs.top", f"at most {MAX_TOP_LOGPROBS}"
    )
    return Request(
        key=key,
        request_id=message.request_id,
        prompt_token_ids=list(message.prompt_token_ids),
        sampling=_sampling(message.sampling, rules.vocab_size),
        stopping=_stopping(message.stopping, rules),
        seed=message.seed,
        chain_key=chain_key(rules.fingerprint, message.adapter, message.cache_salt),
        num_choices=n,
        resume=_resume(message, n, rules.vocab_size),
        priority=_priority(message),
        num_top_logprobs=message.logprobs.top if message.logprobs.output else None,
        wants_prompt_logprobs=message.logprobs.prompt,
        num_prompt_top_logprobs=message.logprobs.top,
        skip_prefix_cache=message.skip_prefix_cache,
        ttft_slo_s=message.ttft_slo_ms / 1000 if message.ttft_slo_ms else None,
        tpot_slo_s=message.tpot_slo_ms / 1000 if message.tpot_slo_ms else None,
        accepted_s=now_s,
    )


def _refuse_unknown(message: pb.GenerateRequest, rules: RequestRules) -> None:
    if message.model != rules.model:
        raise ModelNotFound(f"Model {message.model!r} is not served here.", param="model")
    if message.adapter:
        raise ModelNotFound(f"Adapter {message.adapter!r} is not loaded here.", param="adapter")


def _sampling(message: pb.Sampling, vocab_size: int) -> SamplingParams:
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        value = getattr(message, name)
        _require(value >= 0 and math.isfinite(value), f"sampling.{name}", "not below 0")
    for name in ("top_p", "min_p"):
        _require(getattr(message, name) <= 1, f"sampling.{name}", "at most 1")
    for name in ("frequency_penalty", "presence_penalty"):
        _require(math.isfinite(getattr(message, name)), f"sampling.{name}", "a finite number")
    _require(
        len(message.logit_bias) <= MAX_LOGIT_BIAS,
        "sampling.logit_bias",
        f"at most {MAX_LOGIT_BIAS} entries",
    )
    _check_ids(list(message.logit_bias), "sampling.logit_bias", vocab_size)
    _require(
        all(map(math.isfinite, message.logit_bias.values())),
        "sampling.logit_bias",
        "finite numbers",
    )
    _check_ids(message.allowed_token_ids, "sampling.allowed_token_ids", vocab_size)
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
    )


def _stopping(message: pb.Stopping, rules: RequestRules) -> StopParams:
    _require(message.max_tokens >= 1, "stopping.max_tokens", "at least 1")
    _require(message.min_tokens <= message.max_tokens, "stopping.min_tokens", "at most max_tokens")
    _require(len(message.stop) <= MAX_STOP_STRINGS, "stopping.stop", f"at most {MAX_STOP_STRINGS}")
    _require(
        all(0 < len(stop) <= MAX_STOP_CHARS for stop in message.stop),
        "stopping.stop",
        f"strings of 1 to {MAX_STOP_CHARS} characters",
    )
    _check_ids(message.stop_token_ids, "stopping.stop_token_ids", rules.vocab_size)
    own = frozenset() if message.ignore_eos else rules.end_token_ids
    return StopParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        end_token_ids=own | frozenset(message.stop_token_ids),
    )


def _resume(message: pb.GenerateRequest, n: int, vocab_size: int) -> dict[int, list[int]]:
    resume: dict[int, list[int]] = {}
    for part in message.resume:
        _require(
            part.choice_idx < n and part.choice_idx not in resume,
            "resume",
            "each choice_idx once and below n",
        )
        _check_ids(part.output_token_ids, "resume", vocab_size)
        resume[part.choice_idx] = list(part.output_token_ids)
    return resume


def _priority(message: pb.GenerateRequest) -> Priority:
    try:
        return Priority(message.priority or Priority.STANDARD)
    except ValueError as error:
        raise InvalidRequest(
            f"priority: {message.priority} is not known.", param="priority"
        ) from error


def _check_ids(token_ids: object, name: str, vocab_size: int) -> None:
    ids = list(token_ids)  # type: ignore[call-overload]  # protobuf's repeated containers
    _require(
        not ids or max(ids) < vocab_size, name, f"token ids below the vocabulary's {vocab_size}"
    )


def _require(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{name}: {rule}.", param=name)
