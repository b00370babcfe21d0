"""The API key of the first start: made once, kept readable by the owner only, shown at every start.

Billing keeps a hash only. So that a later ``headrace up`` can print the key again it also lies in
``first-key`` in the state directory, mode 0600. Delete that file and it is shown no more.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_launcher.billing_client import BillingClient

TENANT = "default"
_KEY_NAME = "first"


@dataclass(frozen=True)
class FirstKey:
    """What can be said about keys at a start: the key itself, or else how one begins."""

    api_key: str = ""
    prefix: str = ""


async def ensure_first_key(billing: BillingClient, path: Path) -> FirstKey:
    """Create tenant and key unless there are keys; return what can be shown.

    Raises:
        PeerError: billing refuses or does not answer.
        OSError: the file cannot be written.
    """
    live = [key for key in await billing.list_keys() if not key.revoked_unix_s]
    kept = _read(path)
    if kept and any(kept.startswith(key.prefix) for key in live):
        return FirstKey(api_key=kept)
    if live:
        return FirstKey(prefix=live[0].prefix)
    await billing.create_tenant(TENANT)
    answer = await billing.create_key(pb.Key(tenant_id=TENANT, name=_KEY_NAME))
    _write(path, answer.api_key)
    return FirstKey(api_key=answer.api_key)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _write(path: Path, api_key: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(api_key + "\n")
