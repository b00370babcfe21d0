"""Lists in pages, in the shape that SDKs go on from."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select

from headrace_common.errors import InvalidRequest, NotFound
from headrace_gateway.answer_extras import Json


def rows_from(
    connection: Connection,
    asked: Select[Any],  # Any: whatever columns it has
    key: ColumnElement[str],
    limit: int,
    after: str | None,
    *,
    is_descending: bool,
    param: str = "after",
) -> list[RowMapping]:
    """Return the rows of one page, and one more if there are more: what lies behind is not read.

    Args:
        connection: reads them.
        asked: all rows of the list.
        key: a unique column, which the list goes by.
        limit: of the page.
        after: the key of the last row before the page; None = it is the first page.
        is_descending: whether the list goes from the last to the first.
        param: how the client calls *after*.

    Raises:
        NotFound: *after* is not in the list.
    """
    if after is not None:
        if connection.execute(asked.where(key == after)).first() is None:
            raise _not_in_list(after, param)
        asked = asked.where(key < after if is_descending else key > after)
    ordered = asked.order_by(key.desc() if is_descending else key).limit(limit + 1)
    return list(connection.execute(ordered).mappings())


def page_of(items: list[Json], limit: int, *, is_back: bool = False) -> Json:
    """Return a page of items that may be one more than are shown, as `rows_from` gives them.

    Args:
        items: in the list's order; turned back, against it.
        limit: of the page.
        is_back: whether the list is turned back.
    """
    shown = items[:limit][::-1] if is_back else items[:limit]
    return {"object": "list", **_ends(shown), "has_more": len(items) > limit}


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
    raise _not_in_list(item_id, param)


def _not_in_list(item_id: str, param: str) -> NotFound:
    return NotFound(f"Nothing in the list has the id {item_id[:100]!r}.", param=param)


def _ends(shown: list[Json]) -> Json:
    return {
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }
