"""Does it fit: prompt and output against the model's context and the key's own limits. Pure."""

from __future__ import annotations

from collections.abc import Collection

from headrace_common.errors import ContextTooLong, InvalidRequest
from headrace_gateway.api_request import ApiRequest, Endpoint
from headrace_gateway.model_directory import ServedCard
from headrace_gateway.principal import Principal


def check_ids(request: ApiRequest, card: ServedCard) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        InvalidRequest: `param` says where.
    """
    if card.takes_text:
        # Ids are the engine's own affair.
        return
    _check_known("logit_bias", request.sampling.logit_bias, card)
    _check_known("stop_token_ids", request.limits.stop_token_ids, card)
    for prompt in request.prompts:
        if not isinstance(prompt, str):
            _check_known(request.endpoint.prompt_field, prompt, card)


def _check_known(param: str, ids: Collection[int], card: ServedCard) -> None:
    if ids and max(ids) >= card.vocab_size:
        raise InvalidRequest(
            f"{param} names a token id that this model does not have; "
            f"its ids end before {card.vocab_size}.",
            param=param,
        )


def output_bound(
    request: ApiRequest, prompt_tokens: int, card: ServedCard, default_max_tokens: int
) -> int:
    """Return the most output tokens per choice for a prompt of this length.

    Raises:
        ContextTooLong: the prompt, or prompt and wanted output, do not fit.
        InvalidRequest: the prompt is empty.
    """
    context, wanted = card.context_tokens, request.limits.max_tokens
    if prompt_tokens == 0:
        raise InvalidRequest("The prompt is empty.", param=request.endpoint.prompt_field)
    if card.takes_text:
        # The length is a guess: the engine says what does not fit.
        left = max(1, context - prompt_tokens)
        return wanted or min(left, max(default_max_tokens, request.limits.min_tokens))
    if prompt_tokens >= context:
        raise ContextTooLong(
            _too_long(request.endpoint, prompt_tokens, context), param=request.endpoint.prompt_field
        )
    if wanted is None:
        return min(context - prompt_tokens, max(default_max_tokens, request.limits.min_tokens))
    if prompt_tokens + wanted > context:
        raise ContextTooLong(
            _too_much(request.endpoint, prompt_tokens, wanted, context),
            param=request.endpoint.limit_field,
        )
    return wanted


# Both APIs have words that clients tell these errors by, and read the numbers from: Claude Code
# compacts a conversation at the first of Anthropic's, and asks for less at the second.
def _too_long(endpoint: Endpoint, prompt_tokens: int, context: int) -> str:
    if endpoint is Endpoint.MESSAGES:
        return f"prompt is too long: {prompt_tokens} tokens > {context} maximum"
    param = endpoint.prompt_field
    return (
        f"This model's maximum context length is {context} tokens, prompt and answer together; "
        f"{prompt_tokens} are in the {param} alone. Shorten the {param}."
    )


def _too_much(endpoint: Endpoint, prompt_tokens: int, wanted: int, context: int) -> str:
    if endpoint is Endpoint.MESSAGES:
        return (
            "input length and `max_tokens` exceed context limit: "
            f"{prompt_tokens} + {wanted} > {context}, decrease one of them and try again"
        )
    return (
        f"This model's maximum context length is {context} tokens; {prompt_tokens} are in the "
        f"{endpoint.prompt_field} and {endpoint.limit_field} asks for {wanted}. "
        "Shorten one of them."
    )


def default_max_tokens(
    principal: Principal, configured: int, num_choices: int, prompt_tokens: int
) -> int:
    """Return the output bound of a request that names none, within what the key's limits can hold.

    Otherwise a client that leaves max_tokens out could never pass a limit of tokens per minute that
    is smaller than the configured bound.
    """
    bound = configured
    for scope in principal.limits:
        limits = scope.limits
        if limits.output_tokens_per_minute:
            bound = min(bound, limits.output_tokens_per_minute // num_choices)
        if limits.tokens_per_minute:
            room = limits.tokens_per_minute - prompt_tokens
            bound = min(bound, room // num_choices)
    return max(1, bound)
