"""/v1/usage: a key sees its own, a key of the scope `usage` its tenant's."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.usage_events import ADMITTED_UNIX_US, AMOUNT_NANO_USD, MODEL, closed

START = ADMITTED_UNIX_US // 1_000_000 - 3600


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[GatewayFleet]:
    fleet = GatewayFleet(tmp_path)
    await fleet.start()
    yield fleet
    await fleet.close()


async def ask(fleet: GatewayFleet, api_key: str, **query: object) -> tuple[int, dict]:  # type: ignore[type-arg]
    headers = {"authorization": f"Bearer {api_key}"}
    async with fleet.http() as http:
        answer = await http.get("/v1/usage", params=query, headers=headers)  # type: ignore[arg-type]
    return answer.status_code, answer.json()


async def test_each_key_sees_what_it_may(fleet: GatewayFleet) -> None:
    """Sums by day and model; nobody sees another tenant."""
    tenant = fleet.key.tenant_id
    all_seeing, other = fleet.billing.create_key(tenant, scopes=["usage"])
    fleet.billing.book(closed("req_1", tenant, fleet.key.key_id))
    fleet.billing.book(closed("req_2", tenant, other.key_id))
    fleet.billing.book(closed("req_3", "zeta", "key_z"))
    query = {"start_time": START, "end_time": START + 7200}
    status, own = await ask(fleet, fleet.api_key, **query)
    assert status == 200
    (row,) = own["data"]
    assert (row["model"], row["num_requests"]) == (MODEL, 1)
    assert (row["input_tokens"], row["input_cached_tokens"], row["output_tokens"]) == (100, 40, 30)
    assert row["amount_nano_usd"] == AMOUNT_NANO_USD
    _, everything = await ask(fleet, all_seeing, group_by="api_key_id", **query)
    assert [it["num_requests"] for it in everything["data"]] == [1, 1]
    _, page = await ask(fleet, all_seeing, group_by="api_key_id", limit=1, **query)
    assert (page["has_more"], page["next_page"]) == (True, 1)


async def test_wrong_questions_are_refused(fleet: GatewayFleet) -> None:
    """No key, a wrong group, times the wrong way round."""
    assert (await ask(fleet, "sk-hr-wrong"))[0] == 401
    assert (await ask(fleet, fleet.api_key, group_by="colour"))[0] == 400
    noon, midnight = 86_400 * 20_000 + 43_200, 86_400 * 20_000
    turned = ((START, 5), (noon + 60, noon), (noon, noon), (midnight, midnight), (0, 0))
    for start, end in turned:
        status, refused = await ask(fleet, fleet.api_key, start_time=start, end_time=end)
        assert (status, refused["error"]["param"]) == (400, "start_time"), (start, end)
    assert (await ask(fleet, fleet.api_key, start_time=noon, end_time=noon + 60))[0] == 200
    assert (await ask(fleet, fleet.api_key, end_time=0))[0] == 400
    assert (await ask(fleet, fleet.api_key, start_time=0))[0] == 400
    assert (await ask(fleet, fleet.api_key, limit=0))[0] == 400
    status, nothing = await ask(fleet, fleet.api_key)
    assert (status, nothing["data"]) == (200, [])


async def test_a_key_for_something_else_serves_no_requests(fleet: GatewayFleet) -> None:
    """Scopes that are named are all there are."""
    api_key, _ = fleet.billing.create_key(scopes=["usage"])
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    headers = {"authorization": f"Bearer {api_key}"}
    async with fleet.http() as http:
        models = (await http.get("/v1/models", headers=headers)).json()
        body["model"] = models["data"][0]["id"]
        answer = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 403
    assert "scope" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "missing_scope"
