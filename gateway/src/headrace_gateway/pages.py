"""Lists in pages, in the shape that SDKs go on from."""

from __future__ import annotations

from headrace_common.errors import NotFound
from headrace_gateway.answer_extras import Json


def page(items: list[Json], limit: int, after: str | None) -> Json:
    """Return one page of a list, in the shape that SDKs go on from.

    Raises:
        NotFound: *after* is not in the list.
    """
    start = 0
    if after is not None:
        places = [idx for idx, item in enumerate(items) if item["id"] == after]
        if not places:
            raise NotFound(f"Nothing in the list has the id {after[:100]!r}.", param="after")
        start = places[0] + 1
    shown = items[start : start + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(items),
    }
