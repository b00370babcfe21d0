"""The key of the first start, against billing's contract."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_launcher.billing_client import BillingClient, open_billing
from headrace_launcher.first_key import TENANT, ensure_first_key
from headrace_testing.fake_billing import FakeBillingServer


@pytest.fixture
async def billing() -> AsyncIterator[BillingClient]:
    async with FakeBillingServer() as server, open_billing(server.address) as client:
        yield client


async def test_makes_a_tenant_and_a_key_once_and_shows_it_again(billing, tmp_path: Path) -> None:
    """The second start finds the same key in a file that only its owner can read."""
    path = tmp_path / "first-key"
    first = await ensure_first_key(billing, path)
    assert first.api_key.startswith("sk-hr-")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [key.tenant_id for key in await billing.list_keys()] == [TENANT]
    assert await ensure_first_key(billing, path) == first
    assert len(await billing.list_keys()) == 1


async def test_without_the_file_the_prefix_is_shown_and_no_key_is_made(billing, tmp_path) -> None:
    """An operator who deleted the file does not get a new key behind their back."""
    path = tmp_path / "first-key"
    first = await ensure_first_key(billing, path)
    path.unlink()
    again = await ensure_first_key(billing, path)
    assert again.api_key == ""
    assert again.prefix
    assert first.api_key.startswith(again.prefix)
    assert not path.exists()


async def test_a_revoked_first_key_is_not_shown(billing, tmp_path) -> None:
    """Another live key's prefix is shown instead."""
    path = tmp_path / "first-key"
    first = await ensure_first_key(billing, path)
    [key] = await billing.list_keys()
    await billing.revoke_key(key.key_id)
    key.name = "second"
    second = await billing.create_key(key)
    again = await ensure_first_key(billing, path)
    assert again.api_key == ""
    assert second.api_key.startswith(again.prefix)
    assert not first.api_key.startswith(again.prefix)


async def test_when_every_key_is_revoked_a_new_one_is_made(billing, tmp_path) -> None:
    """`up` must end with a key that works."""
    path = tmp_path / "first-key"
    first = await ensure_first_key(billing, path)
    for key in await billing.list_keys():
        await billing.revoke_key(key.key_id)
    again = await ensure_first_key(billing, path)
    assert again.api_key not in ("", first.api_key)
    assert path.read_text().strip() == again.api_key
