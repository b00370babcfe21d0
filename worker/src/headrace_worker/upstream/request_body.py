"""Pure: a GenerateRequest as the body of /chat/completions or /completions.

What OpenAI's API has goes out under its name; what vLLM, SGLang and llama.cpp have beyond it
(top_k, min_p and so on) under theirs, only where asked for. What no such server does is refused.
"""

from __future__ import annotations

import json
from typing import Any

from headrace_common.blocks import salt_text
from headrace_common.errors import InvalidRequest, ModelNotFound, Unimplemented
from headrace_contracts.worker.v1 import worker_pb2 as pb

Json = dict[str, Any]  # Any: JSON values


def check_request(request: pb.GenerateRequest, served_name: str) -> None:
    """Refuse what cannot be passed on.

    Raises:
        ModelNotFound: another model, or an adapter.
        InvalidRequest: no text.
        Unimplemented: an upstream cannot do it.
    """
    if request.model != served_name:
        raise ModelNotFound(f"Model {request.model!r} is not served here.", param="model")
    if request.adapter:
        raise ModelNotFound(f"Adapter {request.adapter!r} is not loaded here.", param="adapter")
    if not request.HasField("text"):
        raise InvalidRequest("This engine takes text, not token ids.", param="prompt_token_ids")
    if request.resume:
        raise Unimplemented("This engine cannot take over a stream.", param="resume")
    if request.logprobs.prompt:
        raise InvalidRequest(
            "This model does not tell log probabilities of the prompt.", param="prompt_logprobs"
        )
    if any(it.WhichOneof("text") for it in request.constraint.tool_calls.functions):
        raise InvalidRequest(
            "This model cannot be held to a grammar in what it tells a tool.", param="constraint"
        )
    if request.HasField("kv_source"):
        raise Unimplemented("This engine cannot take KV blocks.", param="kv_source")


def path_of(request: pb.GenerateRequest) -> str:
    """Return the endpoint under the server's base URL."""
    return "/chat/completions" if request.text.messages_json else "/completions"


def body_of(
    request: pb.GenerateRequest,
    model: str,
    *,
    continuous_usage: bool = False,
    cache_salt: bool = False,
) -> Json:
    """Return the JSON body.

    Args:
        request: checked.
        model: the upstream's own name.
        continuous_usage: ask for counts with each event.
        cache_salt: keep tenants apart in the upstream's prefix cache.

    Raises:
        InvalidRequest: a constraint has no spelling there.
    """
    is_chat = bool(request.text.messages_json)
    options = {"include_usage": True}
    if continuous_usage:
        options["continuous_usage_stats"] = True
    body: Json = {
        "model": model,
        "stream": True,
        "stream_options": options,
        "max_tokens": request.stopping.max_tokens,
        **_defaultable(request),
        **_sampling(request),
        **_stopping(request.stopping),
        **_logprobs(request.logprobs, is_chat=is_chat),
        **_constraint(request.constraint),
    }
    if cache_salt and request.cache_salt:
        body["cache_salt"] = salt_text(request.cache_salt)
    if is_chat:
        body["messages"] = [_message(it) for it in json.loads(request.text.messages_json)]
        body |= _tools(request)
        if request.text.template_args_json:
            body |= _template_args(json.loads(request.text.template_args_json))
    else:
        body["prompt"] = request.text.prompt
    return body


def _defaultable(request: pb.GenerateRequest) -> Json:
    """Return what servers have a model's own defaults for: what the client named, as it did."""
    if request.text.HasField("named_sampling"):
        named = {field.name: value for field, value in request.text.named_sampling.ListFields()}
        if named.get("top_k") == 0:
            named["top_k"] = -1  # "off" to all of them; SGLang refuses 0
        return named
    sampling = request.sampling
    optional: Json = {
        "top_p": sampling.top_p if 0 < sampling.top_p < 1 else None,
        "top_k": sampling.top_k or None,
        "min_p": sampling.min_p or None,
        "repetition_penalty": (
            sampling.repetition_penalty if sampling.repetition_penalty not in (0, 1) else None
        ),
    }
    return {"temperature": sampling.temperature, **_given(optional)}


def _sampling(request: pb.GenerateRequest) -> Json:
    sampling = request.sampling
    optional: Json = {
        "n": request.n if request.n > 1 else None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "presence_penalty": sampling.presence_penalty or None,
        "logit_bias": {str(k): v for k, v in sampling.logit_bias.items()} or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "seed": request.seed if request.client_seed else None,
    }
    return _given(optional)


def _stopping(stopping: pb.Stopping) -> Json:
    return _given(
        {
            "stop": list(stopping.stop) or None,
            "min_tokens": stopping.min_tokens or None,
            "stop_token_ids": list(stopping.stop_token_ids) or None,
            "ignore_eos": stopping.ignore_eos or None,
        }
    )


def _logprobs(wanted: pb.LogprobOptions, *, is_chat: bool) -> Json:
    if not wanted.output:
        return {}
    return {"logprobs": True, "top_logprobs": wanted.top} if is_chat else {"logprobs": wanted.top}


def _constraint(constraint: pb.OutputConstraint) -> Json:
    match constraint.WhichOneof("kind"):
        case None:
            return {}
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            schema = json.loads(constraint.json_schema)
            named = {"name": "answer", "schema": schema, "strict": not constraint.lenient}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        case "choice":
            return {"structured_outputs": {"choice": list(constraint.choice.texts)}}
        case kind:
            return {"structured_outputs": {kind: getattr(constraint, kind)}}


def _tools(request: pb.GenerateRequest) -> Json:
    if not request.text.tools_json:
        return {}
    tools, rules = json.loads(request.text.tools_json), request.constraint.tool_calls
    names = {function.name for function in rules.functions}
    callable_tools = [tool for tool in tools if not names or tool["function"]["name"] in names]
    said: Json = {"tools": callable_tools}
    if rules.required:
        only = callable_tools[0]["function"]["name"] if len(callable_tools) == 1 else ""
        named = {"type": "function", "function": {"name": only}}
        said["tool_choice"] = named if only else "required"
    if rules.max_calls == 1:
        said["parallel_tool_calls"] = False
    return said


def _template_args(args: Json) -> Json:
    effort = args.pop("reasoning_effort", None)
    return _given({"reasoning_effort": effort, "chat_template_kwargs": args or None})


def _message(message: Json) -> Json:
    """Calls' arguments are objects here and JSON texts over there."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _given(optional: Json) -> Json:
    return {name: value for name, value in optional.items() if value is not None}
