"""Policies beside the file: put, replaced, dropped, read again; what runs is not touched."""

import asyncio
import os
import re
import tomllib
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from headrace_common.errors import InvalidRequest, NotFound, StaleVersion
from headrace_common.lifecycle import cancel_and_wait
from headrace_guard.classifiers.blocklist import BlocklistCache
from headrace_guard.metrics import GuardMetrics
from headrace_guard.plan import Planner
from headrace_guard.policy import Direction, load_policies, parse_policy
from headrace_guard.policy_book import PolicyBook
from headrace_guard.policy_store import PolicyStore, policy_text
from headrace_guard.policy_toml import table_toml
from headrace_guard.verdict import Action
from headrace_testing.waiting import eventually

OWN = """
fails_open = false
blocklist = ["heron", "a \\"quoted\\" word", "back\\\\slash"]
owner_exempt = []
[input]
"pii.*" = { action = "block", shadow = true }
[output]
"""


def book_over(folder: Path | None, file: Path | None = None) -> tuple[PolicyBook, Planner]:
    store = PolicyStore(file, folder)
    policies = store.load()
    planner = Planner(policies.by_name, BlocklistCache(8, 20, 1000))
    return PolicyBook(store, policies, planner, GuardMetrics(CollectorRegistry())), planner


@pytest.mark.parametrize("name", ["default", "public", "strict", "off"])
def test_a_policy_comes_back_as_the_toml_it_was(name: str) -> None:
    """What is shown can be edited and put again."""
    policy = load_policies(None)[name]
    assert tomllib.loads(policy_text(policy)) == policy.table
    again = parse_policy(name, policy_text(policy), "x")
    assert (again.rules, again.blocklist) == (policy.rules, policy.blocklist)


def test_odd_texts_survive_toml() -> None:
    """Quotes, backslashes, control characters, other scripts."""
    table = {"a b": 'q"\\ \x7f\n\u200b水', "list": ["x", "y\t"], "t": {"k.*": {"shadow": True}}}
    assert tomllib.loads(table_toml(table)) == table


async def test_a_put_policy_is_in_force_and_survives(tmp_path: Path) -> None:
    """At once for new requests; plans given out before stay as they were."""
    book, planner = book_over(tmp_path)
    before = planner.plan("default", Direction.INPUT)
    assert before is not None
    put = await book.put("default", OWN, "")
    after = planner.plan("default", Direction.INPUT)
    assert after is not None
    assert before.policy.version != after.policy.version == put.version
    assert after.policy.blocklist == ("heron", 'a "quoted" word', "back\\slash")
    assert after.policy.shadow_action(Direction.INPUT, "pii.email") is Action.BLOCK
    again, _ = book_over(tmp_path)
    assert again.get("default").version == put.version
    assert again.policies.put == {"default"}


async def test_an_old_version_is_not_overwritten(tmp_path: Path) -> None:
    """Two operators do not undo one another unknowingly."""
    book, _ = book_over(tmp_path)
    first = await book.put("mine", OWN, "")
    second = await book.put("mine", OWN.replace("heron", "stork"), first.version)
    with pytest.raises(StaleVersion, match="Another version") as raised:
        await book.put("mine", OWN, first.version)
    assert raised.value.grpc_code is grpc.StatusCode.FAILED_PRECONDITION
    assert book.get("mine").version == second.version


async def test_what_is_wrong_changes_nothing(tmp_path: Path) -> None:
    """Mistakes are listed; names cannot leave the folder."""
    book, _ = book_over(tmp_path)
    with pytest.raises(InvalidRequest, match=r"policies\.mine\.blocklist: missing"):
        await book.put("mine", "fails_open = 3", "")
    for name in ("../x", "", "A", ".hidden", "x" * 65):
        with pytest.raises(InvalidRequest, match="name"):
            await book.put(name, OWN, "")
    assert os.listdir(tmp_path) == []
    with pytest.raises(NotFound):
        book.get("mine")


async def test_a_dropped_policy_gives_way_to_the_files(tmp_path: Path) -> None:
    """Only what was put can be dropped."""
    book, _ = book_over(tmp_path)
    version = book.get("strict").version
    await book.put("strict", OWN, "")
    await book.delete("strict")
    assert book.get("strict").version == version
    with pytest.raises(NotFound):
        await book.delete("strict")


