"""What is made once for a key, and not for each of its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from headrace_contracts.billing.v1.billing_pb2 import Principal

_MAX_KEPT = 10_000

T = TypeVar("T")


class PerKey(Generic[T]):
    """Values made of principals, each as long as its principal is the one that is in use.

    A principal that changes comes as a new object (`auth`), so that its value is made anew.

    Args:
        make: makes a value; must not depend on anything else.
    """

    def __init__(self, make: Callable[[Principal], T]) -> None:
        self._make = make
        # Each with its principal, so that no other object gets its id meanwhile.
        self._kept: dict[int, tuple[Principal, T]] = {}

    def of(self, principal: Principal) -> T:
        """Return a principal's value."""
        kept = self._kept.get(id(principal))
        if kept is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            kept = self._kept[id(principal)] = principal, self._make(principal)
        return kept[1]
