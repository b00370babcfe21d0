"""/v1/moderations: the guard's scores in OpenAI's shape.

OpenAI's categories are filled from the guard's (MLCommons hazards and toxicity); the guard's own
(injection, pii.*, secret.*) come beside them under their own names. A text that could not be judged
in full makes the call fail: no score is made up. A call counts as one request against the limits
of its key, and costs nothing.

There is one guard. It answers to OpenAI's names, which SDKs send, and to its own, with or without
the version that answers show; /v1/models lists none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import orjson

from headrace_common.errors import (
    GuardUnavailable,
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
)
from headrace_contracts.guard.v1.guard_pb2 import ModerateRequest, ModerateResponse, TextScores
from headrace_gateway.admission import Admission
from headrace_gateway.json_body import decode
from headrace_gateway.visit import Caller

# OpenAI's category: the guard's that make it up, the highest score counts.
OPENAI_CATEGORIES: Mapping[str, tuple[str, ...]] = {
    "harassment": ("toxicity",),
    "harassment/threatening": ("harm.S1",),
    "hate": ("harm.S10",),
    "hate/threatening": ("harm.S10",),
    "illicit": ("harm.S2",),
    "illicit/violent": ("harm.S1", "harm.S9"),
    "self-harm": ("harm.S11",),
    "self-harm/instructions": ("harm.S11",),
    "self-harm/intent": ("harm.S11",),
    "sexual": ("harm.S12", "harm.S3"),
    "sexual/minors": ("harm.S4",),
    "violence": ("harm.S1", "harm.S9"),
    "violence/graphic": ("harm.S1",),
}
MAX_INPUTS = 128
_OWN_NAME = "headrace-guard"
_NAMES = frozenset(
    {
        _OWN_NAME,
        "omni-moderation-latest",
        "omni-moderation-2024-09-26",
        "text-moderation-latest",
        "text-moderation-stable",
    }
)


class ModerationText(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    """A text to be judged."""

    text: str


class ModerationImage(msgspec.Struct, tag="image_url"):
    """An image; refused."""


class ModerationBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/moderations."""

    input: str | list[str | ModerationText | ModerationImage]
    model: str | None = None


_DECODER = msgspec.json.Decoder(ModerationBody)


class Moderator(Protocol):
    """What the guard offers here."""

    async def moderate(self, request: ModerateRequest) -> ModerateResponse:
        """Score texts by category."""
        ...


class Moderations:
    """Answers the endpoint.

    Args:
        guard: scores.
        admission: checks the key's limits.
    """

    def __init__(self, guard: Moderator, admission: Admission) -> None:
        self._guard, self._admission = guard, admission

    async def __call__(self, caller: Caller, body: bytes) -> bytes:
        """Return the scores as JSON."""
        asked = decode(_DECODER, body)
        texts = _texts(asked)
        if asked.model is not None and not _is_name(asked.model):
            raise _no_model(asked.model)
        async with self._admission.one_request(caller):
            answer = await self._scores(caller, texts)
        if asked.model is not None and asked.model not in (*_NAMES, _versioned(answer)):
            # A version that is not in force: its scores would not be those that were asked for.
            raise _no_model(asked.model)
        return orjson.dumps(_answer(caller.request_id, answer))

    async def _scores(self, caller: Caller, texts: list[str]) -> ModerateResponse:
        asked = ModerateRequest(
            tenant_id=caller.principal.tenant_id,
            key_id=caller.principal.key_id,
            request_id=caller.request_id,
            texts=texts,
        )
        try:
            answer = await self._guard.moderate(asked)
        except InvalidRequest:
            raise
        except HeadraceError as error:
            raise _unavailable() from error
        for result in answer.results:
            if result.not_evaluated:
                raise _unavailable(f": {result.not_evaluated}")
        return answer


def _is_name(model: str) -> bool:
    return model in _NAMES or model.startswith(f"{_OWN_NAME}/")


def _versioned(answer: ModerateResponse) -> str:
    return f"{_OWN_NAME}/{answer.model_version}".rstrip("/")


def _no_model(model: str) -> ModelNotFound:
    return ModelNotFound(f"The model {model[:100]!r} does not exist.", param="model")


def _unavailable(why: str = "") -> GuardUnavailable:
    return GuardUnavailable(f"The content cannot be judged in full now{why}.", retry_after_s=1.0)


def _texts(body: ModerationBody) -> list[str]:
    given = [body.input] if isinstance(body.input, str) else body.input
    if not 0 < len(given) <= MAX_INPUTS:
        raise InvalidRequest(f"input must hold 1 to {MAX_INPUTS} texts.", param="input")
    texts: list[str] = []
    for idx, one in enumerate(given):
        if isinstance(one, ModerationImage):
            raise InvalidRequest("Images are not supported yet.", param=f"input[{idx}]")
        texts.append(one if isinstance(one, str) else one.text)
    return texts


def _answer(request_id: str, answer: ModerateResponse) -> dict[str, Any]:  # Any: JSON
    return {
        "id": "modr-" + request_id.removeprefix("req_"),
        "model": _versioned(answer),
        "results": [_result(scores) for scores in answer.results],
    }


def _result(result: TextScores) -> dict[str, Any]:  # Any: JSON
    flagged = set(result.flagged)
    scores = {
        name: max(result.scores.get(source, 0.0) for source in sources)
        for name, sources in OPENAI_CATEGORIES.items()
    }
    hits = {name: not flagged.isdisjoint(sources) for name, sources in OPENAI_CATEGORIES.items()}
    own = sorted(result.scores)
    return {
        "flagged": bool(flagged),
        "categories": hits | {name: name in flagged for name in own},
        "category_scores": scores | {name: result.scores[name] for name in own},
        "category_applied_input_types": {name: ["text"] for name in OPENAI_CATEGORIES},
    }
