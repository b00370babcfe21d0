"""Finds the model behind a name: the routes in force, over the models that workers serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace_common.errors import HeadraceError, ModelNotFound, NoReplica, Unavailable
from headrace_contracts.worker.v1.worker_pb2 import ModelCard
from headrace_gateway.answer_extras import Json
from headrace_gateway.api_request import ApiRequest
from headrace_gateway.auth import check_model_allowed
from headrace_gateway.model_directory import ModelDirectory, ServedModel
from headrace_gateway.model_routes.cascade import asked_text
from headrace_gateway.model_routes.choice import ModelChoice, sticky_key, usable_targets
from headrace_gateway.model_routes.route_watch import RouteWatch
from headrace_gateway.principal import Principal
from headrace_gateway.sampling_defaults import SamplingDefaults

_T = TypeVar("_T")


class ModelNames:
    """All names that a client may put into `model`. Belongs to one event loop.

    Args:
        directory: the models that there are.
        watch: the routes in force.
    """

    def __init__(self, directory: ModelDirectory, watch: RouteWatch) -> None:
        self._directory, self._watch = directory, watch

    async def choose(
        self, request: ApiRequest, principal: Principal, request_id: str
    ) -> tuple[ModelChoice, ServedModel]:
        """Return who serves a request. Models that are not there are passed over.

        Raises:
            ModelNotFound: there is no such model.
            ModelNotAllowed: the key may not use it.
            Unavailable: it is not there now.
        """
        return await self._once_known(lambda: self._choose(request, principal, request_id))

    def _choose(
        self, request: ApiRequest, principal: Principal, request_id: str
    ) -> tuple[ModelChoice, ServedModel]:
        if self._watch.routes.get(request.model) is None:
            model = self._directory.get(request.model)
            check_model_allowed(principal, request.model)
            return ModelChoice(request.model, request.model), model
        choice = self._watch.routes.choose(
            request.model,
            principal,
            lambda by: sticky_key(request, principal, request_id, by),
            lambda: asked_text(request.messages, request.prompts),
        )
        while True:
            try:
                return choice, self._directory.get(choice.model)
            except HeadraceError as error:
                if not choice.may_leave(error):
                    raise _not_there(error, choice.asked) from error
                choice.next_model(error)

    async def find(self, name: str, principal: Principal) -> ServedModel:
        """Return a model for questions about its tokens: of a split, what its key would get."""
        return await self._once_known(lambda: self._find(name, principal))

    def _find(self, name: str, principal: Principal) -> ServedModel:
        if self._watch.routes.get(name) is None:
            model = self._directory.get(name)
            check_model_allowed(principal, name)
            return model
        choice = self._watch.routes.choose(name, principal, lambda _by: principal.key_id)
        try:
            return self._directory.get(choice.model)
        except HeadraceError as error:
            raise _not_there(error, name) from error

    async def check(self, name: str, principal: Principal) -> None:
        """Raise unless the key may use a name that exists; whether a replica is there, or not.

        Raises:
            ModelNotFound: there is no such model.
            ModelNotAllowed: the key may not use it.
        """
        await self._once_known(lambda: self._check(name, principal))

    def _check(self, name: str, principal: Principal) -> None:
        if self._watch.routes.get(name) is None:
            self._directory.get(name)
        self._watch.routes.choose(name, principal, lambda _by: "")

    def get(self, model: str) -> ServedModel:
        """Return a model by its own name; raises as the directory does."""
        return self._directory.get(model)

    async def _once_known(self, look: Callable[[], _T]) -> _T:
        """Look again while what is missing may be on its way: a start is no reason to refuse."""
        while True:
            try:
                return look()
            except (ModelNotFound, Unavailable):
                if not await self._directory.until_news():
                    raise

    async def listed(self, principal: Principal) -> list[Json]:
        """Return what the key may use, models and routes, by name."""
        while not self._directory.cards() and await self._directory.until_news():
            continue
        cards = {card.model: card for card in self._directory.cards()}
        shown = {
            name: _model(card)
            for name, card in cards.items()
            if not principal.allowed_models or name in principal.allowed_models
        }
        for name, route in self._watch.routes.items():
            targets = usable_targets(name, route, principal)
            known = [cards[target] for target in targets if target in cards]
            if known:
                shown[name] = _route(name, route.kind, targets, known)
        return [shown[name] for name in sorted(shown)]


def _not_there(error: HeadraceError, asked: str) -> HeadraceError:
    """Tell it by the name that the client knows."""
    if isinstance(error, ModelNotFound):
        return NoReplica(f"No replica serves {asked[:100]!r} now.", retry_after_s=1.0)
    return error


def _route(name: str, kind: str, targets: Sequence[str], known: Sequence[ModelCard]) -> Json:
    """Show a route as the smallest context that it may lead to."""
    defaults = [SamplingDefaults(card).shown for card in known]
    return {
        **_model(min(known, key=lambda card: card.context_tokens)),
        "id": name,
        "route": {"kind": kind, "models": list(targets)},
        # None = it depends on the model that answers.
        "default_parameters": defaults[0] if defaults[1:] == defaults[:-1] else None,
    }


def _model(card: ModelCard) -> Json:
    return {
        "id": card.model,
        "object": "model",
        "created": card.created_unix_s,
        "owned_by": "headrace",
        "context_window": card.context_tokens,
        "max_model_len": card.context_tokens,
        "default_parameters": SamplingDefaults(card).shown,
    }
