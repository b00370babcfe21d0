"""The commands about tenants, plans, prices, money and books, against a real billing service."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_launcher.cli import run
from headrace_testing.waiting import free_port
from headrace_testing.web import fetch

Headrace = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A billing process without a broker."""
    folder = tmp_path_factory.mktemp("billing")
    port, metrics = free_port(), free_port()
    own = {
        "LISTEN": f"127.0.0.1:{port}",
        "METRICS_LISTEN": f"127.0.0.1:{metrics}",
        "DATABASE_URL": f"sqlite:///{folder}/ledger.db",
        "KAFKA_BOOTSTRAP": f"127.0.0.1:{free_port()}",
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    environment |= {f"HEADRACE_BILLING_{name}": value for name, value in own.items()}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace_billing"], env=environment, stdout=log, stderr=log
        )
    for _ in range(600):
        if fetch(f"http://127.0.0.1:{metrics}/ready")[0] == 200:
            break
        time.sleep(0.1)
    yield f"127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    process.wait(30)


@pytest.fixture
def headrace(
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Headrace:
    monkeypatch.setenv("HEADRACE_LAUNCHER_BILLING_ADDRESS", address)
    monkeypatch.setenv("HEADRACE_LAUNCHER_STATE_DIR", str(tmp_path))

    def call(*words: str) -> tuple[int, Any]:
        code = run(list(words))
        out = capsys.readouterr().out
        return code, json.loads(out) if "--json" in words and out else out

    return call


def test_tenants_projects_plans_and_limits(headrace: Headrace, tmp_path: Path) -> None:
    """Made, changed, listed; the audit knows all of it."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"name": "Pro", "key_limits": {"requests_per_minute": 9}}))
    assert headrace("plans", "put", "pro", "--file", str(plan), "--json")[1]["name"] == "Pro"
    words = ("--plan", "pro", "--prepaid", "--max-concurrent", "4", "--month-budget-usd", "1.5")
    tenant = headrace("tenants", "create", "acme", "--name", "Acme", *words, "--json")[1]
    assert (tenant["plan_id"], tenant["prepaid"]) == ("pro", True)
    assert tenant["limits"]["max_concurrent"] == 4
    assert tenant["limits"]["month_budget_nano_usd"] == 1_500_000_000
    tenant = headrace("tenants", "update", "acme", "--no-prepaid", "--suspended", "--json")[1]
    assert (tenant["prepaid"], tenant["suspended"], tenant["name"]) == (False, True, "Acme")
    words = ("p1", "--tenant", "acme", "--requests-per-day", "7")
    assert headrace("projects", "put", *words, "--json")[1]["limits"]["requests_per_day"] == 7
    assert "p1" in headrace("projects", "list", "--tenant", "acme")[1]
    assert "acme" in headrace("tenants", "list")[1]
    assert "pro" in headrace("plans", "list")[1]
    words = ("model", "--tenant", "acme", "--id", "big", "--max-concurrent", "1")
    assert headrace("limits", "set", *words, "--json")[1]["revision"] > 1
    assert headrace("audit")[1].splitlines()[1].split()[1].startswith("20")
    actions = [it["action"] for it in headrace("audit", "--json")[1]["records"]]
    assert {"put_plan", "create_tenant", "update_tenant", "put_project"} <= set(actions)
    assert headrace("tenants", "update", "acme", "--plan", "nope")[0] == 1


def test_the_whole_audit_is_shown(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest changes, too: a page holds the oldest."""
    for number in range(3):
        headrace("tenants", "create", f"page-{number}")
    whole = headrace("audit", "--json")[1]["records"]
    monkeypatch.setattr("headrace_launcher.accounts._PAGE_RECORDS", 2)
    assert len(whole) >= 3
    assert headrace("audit", "--json")[1]["records"] == whole


def test_keys_are_changed_and_rotated(headrace: Headrace) -> None:
    """Only what is named changes; unknown scopes are refused."""
    words = (
        "--tenant",
        "keys",
        "--name",
        "a",
        "--scopes",
        "usage,admin",
        "--expires",
        "2030-01-01",
    )
    made = headrace("keys", "create", *words, "--project", "p", "--json")[1]
    key_id = made["key_id"]
    changed = headrace("keys", "update", key_id, "--name", "b", "--json")[1]
    assert (changed["name"], changed["scopes"]) == ("b", ["usage", "admin"])
    assert (changed["project_id"], changed["expires_unix_s"]) == ("p", 1_893_456_000)
    new = headrace("keys", "rotate", key_id, "--overlap-s", "60", "--json")[1]
    assert new["api_key"] != made["api_key"]
    assert new["key"]["overlap_until_unix_s"] > 0
    assert headrace("keys", "update", key_id, "--scopes", "root")[0] == 1


def test_what_is_not_named_stays(headrace: Headrace) -> None:
    """A limit that is changed leaves the others of the key, tenant and project alone."""
    words = ("--max-concurrent", "4", "--month-budget-usd", "1.5", "--requests-per-day", "9")
    headrace("tenants", "create", "kept", *words)
    tenant = headrace("tenants", "update", "kept", "--max-concurrent", "5", "--json")[1]
    assert (tenant["limits"]["max_concurrent"], tenant["limits"]["requests_per_day"]) == (5, 9)
    headrace("projects", "put", "p", "--tenant", "kept", "--name", "P", "--requests-per-day", "7")
    words = ("projects", "put", "p", "--tenant", "kept", "--max-concurrent", "2", "--json")
    project = headrace(*words)[1]
    assert (project["name"], project["limits"]["requests_per_day"]) == ("P", 7)
    assert headrace("projects", "put", "p", "--tenant", "kept", "--json")[1] == project
    words = ("--budget-usd", "2", "--input-tokens-per-minute", "8", "--priority", "high")
    flags = ("--prepaid", "--counts-cached-input")
    made = headrace("keys", "create", "--tenant", "kept", "--name", "k", *words, *flags, "--json")
    key_id = made[1]["key_id"]
    words = ("--tokens-per-minute", "3", "--no-prepaid", "--json")
    key = headrace("keys", "update", key_id, *words)[1]
    assert key["limits"]["month_budget_nano_usd"] == 2 * 10**9
    assert key["limits"]["input_tokens_per_minute"] == 8
    assert key["limits"]["tokens_per_minute"] == 3
    assert (key["priority"], key["prepaid"], key["counts_cached_input"]) == ("high", False, True)


@pytest.mark.parametrize(
    "words",
    [
        "keys rotate KEY --overlap-s -1",
        "keys rotate KEY --overlap-s 99999999999999999999",
        "keys update KEY --name \x01",
        "keys update none --name a",
        "keys update KEY --requests-per-minute 9000000000000000000",
        "tenants update acme --plan {x}",
        "tenants update acne --prepaid",
        "tenants create -- -x",
        "prices set m --input -5 --cached-input 0 --cache-write 0 --output 1",
        "prices set m --input 99999999999999999999999 --cached-input 0 --cache-write 0 --output 1",
        "prices set m --input 1 --cached-input 0 --cache-write 0 --output 1 --window-from 99:99",
        "prices set m --input 1 --cached-input 0 --cache-write 0 --output 1 --from 0001-01-01",
        "prices set m --output 70",
        "prices set m --input 1 --cached-input 0 --output 70",
        "credits grant acme --id c --usd 0",
        "credits grant acme --id c --usd 9000000000.5",
        "credits grant acme --id c --usd 1 --expires 1999-01-01",
        "invoices issue acme 9999-12",
        "invoices issue acme 2020-13",
        "invoices correct acme-000001 --id ../x --usd 1",
        "ledger dead-letters --limit -1",
        "plans put p --file /nowhere",
        "limits set model --tenant acme --id {x} --max-concurrent 1",
        "limits set project --tenant acme --id none --max-concurrent 1",
        "limits set key",
    ],
)
def test_bad_input_is_a_sentence(
    headrace: Headrace, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 and one line that says what is wrong; nothing of ours is shown."""
    headrace("tenants", "create", "acme")
    key_id = headrace("keys", "create", "--tenant", "acme", "--name", "k", "--json")[1]["key_id"]
    capsys.readouterr()
    assert run(words.replace("KEY", key_id).split(" ")) == 1
    [told] = capsys.readouterr().err.splitlines()
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("words", "is_of_billing"),
    [
        ("keys update none --name a", False),
        ("usage --key none", False),
        ("tenants update none --prepaid", False),
        ("prices set m --output 70", False),
        ("plans put p --file /nowhere", False),
        ("keys rotate KEY --overlap-s 99999999999999999999", False),
        ("prices set m --withdrawn --from-prompt-tokens 99999999999999999999999", False),
        ("keys rotate none", True),
        ("plans put p --file /dev/null", False),
        ("usage --tenant acme --from 2026-10-18 --to 2026-10-17", False),
        ("usage --tenant acme --from 2026-10-17 --to 2026-10-17", False),
        ("usage --key KEY --from 2026-10-17", False),
        ("usage --key KEY --csv", False),
        ("usage --key KEY --by day", False),
        ("invoices issue acme 2020-13", True),
    ],
)
def test_billing_is_named_only_for_what_billing_said(
    headrace: Headrace, words: str, is_of_billing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who mistyped an option does not look for the fault at a service."""
    assert run(words.split(" ")) == 1
    assert ("billing at" in capsys.readouterr().err) == is_of_billing


@pytest.mark.parametrize("text", ["-1", "1e400", "1e99999999", "nan", "0.0000000001", "x", ""])
def test_what_is_no_money_is_refused_by_the_command_line(headrace: Headrace, text: str) -> None:
    """At once, however large its exponent."""
    with pytest.raises(SystemExit) as error:
        headrace("credits", "grant", "acme", "--id", "c", f"--usd={text}")
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("credits grant acme --id c --usd -1", "must be >= 0"),
        ("keys create --tenant a --name b --budget-usd nan", "not an amount in USD"),
        ("keys create --tenant a --name b --expires soon", "such as 2027-01-31"),
        ("keys create --tenant a --name b --expires 2020-01-01", "must lie ahead"),
        ("keys create --tenant a --name b --models=", "is empty"),
        ("keys create --tenant a --name b --models ,", "a comma"),
        ("keys create --tenant a --name b --guard-block x,,y", "a comma"),
        ("keys update key_1 --models x,", "a comma"),
        ("usage --tenant a --from 31.1.2027", "such as 2027-01-31"),
        ("prices set m --window-from noon", "such as 22:30"),
    ],
)
def test_a_wrong_value_is_told_what_is_right(
    headrace: Headrace, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not only that it is invalid."""
    with pytest.raises(SystemExit) as error:
        headrace(*words.replace(" -1", "=-1").split(" "))
    assert error.value.code == 2
    assert told in capsys.readouterr().err


def test_an_update_makes_no_tenant(headrace: Headrace) -> None:
    """A mistyped name would get the limits that another one was meant to have."""
    headrace("tenants", "create", "real")
    assert headrace("tenants", "update", "reel", "--suspended")[0] == 1
    assert "reel" not in headrace("tenants", "list")[1]


def test_a_key_that_has_expired_is_not_called_live(headrace: Headrace) -> None:
    """The list says why it no longer opens the door."""
    made = headrace("keys", "create", "--tenant", "times", "--name", "k", "--json")[1]
    assert "live" in headrace("keys", "list", "--tenant", "times")[1]
    headrace("keys", "update", made["key_id"], "--expires", "2020-01-01")
    assert "expired" in headrace("keys", "list", "--tenant", "times")[1]


def test_prices_say_when_they_hold(headrace: Headrace) -> None:
    """A price of nights or of long prompts does not look like the ordinary one."""
    amounts = ("--input", "7", "--cached-input", "0", "--cache-write", "8", "--output", "9")
    headrace("prices", "set", "timed", *amounts)
    words = ("--window-from", "22:00", "--window-to", "6:30", "--weekdays", "sat,sun")
    headrace("prices", "set", "timed", *amounts, *words, "--from-prompt-tokens", "1000")
    headrace("prices", "set", "timed", *amounts, "--from", "2027-01-01", "--to", "2027-02-01")
    headrace("prices", "set", "timed", "--withdrawn")
    lines = [line.split(maxsplit=7) for line in headrace("prices", "list")[1].splitlines()]
    timed = [line[3:] for line in lines if line[1] == "timed"]
    assert [line[:4] for line in timed].count(["7", "0", "8", "9"]) == 3
    assert ["none", "none", "none", "none", "always"] in timed
    assert {line[4] for line in timed} == {
        "always",
        "prompts of 1000 tokens or more, sat,sun, 22:00-06:30",
        "from 2027-01-01T00:00:00Z, to 2027-02-01T00:00:00Z",
    }


def test_money(headrace: Headrace) -> None:
    """Prices, credits, invoices."""
    words = ("--input", "3", "--cached-input", "0", "--cache-write", "0", "--output", "9")
    words += ("--from-prompt-tokens", "1000", "--tier", "batch")
    words += ("--window-from", "22:00", "--window-to", "6:30", "--weekdays", "sat,sun")
    price = headrace("prices", "set", "m", *words, "--json")[1]
    assert (price["window_from_minute"], price["window_to_minute"]) == (1320, 390)
    assert (price["window_weekdays"], price["tier"]) == (0b1100000, "batch")
    assert "m" in headrace("prices", "list")[1]
    headrace("tenants", "create", "rich", "--json")
    for _ in range(2):
        grant = headrace("credits", "grant", "rich", "--id", "p1", "--usd", "2.5", "--json")[1]
    assert grant["amount_nano_usd"] == 2_500_000_000
    assert headrace("tenants", "balance", "rich")[0] == 0
    balance = headrace("tenants", "balance", "rich", "--json")[1]
    assert balance["available_nano_usd"] == 2_500_000_000
    assert len(headrace("credits", "list", "rich", "--json")[1]["credits"]) == 1
    invoice = headrace("invoices", "issue", "rich", "2020-01", "--json")[1]
    assert invoice["invoice_id"] == "rich-000001"
    assert "rich-000001" in headrace("invoices", "list", "rich")[1]
    assert "due 0.00 USD" in headrace("invoices", "show", "rich-000001")[1]
    assert headrace("invoices", "correct", "rich-000001", "--id", "c", "--usd", "1")[0] == 1
    assert headrace("usage", "--tenant", "rich", "--csv")[1].startswith("day_unix_s,")
    table = headrace("usage", "--tenant", "rich", "--by", "key,model")[1]
    assert table.split() == ["key", "model", "requests", "prompt", "cached", "output", "USD"]


def test_proofs(headrace: Headrace) -> None:
    """Exit code 0 says that the books are right; without a broker the log is said to be unread."""
    assert headrace("ledger", "verify")[0] == 0
    code, replayed = headrace("ledger", "replay", "--json")
    assert (code, replayed["ok"]) == (0, True)
    code, found = headrace("ledger", "reconcile", "--json")
    assert (code, found["log_was_read"], found["outbox"]["missing"]) == (0, False, [])
    assert headrace("ledger", "dead-letters", "--json")[1]["total"] == 0


def test_an_outbox_may_be_listed_elsewhere(
    headrace: Headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway in a container reads its files there, and pipes what it finds."""
    lines = '{"request_id": "req_1", "kind": 1}\n{"request_id": "req_2", "kind": 2}\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, found = headrace("ledger", "reconcile", "--outbox", "-", "--json")
    assert code == 1
    assert found["outbox"]["events"] == 2
    assert {it["request_id"] for it in found["outbox"]["missing"]} == {"req_1", "req_2"}
