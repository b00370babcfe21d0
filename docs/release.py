"""Make a release: fold the fragments of docs/changes into CHANGELOG.md and set the version.

Usage: ``python docs/release.py VERSION``. Writes files and nothing else; the commit and its tag are
the caller's (CONTRIBUTING.md). All fragments are read before anything is written.
"""

from __future__ import annotations

import argparse
import re
import sys
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In the order of the change log.
KINDS = {"breaking": "Breaking", "feature": "New", "fix": "Fixed", "perf": "Faster"}
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_STANDING = re.compile(r'^version = "([^"]*)"$', re.MULTILINE)


class ReleaseError(Exception):
    """No release can be made; the message says why."""


def read_fragments(folder: Path) -> dict[str, list[str]]:
    """Return the entries of each kind, by the names of their files.

    Raises:
        ReleaseError: a fragment is empty or its name does not end in ``.<kind>.md``.
    """
    entries: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in sorted(folder.glob("*")):
        *_, kind, ending = ["", "", *path.name.split(".")]
        text = path.read_text(encoding="utf-8").strip()
        if ending != "md" or kind not in KINDS:
            raise ReleaseError(f"{path.name}: wanted <id>.<{'|'.join(KINDS)}>.md")
        if not text:
            raise ReleaseError(f"{path.name} is empty")
        entries[kind].append(_entry(text))
    return entries


def _entry(text: str) -> str:
    """Make a paragraph an item; what is a list already stays one."""
    if text.startswith("- "):
        return text
    first, *others = text.splitlines()
    return "\n".join([f"- {first}", *(f"  {line}" if line else "" for line in others)])


def section(version: str, day: date, entries: dict[str, list[str]]) -> str:
    """Write the section of one release."""
    parts = [f"## {version} ({day.isoformat()})"]
    for kind, title in KINDS.items():
        if entries[kind]:
            parts += [f"### {title}", "\n".join(entries[kind])]
    return "\n\n".join(parts) + "\n"


def release(root: Path, version: str, day: date) -> int:
    """Fold all fragments of a checkout; return how many.

    Raises:
        ReleaseError: the version is none or was released, or the fragments are none or wrong.
    """
    project, changelog = root / "pyproject.toml", root / "CHANGELOG.md"
    standing = _STANDING.search(project.read_text(encoding="utf-8"))
    before = changelog.read_text(encoding="utf-8")
    if not _VERSION.fullmatch(version):
        raise ReleaseError(f"{version!r} is no version such as 1.2.3")
    if standing is None or _numbers(version) < _numbers(standing[1]):
        raise ReleaseError(f"{version} comes before the version of pyproject.toml")
    if f"\n## {version} " in before:
        raise ReleaseError(f"{version} stands in CHANGELOG.md already")
    entries = read_fragments(root / "docs/changes")
    number = sum(map(len, entries.values()))
    if not number:
        raise ReleaseError("docs/changes is empty: nothing has changed")
    head, mark, released = before.partition("\n## ")
    changelog.write_text(
        f"{head.rstrip()}\n\n{section(version, day, entries)}{mark}{released}", encoding="utf-8"
    )
    text = _STANDING.sub(f'version = "{version}"', project.read_text(encoding="utf-8"), count=1)
    project.write_text(text, encoding="utf-8")
    for path in (root / "docs/changes").glob("*"):
        path.unlink()
    return number


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def main() -> None:
    """Make the release that is asked for, or say why not and exit with 1."""
    parser = argparse.ArgumentParser(description="Fold docs/changes into CHANGELOG.md.")
    parser.add_argument("version")
    version = parser.parse_args().version
    try:
        number = release(ROOT, version, datetime.now(UTC).date())
    except ReleaseError as error:
        sys.exit(f"no release: {error}")
    sys.stdout.write(f"{version}: {number} changes\n")


if __name__ == "__main__":
    main()
