from __future__ import annotations

import pytest

from headrace_common.ids import is_slug, job_id, jobs_prefix, new_request_id, request_of, ulid


def test_ids_sort_by_time_and_never_repeat(clock) -> None:
    ids = []
    for _ in range(100):
        ids.append(ulid(clock))
        clock.advance(0.002)
    assert ids == sorted(ids)
    assert len(set(ids)) == 100
    assert all(len(i) == 26 for i in ids)
    assert new_request_id(clock).startswith("req_")


def test_an_id_of_one_prompt_names_its_request() -> None:
    """Whatever the request's own id looks like."""
    for request_id in ("req_1", "req_1.2"):
        told = job_id(request_id, 3)
        assert request_of(told) == request_id == request_of(request_id)
        assert told.startswith(jobs_prefix(request_id))
    assert not job_id("req_1.2", 0).startswith(jobs_prefix("req_1"))


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("acme", True),
        ("a-1_b", True),
        ("", False),
        ("-a", False),
        ("A", False),
        ("a b", False),
        ("a" * 65, False),
        ("a\n", False),
    ],
)
def test_slugs(text, good) -> None:
    assert is_slug(text) is good