async def test_without_a_folder_nothing_can_be_put(tmp_path: Path) -> None:
    """And the message says where to write instead."""
    book, _ = book_over(None)
    with pytest.raises(InvalidRequest, match=r"POLICY_FILE.*HEADRACE_GUARD_POLICY_DIR"):
        await book.put("mine", OWN, "")
    file = tmp_path / "policies.toml"
    file.write_text(f'version = "1"\n[policies.default]\n{_as_table(OWN)}')
    book, _ = book_over(None, file)
    with pytest.raises(InvalidRequest, match=re.escape(str(file))):
        await book.put("mine", OWN, "")


async def test_guards_with_one_folder_follow_one_another(tmp_path: Path) -> None:
    """What is put or dropped at one is so at all, and no change undoes another's unknowingly."""
    (one, _), (two, plans) = book_over(tmp_path), book_over(tmp_path)
    keeping = [asyncio.create_task(book.keep(0.01)) for book in (one, two)]
    first = await one.put("mine", OWN, "")
    await eventually(lambda: "mine" in two.policies.by_name)
    assert two.get("mine").version == first.version
    assert plans.plan("mine", Direction.INPUT) is not None
    second = await two.put("mine", OWN.replace("heron", "stork"), first.version)
    with pytest.raises(StaleVersion):
        await one.put("mine", OWN, first.version)
    await eventually(lambda: one.get("mine").version == second.version)
    await one.delete("mine")
    await eventually(lambda: "mine" not in two.policies.by_name)
    await cancel_and_wait(*keeping)


async def test_a_bad_change_is_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A search of the log for what stays finds the reasons too."""
    file = tmp_path / "policies.toml"
    file.write_text(f'version = "1"\n[policies.default]\n{_as_table(OWN)}')
    book, _ = book_over(None, file)
    keeping = asyncio.create_task(book.keep(0.01))
    file.write_text("version = 99\n")
    await eventually(lambda: "policies stay" in caplog.text)
    await cancel_and_wait(keeping)
    (line,) = [it for it in caplog.text.splitlines() if "policies stay" in it]
    assert "version" in line
    assert "policies: a table is wanted" in line


async def test_a_guard_that_has_not_looked_yet_overwrites_nothing(tmp_path: Path) -> None:
    """The version is compared with what is in the folder, not with what was read last."""
    (one, _), (two, _) = book_over(tmp_path), book_over(tmp_path)
    first = await one.put("mine", OWN, "")
    second = await two.put("mine", OWN.replace("heron", "stork"), first.version)
    with pytest.raises(StaleVersion, match=re.escape(second.version)):
        await one.put("mine", OWN, first.version)
    # Compared is not read: the other's change is still to be followed.
    keeping = asyncio.create_task(one.keep(0.01))
    await eventually(lambda: one.get("mine").version == second.version)
    await cancel_and_wait(keeping)


async def test_of_changes_at_once_one_wins(tmp_path: Path) -> None:
    """Whichever of the guards it is put at."""
    books = [book_over(tmp_path)[0] for _ in range(4)]
    first = await books[0].put("mine", OWN, "")
    texts = [OWN.replace("heron", f"bird{idx}") for idx in range(4)]
    puts = (book.put("mine", text, first.version) for book, text in zip(books, texts, strict=True))
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    (won,) = [it for it in outcomes if not isinstance(it, BaseException)]
    assert all(isinstance(it, StaleVersion) for it in outcomes if it is not won)
    assert book_over(tmp_path)[0].get("mine").version == won.version


async def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    """A broken one leaves everything as it was."""
    file = tmp_path / "policies.toml"
    text = f'version = "1"\n[policies.default]\n{_as_table(OWN)}'
    file.write_text(text)
    book, planner = book_over(None, file)
    store = book._store
    assert not store.has_changed()
    file.write_text(text.replace("heron", "a stork"))
    await eventually(store.has_changed)
    await book.reload()
    changed = planner.plan("", Direction.INPUT)
    assert changed is not None
    assert "a stork" in changed.policy.blocklist
    file.write_text("broken")
    with pytest.raises(InvalidRequest):
        await book.reload()
    assert planner.plan("", Direction.INPUT) is changed


def _as_table(text: str) -> str:
    return text.replace("[input]", "[policies.default.input]").replace(
        "[output]", "[policies.default.output]"
    )
