"""/v1/moderations over HTTP, and the reports of what was sent."""

from headrace_contracts.guard.v1.guard_pb2 import SentReport
from headrace_gateway.moderations import OPENAI_CATEGORIES
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually


async def test_the_sdk_reads_scores(fleet: GatewayFleet) -> None:
    """OpenAI's categories are all there, the guard's own beside them."""
    fleet.guard.blocklist = ["heron"]
    async with fleet.openai() as client:
        answer = await client.moderations.create(input=["a heron", "a stork"])
    assert answer.id.startswith("modr-")
    assert [result.flagged for result in answer.results] == [True, False]
    raw = answer.model_dump(by_alias=True)["results"][0]
    assert set(OPENAI_CATEGORIES) <= set(raw["categories"])
    assert raw["category_scores"]["blocklist"] == 1.0
    assert raw["categories"]["blocklist"] is True


async def test_text_parts_are_taken_and_images_refused(fleet: GatewayFleet) -> None:
    """No picture is called harmless unseen."""
    async with fleet.http() as client:
        part = {"type": "text", "text": "hi"}
        ok = await client.post("/v1/moderations", json={"input": [part]})
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
        refused = await client.post("/v1/moderations", json={"input": [part, image]})
    assert ok.status_code == 200
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input[1]"


async def test_what_could_not_be_judged_has_no_scores(fleet: GatewayFleet) -> None:
    """503, not zeros, and why."""
    fleet.guard.switches.cannot_look = True
    async with fleet.http() as client:
        answer = await client.post("/v1/moderations", json={"input": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "guard_unavailable")
    assert answer.json()["error"]["message"].startswith(
        "The content cannot be judged in full now: told so."
    )


async def test_wrong_inputs_and_keys_are_refused(fleet: GatewayFleet) -> None:
    """As everywhere."""
    async with fleet.http() as client:
        for body in ({}, {"input": []}, {"input": "x", "other": 1}, {"input": ["x"] * 129}):
            assert (await client.post("/v1/moderations", json=body)).status_code == 400
    async with fleet.http("wrong") as client:
        assert (await client.post("/v1/moderations", json={"input": "x"})).status_code == 401
    assert not fleet.limiter.live_leases()


async def test_the_guard_has_names_and_no_others(fleet: GatewayFleet) -> None:
    """OpenAI's and its own; any other is 404, as at the other endpoints."""
    async with fleet.http() as client:
        unnamed = await client.post("/v1/moderations", json={"input": "x"})
        own = unnamed.json()["model"]
        assert own.startswith("headrace-guard/")
        for model in ("omni-moderation-latest", "text-moderation-stable", "headrace-guard", own):
            answer = await client.post("/v1/moderations", json={"input": "x", "model": model})
            assert (answer.status_code, answer.json()["model"]) == (200, own)
        for model in ("gpt-4o", MODEL, "", "headrace-guard/other", "omni-moderation"):
            answer = await client.post("/v1/moderations", json={"input": "x", "model": model})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (
                404,
                "model_not_found",
                "model",
            )
        listed = (await client.get("/v1/models")).json()["data"]
    assert not any("moderation" in model["id"] or "guard" in model["id"] for model in listed)
    assert not fleet.limiter.live_leases()


async def test_a_call_counts_as_a_request(fleet: GatewayFleet) -> None:
    """It is admitted and settled like any other."""
    async with fleet.http() as client:
        answer = await client.post("/v1/moderations", json={"input": "x"})
    amounts = fleet.settled_amounts(answer.headers["x-request-id"])
    assert (amounts.requests, amounts.input_tokens) == (1, 0)


async def test_what_was_sent_is_reported(fleet: GatewayFleet) -> None:
    """Streamed or whole, the guard learns how many characters went out."""
    async with fleet.http() as client:
        for stream in (False, True):
            body = chat_body("hello there", stream=stream, model=MODEL)
            answer = await client.post("/v1/chat/completions", json=body)
            request_id = answer.headers["x-request-id"]

            def report(request_id: str = request_id) -> SentReport | None:
                found = (it for it in fleet.guard.reports if it.request_id == request_id)
                return next(found, None)

            sent = await eventually(report)
            assert sent.sent_chars > 0
            assert not sent.fail_open
            if not stream:
                text = answer.json()["choices"][0]["message"]["content"]
                assert sent.sent_chars == len(text)
            assert dict(sent.sent_chars_by_choice) == {0: sent.sent_chars}


async def test_reports_wait_for_the_guard_and_tell_what_went_unguarded(
    fleet: GatewayFleet,
) -> None:
    """Under a fail-open key the answer goes out, and the guard hears of it later."""
    key, _ = fleet.new_key(guard_fail_open=True)
    await fleet.guard_server.kill()
    async with fleet.http(key) as client:
        answer = await client.post("/v1/chat/completions", json=chat_body("hello"))
    assert answer.status_code == 200
    await fleet.guard_server.start()
    await eventually(lambda: fleet.guard.reports)
    (report,) = fleet.guard.reports
    assert report.fail_open
    assert report.sent_chars > 0
