"""A request that names no temperature, on real processes with a real model."""

from __future__ import annotations

import httpx
import pytest

from headrace_testing.api import chat
from headrace_testing.processes import ApiKey, Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

STORY = "Write a story about a lighthouse and the people who live near it."


@pytest.fixture(scope="module")
def key(fleet: Fleet) -> ApiKey:
    return fleet.create_key("defaults")


def test_what_is_left_open_is_drawn_as_with_the_models_own_values(
    fleet: Fleet, key: ApiKey
) -> None:
    """The same seed gives the same texts as with the values that /v1/models shows."""
    model = httpx.get(f"{fleet.base_url}/v1/models/{fleet.model}", headers=key.headers).json()
    shown = model["default_parameters"]
    assert shown["temperature"] < 1

    def texts(**sampling: float | None) -> list[str]:
        answer = chat(fleet, key, STORY, seed=7, n=2, max_tokens=40, **sampling)
        return [choice["message"]["content"] for choice in answer.json()["choices"]]

    left_open = texts(temperature=None)
    assert left_open == texts(**shown)
    assert left_open != texts(temperature=1, top_p=1)
    assert len(set(left_open)) == 2
