"""The policy file."""

from pathlib import Path
from random import Random
from typing import get_args

import pytest

from headrace_common.settings import SettingsError
from headrace_router.policies.hold import HoldPolicy
from headrace_router.policy_file import PolicyFile, PolicyName, load_policy_file

BROKEN = sorted((Path(__file__).parent / "broken_policies").glob("*.toml"))


def test_the_packaged_file_says_what_the_defaults_say() -> None:
    """Two places, one truth."""
    assert load_policy_file(None) == PolicyFile(version=1)


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_mistakes_are_refused(path: Path) -> None:
    """One file per mistake; each is named."""
    with pytest.raises(SettingsError, match=str(path)):
        load_policy_file(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A path that leads nowhere is a mistake, not the default."""
    with pytest.raises(SettingsError):
        load_policy_file(tmp_path / "absent.toml")


def test_a_model_may_have_its_own_policy(tmp_path: Path) -> None:
    """The others keep the file's."""
    path = tmp_path / "policy.toml"
    path.write_text('version = 1\n[models."big"]\npolicy = "round-robin"\n')
    file = load_policy_file(path)
    assert file.make_policy("big", Random(1)).name == "round-robin"
    assert isinstance(file.make_policy("small", Random(1)), HoldPolicy)


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_every_policy_goes_by_its_name(name: str) -> None:
    """What the file names is what decisions say."""
    file = PolicyFile.model_validate({"version": 1, "pick": {"policy": name}})
    assert file.make_policy("m", Random(1)).name == name
