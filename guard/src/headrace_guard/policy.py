"""Policies: what is done about which category, in which direction. Read from TOML, all checked."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import TypeVar

from headrace_common.settings import SettingsError
from headrace_guard.classifiers.blocklist import MAX_TERM_CHARS
from headrace_guard.classifiers.catalogue import CATEGORIES, DETECTORS_VERSION
from headrace_guard.classifiers.text_model import CATEGORIES as MODEL_CATEGORIES
from headrace_guard.classifiers.text_model import OFF_TOPIC, Point, Topic
from headrace_guard.normalise import fold
from headrace_guard.verdict import Action

T = TypeVar("T")
DEFAULT_POLICY = "default"
MIN_TOPIC_EXAMPLES = 5
# What can be named in a policy.
ALL_CATEGORIES = CATEGORIES | MODEL_CATEGORIES
_REQUIRED_KEYS = frozenset({"fails_open", "blocklist", "owner_exempt", "input", "output"})
_FLAGS = frozenset({"fails_open", "shadow", "keeps_text", "uses_judge"})
_POLICY_KEYS = _REQUIRED_KEYS | _FLAGS | {"topic"}
_RULE_KEYS = frozenset({"action", "point", "shadow"})
_ACTIONS = {
    "off": Action.OFF,
    "log": Action.ALLOW,
    "allow": Action.ALLOW,
    "flag": Action.FLAG,
    "redact": Action.REDACT,
    "block": Action.BLOCK,
}
_POINTS = {point.value: point for point in Point if point is not Point.ALL}


class PolicyError(SettingsError):
    """The policy file is wrong; the message lists every mistake, one a line."""


class Direction(Enum):
    """Into the model or out of it."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class CategoryRule:
    """What a policy does about one category in one direction.

    Args:
        action: what is done about a hit.
        point: from which score on a trained classifier's answer is a hit.
        is_shadow: the hit is only reported, with the action that would have been taken.
    """

    action: Action
    point: Point = Point.BALANCED
    is_shadow: bool = False


@dataclass(frozen=True)
class Policy:
    """One policy.

    Args:
        name: how keys name it.
        version: of the file, this policy and the detectors.
        fails_open: whether what could not be judged passes.
        blocklist: words and phrases of the policy itself.
        owner_exempt: categories not looked for in text of the key's owner.
        rules: per direction, what is done about every category that is not off.
        topic: example questions; off_topic is told by them.
        uses_judge: whether undecided texts go to the judge.
        keeps_text: whether the audit keeps what was found, not only its keyed hash.
        table: the policy as it was written.
    """

    name: str
    version: str
    fails_open: bool
    blocklist: tuple[str, ...]
    owner_exempt: frozenset[str]
    rules: Mapping[Direction, Mapping[str, CategoryRule]]
    topic: Topic | None = None
    uses_judge: bool = False
    keeps_text: bool = False
    table: Mapping[str, object] | None = None

    def action(self, direction: Direction, category: str) -> Action:
        """Return what is done about *category*; in shadow no more than reporting it."""
        rule = self.rules[direction].get(category)
        if rule is None:
            return Action.OFF
        return min(rule.action, Action.ALLOW) if rule.is_shadow else rule.action

    def shadow_action(self, direction: Direction, category: str) -> Action | None:
        """Return what would be done about a category that runs in shadow; None if it does not."""
        rule = self.rules[direction].get(category)
        return rule.action if rule is not None and rule.is_shadow else None


def load_policies(path: Path | None) -> dict[str, Policy]:
    """Read the policies of *path*, or the packaged ones.

    Raises:
        PolicyError: the file cannot be read or is wrong.
    """
    try:
        raw = (
            path.read_bytes()
            if path is not None
            else resources.files("headrace_guard").joinpath("default.toml").read_bytes()
        )
        return parse_policies(raw.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot read the policy file: {error}") from error
    except PolicyError as error:
        raise PolicyError(f"{path or 'default.toml'}:\n{error}") from error


def parse_policies(text: str) -> dict[str, Policy]:
    """Read policies from TOML.

    Raises:
        PolicyError: something is wrong; all mistakes are listed.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"not TOML: {error}") from error
    reader = _Reader()
    policies = reader.read(document)
    if reader.mistakes:
        raise PolicyError("\n".join(reader.mistakes))
    return policies


def parse_policy(name: str, text: str, version: str) -> Policy:
    """Read one policy from the TOML of its own table.

    Raises:
        PolicyError: something is wrong; all mistakes are listed.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"not TOML: {error}") from error
    reader = _Reader()
    policy = reader.policy(name, table, version)
    if reader.mistakes:
        raise PolicyError("\n".join(reader.mistakes))
    return policy


