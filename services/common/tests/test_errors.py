from __future__ import annotations

import pytest

from headrace_common.errors import BY_REASON, HeadraceError, Internal, error_body, from_reason


def test_reasons_are_unique() -> None:
    """A reason names one class, so that the wire can be read back.

    A service's own classes stay at its edge, under their parents' reasons.
    """

    def all_of(cls: type[HeadraceError]) -> list[type[HeadraceError]]:
        return [cls, *(x for sub in cls.__subclasses__() for x in all_of(sub))]

    shared = [c for c in all_of(HeadraceError) if c.__module__ == HeadraceError.__module__]
    classes = [c for c in shared if c is not HeadraceError]
    assert len({c.reason for c in classes}) == len(classes) == len(BY_REASON)


def test_an_unknown_reason_is_an_internal_error_without_its_text() -> None:
    error = from_reason("FLUX", "text from inside")
    assert isinstance(error, Internal)
    assert "inside" not in error.public_message


@pytest.mark.parametrize("cls", sorted(BY_REASON.values(), key=lambda c: c.reason))
def test_every_error_has_a_public_body(cls: type[HeadraceError]) -> None:
    body = error_body(cls() if cls is Internal else cls("What to do.", param="model"))["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    assert body["type"]
    assert 400 <= cls.http_status < 600
