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

from headrace_guard.classifiers.blocklist import MAX_TERM_CHARS
from headrace_guard.classifiers.catalogue import CATEGORIES, DETECTORS_VERSION
from headrace_guard.normalise import fold
from headrace_guard.verdict import Action

DEFAULT_POLICY = "default"
_POLICY_KEYS = frozenset({"fails_open", "blocklist", "owner_exempt", "input", "output"})
_ACTIONS = {
    "off": Action.OFF,
    "allow": Action.ALLOW,
    "flag": Action.FLAG,
    "redact": Action.REDACT,
    "block": Action.BLOCK,
}


class PolicyError(Exception):
    """The policy file is wrong; the message lists every mistake, one a line."""


class Direction(Enum):
    """Into the model or out of it."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True)
class Policy:
    """One policy.

    Args:
        name: how keys name it.
        version: of the file, this policy and the detectors.
        fails_open: whether what could not be judged passes.
        blocklist: words and phrases of the policy itself.
        owner_exempt: categories not looked for in text of the key's owner.
        actions: per direction, an action for every category that is not off.
    """

    name: str
    version: str
    fails_open: bool
    blocklist: tuple[str, ...]
    owner_exempt: frozenset[str]
    actions: Mapping[Direction, Mapping[str, Action]]

    def action(self, direction: Direction, category: str) -> Action:
        """Return what is done about *category*."""
        return self.actions[direction].get(category, Action.OFF)


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
            name: self._policy(name, self._table(f"policies.{name}", table), str(version))
            for name, table in tables.items()
        }

    def _policy(self, name: str, table: dict[str, object], version: str) -> Policy:
        at = f"policies.{name}"
        self._refuse_unknown(at, table, _POLICY_KEYS)
        for missing in sorted(_POLICY_KEYS - table.keys()):
            self.mistakes.append(f"{at}.{missing}: missing")
        fails_open = table.get("fails_open", False)
        if not isinstance(fails_open, bool):
            self.mistakes.append(f"{at}.fails_open: true or false is wanted")
        digest = hashlib.sha256(json.dumps(table, sort_keys=True, default=str).encode())
        return Policy(
            name=name,
            version=f"{version}/{name}/{digest.hexdigest()[:12]}/{DETECTORS_VERSION}",
            fails_open=bool(fails_open),
            blocklist=self._blocklist(f"{at}.blocklist", table.get("blocklist", [])),
            owner_exempt=self._exempt(f"{at}.owner_exempt", table.get("owner_exempt", [])),
            actions={
                direction: self._actions(f"{at}.{direction.value}", table.get(direction.value, {}))
                for direction in Direction
            },
        )

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

    def _actions(self, at: str, value: object) -> dict[str, Action]:
        table = self._table(at, value)
        actions: dict[str, Action] = {}
        # Shorter patterns first, so that a more exact one has the last word.
        for pattern in sorted(table, key=lambda name: (not name.endswith("*"), len(name))):
            word = table[pattern]
            action = _ACTIONS.get(word) if isinstance(word, str) else None
            if action is None:
                self.mistakes.append(f"{at}.{pattern}: one of {', '.join(_ACTIONS)} is wanted")
            for category in self._expand(at, pattern):
                actions[category] = action or Action.OFF
        return {name: action for name, action in actions.items() if action is not Action.OFF}

    def _expand(self, at: str, pattern: str) -> list[str]:
        found = [name for name in CATEGORIES if _covers(pattern, name)]
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
