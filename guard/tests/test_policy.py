"""The policy file: what it means, and that every kind of mistake is named."""

import sys
from pathlib import Path

import pytest

from headrace_guard.__main__ import main
from headrace_guard.classifiers.text_model import Point
from headrace_guard.policy import Direction, PolicyError, load_policies, parse_policies
from headrace_guard.verdict import Action

BROKEN = Path(__file__).parent / "broken_policies"
MISTAKES = {
    "action_unknown.toml": "policies.default.input.blocklist: one of off, log, allow",
    "blocklist_not_texts.toml": "policies.default.blocklist: a list of texts",
    "category_unknown.toml": "policies.default.output: no category is called 'pii.e-mail'",
    "default_missing.toml": "policies: 'default' is missing",
    "fails_open_text.toml": "policies.default.fails_open: true or false",
    "key_unknown.toml": "policies.default: 'fail_open' is unknown",
    "key_missing.toml": "policies.default.owner_exempt: missing",
    "no_toml.toml": "not TOML",
    "term_invisible.toml": "has no visible character",
    "term_too_long.toml": "a term has more than 200 characters",
    "point_unknown.toml": "policies.default.input.injection.point: one of strict, balanced",
    "rule_key_unknown.toml": "policies.default.input.injection: 'threshold' is unknown",
    "shadow_text.toml": "policies.default.shadow: true or false",
    "topic_missing.toml": "policies.default.input.off_topic: the policy has no topic",
    "topic_too_short.toml": "policies.default.topic: at least 5 example questions",
    "version_missing.toml": "version: a text is wanted",
}


def test_the_packaged_file_is_valid_and_has_four_policies() -> None:
    """The default is fail-closed and blocks only what an owner listed."""
    policies = load_policies(None)
    assert set(policies) == {"default", "public", "strict", "off"}
    default = policies["default"]
    assert not default.fails_open
    for direction in Direction:
        assert default.action(direction, "blocklist") is Action.BLOCK
        assert default.action(direction, "pii.card") is Action.FLAG
        assert default.action(direction, "secret.jwt") is Action.FLAG
    strict = policies["strict"]
    assert strict.action(Direction.INPUT, "pii.email") is Action.REDACT
    assert strict.action(Direction.OUTPUT, "pii.email") is Action.BLOCK
    assert strict.action(Direction.INPUT, "secret.jwt") is Action.BLOCK
    public = policies["public"]
    for hazard, action in (("S4", Action.BLOCK), ("S9", Action.BLOCK), ("S2", Action.FLAG)):
        assert public.action(Direction.INPUT, f"harm.{hazard}") is action
        assert default.action(Direction.INPUT, f"harm.{hazard}") is Action.FLAG
    assert public.rules[Direction.INPUT]["harm.S9"].point is Point.LENIENT
    assert policies["off"].action(Direction.OUTPUT, "blocklist") is Action.OFF


def test_the_more_exact_name_wins() -> None:
    """Whatever the order in the file."""
    policies = parse_policies(
        """
version = "1"
[policies.default]
fails_open = true
blocklist = ["Foo  Bar"]
owner_exempt = ["pii.*"]
[policies.default.input]
"pii.email" = "off"
"pii.*" = "redact"
"*" = "flag"
[policies.default.output]
"""
    )
    policy = policies["default"]
    assert policy.action(Direction.INPUT, "pii.email") is Action.OFF
    assert policy.action(Direction.INPUT, "pii.card") is Action.REDACT
    assert policy.action(Direction.INPUT, "secret.jwt") is Action.FLAG
    assert policy.action(Direction.OUTPUT, "secret.jwt") is Action.OFF
    assert "pii.card" in policy.owner_exempt


def test_the_version_changes_with_the_content() -> None:
    """A verdict says exactly what judged."""
    text = (Path(__file__).parents[1] / "src/headrace_guard/default.toml").read_text()
    changed = text.replace('"pii.*" = "flag"', '"pii.*" = "allow"', 1)
    before, after = parse_policies(text), parse_policies(changed)
    assert before["default"].version != after["default"].version
    assert before["strict"].version == after["strict"].version


@pytest.mark.parametrize("name", sorted(path.name for path in BROKEN.glob("*.toml")))
def test_a_broken_file_is_refused_with_its_mistake(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command exits with 2, as a start with it would, and says where."""
    monkeypatch.setattr(sys, "argv", ["headrace-guard", "--check-config", str(BROKEN / name)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert MISTAKES[name] in told
    assert name in told


def test_every_kind_of_mistake_has_its_sample() -> None:
    """One file each."""
    assert {path.name for path in BROKEN.glob("*.toml")} == set(MISTAKES)


def test_all_mistakes_are_told_at_once() -> None:
    """Not one per attempt."""
    with pytest.raises(PolicyError) as refused:
        parse_policies("version = 1\n[policies.x]\nfails_open = 3\n")
    assert len(str(refused.value).splitlines()) >= 5


def test_a_missing_file_is_told() -> None:
    """With its name."""
    with pytest.raises(PolicyError, match="nowhere"):
        load_policies(Path("/nowhere/policy.toml"))


def test_check_config_lists_policies_of_a_good_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a name the file that is set is checked, here the packaged one."""
    monkeypatch.setattr(sys, "argv", ["headrace-guard", "--check-config"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "strict: 1/strict/" in capsys.readouterr().out