class _Reader:
    """Walks a document and collects what is wrong with it."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []

    def read(self, document: dict[str, object]) -> dict[str, Policy]:
        self._refuse_unknown("the file", document, frozenset({"version", "policies"}))
        version = document.get("version")
        if not isinstance(version, str) or not version:
            self.mistakes.append("version: a text is wanted")
        tables = self._table("policies", document.get("policies"))
        if DEFAULT_POLICY not in tables:
            self.mistakes.append(f"policies: {DEFAULT_POLICY!r} is missing")
        return {
            name: self.policy(name, self._table(f"policies.{name}", table), str(version))
            for name, table in tables.items()
        }

    def policy(self, name: str, table: dict[str, object], version: str) -> Policy:
        at = f"policies.{name}"
        self._refuse_unknown(at, table, _POLICY_KEYS)
        for missing in sorted(_REQUIRED_KEYS - table.keys()):
            self.mistakes.append(f"{at}.{missing}: missing")
        flags = {flag: self._flag(f"{at}.{flag}", table.get(flag, False)) for flag in _FLAGS}
        topic = self._topic(f"{at}.topic", table.get("topic"))
        digest = hashlib.sha256(json.dumps(table, sort_keys=True, default=str).encode())
        return Policy(
            name=name,
            version=f"{version}/{name}/{digest.hexdigest()[:12]}/{DETECTORS_VERSION}",
            fails_open=flags["fails_open"],
            blocklist=self._blocklist(f"{at}.blocklist", table.get("blocklist", [])),
            owner_exempt=self._exempt(f"{at}.owner_exempt", table.get("owner_exempt", [])),
            rules={
                direction: self._rules(
                    f"{at}.{direction.value}",
                    table.get(direction.value, {}),
                    in_shadow=flags["shadow"],
                    has_topic=topic is not None,
                )
                for direction in Direction
            },
            topic=topic,
            uses_judge=flags["uses_judge"],
            keeps_text=flags["keeps_text"],
            table=table,
        )

    def _flag(self, at: str, value: object) -> bool:
        if not isinstance(value, bool):
            self.mistakes.append(f"{at}: true or false is wanted")
        return value is True

    def _topic(self, at: str, value: object) -> Topic | None:
        if value is None:
            return None
        examples = tuple(self._texts(at, value))
        if len(examples) < MIN_TOPIC_EXAMPLES:
            self.mistakes.append(
                f"{at}: at least {MIN_TOPIC_EXAMPLES} example questions are wanted"
            )
        return Topic(examples)

    def _blocklist(self, at: str, value: object) -> tuple[str, ...]:
        terms = self._texts(at, value)
        for term in terms:
            if not fold(term):
                self.mistakes.append(f"{at}: {term!r} has no visible character")
            if len(fold(term)) > MAX_TERM_CHARS:
                self.mistakes.append(f"{at}: a term has more than {MAX_TERM_CHARS} characters")
        return tuple(terms)

    def _exempt(self, at: str, value: object) -> frozenset[str]:
        names = self._texts(at, value)
        return frozenset(category for name in names for category in self._expand(at, name))

    def _rules(
        self, at: str, value: object, *, in_shadow: bool, has_topic: bool
    ) -> dict[str, CategoryRule]:
        table = self._table(at, value)
        rules: dict[str, CategoryRule] = {}
        # Shorter patterns first, so that a more exact one has the last word.
        for pattern in sorted(table, key=lambda name: (not name.endswith("*"), len(name))):
            rule = self._rule(f"{at}.{pattern}", table[pattern], in_shadow)
            if pattern == OFF_TOPIC and rule.action is not Action.OFF and not has_topic:
                self.mistakes.append(f"{at}.{pattern}: the policy has no topic")
            for category in self._expand(at, pattern):
                if category != OFF_TOPIC or has_topic:
                    rules[category] = rule
        return {name: rule for name, rule in rules.items() if rule.action is not Action.OFF}

    def _rule(self, at: str, value: object, in_shadow: bool) -> CategoryRule:
        table = value if isinstance(value, dict) else {"action": value}
        self._refuse_unknown(at, table, _RULE_KEYS)
        action = self._choice(at, table.get("action"), _ACTIONS)
        point = self._choice(f"{at}.point", table.get("point", Point.BALANCED.value), _POINTS)
        is_shadow = self._flag(f"{at}.shadow", table.get("shadow", in_shadow))
        return CategoryRule(action or Action.OFF, point or Point.BALANCED, is_shadow)

    def _choice(self, at: str, word: object, choices: Mapping[str, T]) -> T | None:
        chosen = choices.get(word) if isinstance(word, str) else None
        if chosen is None:
            self.mistakes.append(f"{at}: one of {', '.join(choices)} is wanted")
        return chosen

    def _expand(self, at: str, pattern: str) -> list[str]:
        found = [name for name in ALL_CATEGORIES if _covers(pattern, name)]
        if not found:
            self.mistakes.append(f"{at}: no category is called {pattern!r}")
        return found

    def _texts(self, at: str, value: object) -> list[str]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        self.mistakes.append(f"{at}: a list of texts is wanted")
        return []

    def _table(self, at: str, value: object) -> dict[str, object]:
        if isinstance(value, dict):
            return value
        self.mistakes.append(f"{at}: a table is wanted")
        return {}

    def _refuse_unknown(self, at: str, table: dict[str, object], known: frozenset[str]) -> None:
        for name in sorted(table.keys() - known):
            self.mistakes.append(f"{at}: {name!r} is unknown; known are {', '.join(sorted(known))}")


def _covers(pattern: str, category: str) -> bool:
    if pattern.endswith("*"):
        return category.startswith(pattern[:-1])
    return category == pattern
