"""From a name to a model, without any I/O."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import orjson
import pytest
from prometheus_client import CollectorRegistry

from headrace_common.errors import (
    ContextTooLong,
    Deadline,
    GuardUnavailable,
    HeadraceError,
    ModelNotAllowed,
    NoReplica,
    QueueFull,
    RateLimited,
)
from headrace_common.settings import SettingsError
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.model_routes.choice import ModelRoutes, failure_kind, sticky_key
from headrace_gateway.model_routes.route_file import RouteFile, load_route_file
from headrace_gateway.model_routes.route_watch import RouteWatch
from headrace_gateway.openai_schema import parse_chat
from headrace_gateway.principal import Principal

ANYONE = Principal(tenant_id="t", key_id="k")
SPLIT = {"split": [{"model": "a", "weight": 3}, {"model": "b", "weight": 1}], "seed": "s"}


def routes(**sections: object) -> ModelRoutes:
    return ModelRoutes(RouteFile.model_validate({"version": 1, "routes": sections}), "r1")


def drawn(made: ModelRoutes, by: str, principal: Principal = ANYONE) -> str:
    return made.choose("chat", principal, lambda _sticky: by).model


def test_a_split_draws_by_weight_and_keeps_to_it() -> None:
    """Three quarters go to a; a conversation never changes; a new weight moves only one way."""
    made = routes(chat=SPLIT)
    first = {f"c{idx}": drawn(made, f"c{idx}") for idx in range(2000)}
    assert 1400 < Counter(first.values())["a"] < 1600
    assert all(drawn(made, by) == model for by, model in list(first.items())[:50])
    shifted = routes(chat={**SPLIT, "split": [{"model": "a", "weight": 1}, *SPLIT["split"][1:]]})
    moved = {by for by, model in first.items() if drawn(shifted, by) != model}
    assert moved
    assert all(first[by] == "a" for by in moved)
    other = routes(chat={**SPLIT, "seed": "another"})
    assert any(drawn(other, by) != model for by, model in first.items())


def test_a_key_may_use_a_route_by_its_name_or_by_its_models() -> None:
    """Listing the alias opens all it leads to; listing a model opens that share of the route."""
    made = routes(chat={**SPLIT, "fallbacks": ["c"]})
    by_name = made.choose("chat", Principal(allowed_models=["chat"]), lambda _: "x")
    assert by_name.spares == ("c",)
    only_b = Principal(allowed_models=["b"])
    assert {drawn(made, f"c{idx}", only_b) for idx in range(20)} == {"b"}
    assert made.choose("chat", only_b, lambda _: "x").spares == ()
    # A fallback alone opens nothing, and an alias does not open its model's own name.
    for allowed, name in ((["c"], "chat"), (["chat"], "a"), (["z"], "chat")):
        with pytest.raises(ModelNotAllowed):
            made.choose(name, Principal(allowed_models=allowed), lambda _: "x")


def test_a_conversation_is_known_by_its_beginning() -> None:
    """Further turns change nothing; another first message, tenant or cache key does."""

    def key(*texts: str, tenant: str = "t", **fields: object) -> str:
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        request = parse_chat(orjson.dumps({"model": "m", "messages": messages, **fields}))
        return sticky_key(request, Principal(tenant_id=tenant, key_id="k"), "req", "conversation")

    assert key("hi") == key("hi", "hello", "and now?")
    assert len({key("hi"), key("ho"), key("hi", tenant="u"), key("hi", prompt_cache_key="c")}) == 4
    assert key("hi", prompt_cache_key="c") == key("ho", prompt_cache_key="c")
    request = parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}')
    assert [sticky_key(request, ANYONE, "req", by) for by in ("key", "request")] == ["k", "req"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoReplica(""), "unavailable"),
        (QueueFull(""), "overloaded"),
        (Deadline(""), "timeout"),
        (GuardUnavailable(""), ""),
        (ContextTooLong(""), ""),
        (RateLimited(""), ""),
    ],
)
def test_only_the_models_own_failures_lead_on(error: HeadraceError, kind: str) -> None:
    """Never on what the caller did, and never to get round the guard or a limit."""
    assert failure_kind(error) == kind
    made = routes(chat={"model": "a", "fallbacks": ["b"], "fallback_on": ["overloaded"]})
    choice = made.choose("chat", ANYONE, lambda _: "")
    assert choice.may_leave(error) is (kind == "overloaded")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("routes = {}", "version"),
        ("version = 1\n[routes.x]", "either model or split"),
        ('version = 1\n[routes.x]\nmodel = "a"\n[routes.y]\nmodel = "x"', "route too"),
        ('version = 1\n[routes.x]\nmodel = "a"\nfallback = ["b"]', "Extra inputs"),
        ('version = 1\n[routes.x]\nsplit = [{model = "a", weight = 0}]', "greater than 0"),
        ("version = 1\n[routes.x", "TOML"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, text: str, why: str) -> None:
    """In the words of whoever wrote it: what, and where."""
    path = tmp_path / "routes.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match="model routes") as failure:
        load_route_file(path)
    assert why in str(failure.value) or why == "TOML"


def test_a_bad_change_leaves_the_former_routes(tmp_path: Path) -> None:
    """It is counted and told; the next good content is taken. A file that goes is a bad change."""
    path, registry = tmp_path / "routes.toml", CollectorRegistry()
    watch = RouteWatch(path, GatewayMetrics(registry))
    assert watch.routes.names == ()
    path.write_text('version = 1\nrevision = "one"\n[routes.x]\nmodel = "a"')
    assert watch.reload().outcome == "taken"
    path.write_text("version = 2")
    refused = watch.reload()
    assert (refused.outcome, refused.revision) == ("refused", "one")
    assert "version" in refused.error
    assert watch.routes.names == ("x",)
    assert watch.standing.error == refused.error
    path.write_text('version = 1\n[routes.y]\nmodel = "a"')
    assert watch.reload().outcome == "taken"
    assert watch.routes.names == ("y",)
    path.unlink()
    refused = watch.reload()
    assert refused.outcome == "refused"
    assert "No such file" in refused.error
    assert watch.routes.names == ("y",)
    path.write_text("version = 1")
    assert watch.reload().outcome == "taken"
    assert watch.routes.names == ()
    counted = registry.get_sample_value
    assert counted("headrace_gateway_route_reloads_total", {"outcome": "refused"}) == 2
