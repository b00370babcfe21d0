"""Whose rows a request may see: the key must be one for inference."""

from __future__ import annotations

from fastapi import Request

from headrace_gateway.auth import KeyAuth, check_scope
from headrace_gateway.state.store import Owner


async def owner_of(auth: KeyAuth, request: Request) -> Owner:
    """Return whose rows the caller may see.

    Raises:
        UnknownKey: no key, or a wrong one.
        ScopeMissing: the key is for something else, such as usage alone.
    """
    principal = await auth.authenticate(request.headers.raw)
    check_scope(principal, "inference")
    return Owner.of(principal)
