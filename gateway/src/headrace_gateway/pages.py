"""Lists in pages, in the shape that SDKs go on from."""

from __future__ import annotations

from headrace_common.errors import InvalidRequest, NotFound
from headrace_gateway.answer_extras import Json


def page(items: list[Json], limit: int, after: str | None) -> Json:
    """Return one page of a list, in the shape that SDKs go on from.

    Raises:
        NotFound: *after* is not in the list.
    """
    start = 0 if after is None else _place(items, after, "after") + 1
    shown = items[start : start + limit]
    return {"object": "list", **_ends(shown), "has_more": start + limit < len(items)}


def page_around(items: list[Json], limit: int, after_id: str | None, before_id: str | None) -> Json:
    """Return one page of a list as Anthropic's SDKs turn them: on from one id, or back from one.

    Raises:
        InvalidRequest: both are given.
        NotFound: the one given is not in the list.
    """
    if after_id is not None and before_id is not None:
        raise InvalidRequest("Give either after_id or before_id.", param="before_id")
    if before_id is not None:
        end = _place(items, before_id, "before_id")
        start = max(0, end - limit)
        return {**_ends(items[start:end]), "has_more": start > 0}
    start = 0 if after_id is None else _place(items, after_id, "after_id") + 1
    return {**_ends(items[start : start + limit]), "has_more": start + limit < len(items)}


def _place(items: list[Json], item_id: str, param: str) -> int:
    for idx, item in enumerate(items):
        if item["id"] == item_id:
            return idx
    raise NotFound(f"Nothing in the list has the id {item_id[:100]!r}.", param=param)


def _ends(shown: list[Json]) -> Json:
    return {
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }
