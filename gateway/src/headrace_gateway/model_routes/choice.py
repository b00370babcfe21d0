"""Pure: from the name in a request to the model that serves it, and to those that may step in.

A split is drawn by weighted rendezvous hashing (Schindelhauer, Schomaker 2005: -ln(u) / weight): a
conversation keeps its variant, and a change of weights moves only as many as it must.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, ItemsView, Mapping
from dataclasses import dataclass, field

from headrace_common.errors import (
    Deadline,
    GuardUnavailable,
    HeadraceError,
    ModelNotAllowed,
    ModelNotFound,
    QueueFull,
    Unavailable,
)
from headrace_gateway.answer_extras import Json
from headrace_gateway.api_request import ApiRequest
from headrace_gateway.auth import check_model_allowed
from headrace_gateway.model_routes.cascade import Cascade
from headrace_gateway.model_routes.route_file import RouteFile, RouteSection
from headrace_gateway.principal import Principal

_HASHED_CHARS = 200


@dataclass(slots=True)
class ModelChoice:
    """How a request's model was found, and what is left to try.

    Args:
        asked: the name in the request.
        model: who serves it now.
        kind: direct, alias, split or cascade.
        revision: of the file of routes; empty for direct.
        spares: models to fall back to, in order.
        fallback_on: failures that let it fall back.
        start_timeout_s: while spares are left, a model must have begun by then.
        reasons: further facts for the request's story.
    """

    asked: str
    model: str
    kind: str = "direct"
    revision: str = ""
    spares: tuple[str, ...] = ()
    fallback_on: frozenset[str] = frozenset()
    start_timeout_s: float | None = None
    reasons: Json = field(default_factory=dict)
    # Models that could not answer, and why.
    failed: list[tuple[str, str]] = field(default_factory=list)

    def may_leave(self, error: HeadraceError) -> bool:
        """Whether this failure is one to try another model for."""
        return bool(self.spares) and failure_kind(error) in self.fallback_on

    def next_model(self, error: HeadraceError) -> str:
        """Note the failure and move on to the next model."""
        self.failed.append((self.model, error.reason))
        self.model, self.spares = self.spares[0], self.spares[1:]
        return self.model

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Tell the client which model serves it, by which route."""
        return [
            (b"x-headrace-model", self.model.encode()),
            (b"x-headrace-route", self._route_header().encode()),
            *([(b"x-headrace-fallback", b"%d" % len(self.failed))] if self.failed else []),
        ]

    def _route_header(self) -> str:
        score = self.reasons.get("cascade", {}).get("score")
        return f"{self.asked}; kind={self.kind}" + ("" if score is None else f"; score={score}")

    def story(self) -> Json:
        """Tell it to the request's owner."""
        return {
            "asked": self.asked,
            "kind": self.kind,
            "model": self.model,
            "revision": self.revision or None,
            "failed": [{"model": model, "reason": reason} for model, reason in self.failed],
            **self.reasons,
        }


def failure_kind(error: HeadraceError) -> str:
    """Name what went wrong with a model; empty = it was not the model's fault."""
    if isinstance(error, GuardUnavailable):
        return ""
    if isinstance(error, QueueFull):
        return "overloaded"
    if isinstance(error, Deadline):
        return "timeout"
    return "unavailable" if isinstance(error, Unavailable | ModelNotFound) else ""


class ModelRoutes:
    """One content of the file.

    Args:
        file: checked.
        revision: its name.
        cascades: those of its routes that are one, ready.
    """

    def __init__(
        self, file: RouteFile, revision: str, cascades: Mapping[str, Cascade] | None = None
    ) -> None:
        self._routes, self.revision = file.routes, revision
        self._cascades = cascades or {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all routes, in order."""
        return tuple(sorted(self._routes))

    def items(self) -> ItemsView[str, RouteSection]:
        """Return every route with its name."""
        return self._routes.items()

    def get(self, name: str) -> RouteSection | None:
        """Return a route; None = the name is a model's own."""
        return self._routes.get(name)

    def choose(
        self,
        name: str,
        principal: Principal,
        sticky_of: Callable[[str], str],
        text_of: Callable[[], str] = str,
    ) -> ModelChoice:
        """Find the model for a name.

        Args:
            name: as the client wrote it.
            principal: whose key asks.
            sticky_of: returns what a draw is made by, from the route's `sticky`.
            text_of: returns what is asked, for a cascade.

        Raises:
            ModelNotAllowed: the key may use neither the route nor a model that it leads to.
        """
        route = self._routes.get(name)
        if route is None:
            check_model_allowed(principal, name)
            return ModelChoice(name, name)
        allowed = usable_targets(name, route, principal)
        weights = {model: weight for model, weight in route.weights.items() if model in allowed}
        if not weights:
            raise ModelNotAllowed(f"This API key may not use the model {name!r}.", param="model")
        reasons: Json = {}
        cascade = self._cascades.get(name)
        if cascade is not None and len(weights) > 1:
            first, reasons = cascade.choose(text_of)
        else:
            first = draw(weights, lambda: f"{route.seed}|{name}|{sticky_of(route.sticky)}")
        spares = dict.fromkeys(it for it in route.fallbacks if it in allowed and it != first)
        return ModelChoice(
            asked=name,
            model=first,
            kind=route.kind,
            revision=self.revision,
            spares=tuple(spares),
            fallback_on=route.fallback_on,
            start_timeout_s=route.start_timeout_s,
            reasons=reasons,
        )


def usable_targets(name: str, route: RouteSection, principal: Principal) -> tuple[str, ...]:
    """Return which of a route's models a key may use through it.

    A key that lists the route's name may use all of them; else it may use those that it lists.
    """
    if not principal.allowed_models or name in principal.allowed_models:
        return route.targets
    return tuple(it for it in route.targets if it in principal.allowed_models)


def draw(weights: dict[str, float], by_what: Callable[[], str]) -> str:
    """Return one name, by its weight; the same for the same text, asked for only if it matters."""
    if len(weights) == 1:
        return next(iter(weights))
    by = by_what()

    def score(name: str) -> float:
        digest = hashlib.blake2b(f"{by}|{name}".encode(), digest_size=8).digest()
        uniform = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
        return -math.log(uniform) / weights[name]

    return min(sorted(weights), key=score)


def sticky_key(request: ApiRequest, principal: Principal, request_id: str, by: str) -> str:
    """Return what a request is drawn by.

    A conversation is known by the client's own cache key, else by all that stands in it up to the
    first answer; a prompt, which grows at its end, by its beginning.
    """
    if by == "request":
        return request_id
    if by == "key":
        return principal.key_id
    if request.session_id:
        return f"{principal.tenant_id}|{request.session_id}"
    texts = []
    for message in request.messages:
        if message["role"] == "assistant":
            break
        texts.append(str(message["content"]))
    texts += [str(prompt[:_HASHED_CHARS]) for prompt in request.prompts[:1]]
    digest = hashlib.blake2b("\x00".join(texts).encode("utf-8", "replace"), digest_size=16)
    return f"{principal.tenant_id}|{digest.hexdigest()}"
