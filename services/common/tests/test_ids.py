from __future__ import annotations

import pytest

from headrace_common.ids import is_slug, new_request_id, ulid


def test_ids_sort_by_time_and_never_repeat(clock) -> None:
    ids = []
    for _ in range(100):
        ids.append(ulid(clock))
        clock.advance(0.002)
    assert ids == sorted(ids)
    assert len(set(ids)) == 100
    assert all(len(i) == 26 for i in ids)
    assert new_request_id(clock).startswith("req_")


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
