"""A cascade: features, the rule that switches it off, and its way through the API."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from headrace_common.settings import SettingsError
from headrace_gateway.model_routes.cascade import (
    BITS,
    Cascade,
    CascadeHead,
    CascadeSection,
    HeadFile,
    features,
    load_head,
)
from headrace_testing.fake_worker import MODEL, FakeWorker, saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually

MEASURED = {
    "small": MODEL, "large": "big", "num_tasks": 500, "small_ratio": 0.5, "large_ratio": 0.7,
    "oracle_ratio": 0.8, "cascade_ratio": 0.68, "large_share_ratio": 0.4, "gain_ratio": 0.1,
    "gain_low_ratio": 0.05, "gain_high_ratio": 0.15, "threshold": 0.6,
}  # fmt: skip


def head_file(**measured: object) -> dict[str, Any]:
    """A head that knows one thing: "prove" is for the large model."""
    weights = bytearray(1 << BITS)
    for bucket in set(features("prove")) - set(features("hi")):
        weights[bucket] = 127
    return {
        "version": 1, "bits": BITS, "bias": -1.0, "scale": 0.1,
        "weights": base64.b64encode(bytes(weights)).decode(),
        "measured": {**MEASURED, **measured},
    }  # fmt: skip


def cascade(large: str = "big", threshold: float | None = None, **measured: object) -> Cascade:
    section = CascadeSection(small=MODEL, large=large, threshold=threshold)
    return Cascade(section, CascadeHead(HeadFile.model_validate(head_file(**measured))))


def test_numbers_count_by_their_length() -> None:
    """What was learned of one sum holds for others; order and place do matter."""
    assert features("Add 12 and 34.") == features("add 98 AND 76.")
    assert features("12 and 345") != features("345 and 12")
    assert features("x\nadd") != features("add\nx")
    assert len(features("")) == 1
    assert all(0 <= bucket < 1 << BITS for bucket in features("水車 é 12 😀 \ud800"))


def test_the_score_decides_and_explains() -> None:
    """By the head's own threshold, or the operator's."""
    model, why = cascade().choose(lambda: "prove it")
    assert (model, why["cascade"]["is_on"]) == ("big", True)
    assert why["cascade"]["score"] > why["cascade"]["threshold"] == 0.6
    assert cascade().choose(lambda: "hi")[0] == MODEL
    assert cascade(threshold=0.0).choose(lambda: "hi")[0] == "big"


@pytest.mark.parametrize(
    ("made", "model", "why"),
    [
        (cascade(large_ratio=0.51), MODEL, "better by 0.010"),
        (cascade(large_ratio=0.3), MODEL, "better by -0.200"),
        (cascade(gain_low_ratio=-0.01), "big", "at random"),
        (cascade(large="other"), "other", "measured for"),
    ],
)
def test_it_is_off_where_it_was_not_measured_to_help(made: Cascade, model: str, why: str) -> None:
    """Then the better model serves, of equal ones the small; nothing is scored."""

    def never() -> str:
        raise AssertionError

    chosen, told = made.choose(never)
    assert chosen == model
    assert told["cascade"]["is_on"] is False
    assert why in told["cascade"]["why"]


def test_the_head_that_comes_along_is_off_for_its_models() -> None:
    """Its larger model is the worse one on the tasks that it was measured with."""
    head = load_head("smollm2-gemma3", Path())
    section = CascadeSection(small="smollm2-135m-instruct", large="gemma3-270m")
    shipped = Cascade(section, head)
    assert head.measured.headroom_ratio < 0
    assert "better by -" in shipped.why_off
    assert shipped.resting == "smollm2-135m-instruct"


def test_a_bad_head_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Like any mistake in the file of routes."""
    for content, why in (("{}", "version"), ('{"version": 1', "head"), (None, "No such file")):
        path = tmp_path / "h.json"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        with pytest.raises(SettingsError, match="cascade head") as failure:
            load_head("h.json", tmp_path)
        assert why in str(failure.value)


async def test_easy_requests_go_to_the_small_model(fleet_parts: GatewayFleet) -> None:
    """The header has the score, the story the reasons; a key for one model stays with it."""
    folder = fleet_parts.folder
    (folder / "head.json").write_text(json.dumps(head_file()))
    (folder / "routes.toml").write_text(
        f"version = 1\n[routes.auto]\n"
        f'cascade = {{ small = "{MODEL}", large = "big", head = "head.json" }}'
    )
    fleet_parts.settings["model_routes_file"] = folder / "routes.toml"
    await fleet_parts.start()
    try:
        await fleet_parts.add_worker(FakeWorker("big", model="big", script=saying("proof")))
        await eventually(lambda: len(fleet_parts.gateway.directory.cards()) == 2)
        only_small, _ = fleet_parts.new_key(allowed_models=[MODEL])
        async with fleet_parts.http() as client, fleet_parts.http(only_small) as limited:
            url, hard = "/v1/chat/completions", chat_body("prove it", model="auto")
            easy = await client.post(url, json=chat_body("hi", model="auto"))
            assert easy.json()["model"] == MODEL
            answer = await client.post(url, json=hard)
            assert answer.json()["model"] == "big"
            assert answer.headers["x-headrace-route"].startswith("auto; kind=cascade; score=0.")
            story = await client.get(f"/v1/requests/{answer.headers['x-request-id']}")
            assert story.json()["route"]["cascade"]["is_on"] is True
            assert (await limited.post(url, json=hard)).json()["model"] == MODEL
    finally:
        await fleet_parts.close()
