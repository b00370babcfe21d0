"""docs/release.py: fragments become a section of the change log, each once."""

from __future__ import annotations

import importlib.util
import shutil
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DAY = date(2026, 12, 1)


@pytest.fixture(scope="module")
def releasing() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "docs/release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a release touches."""
    (tmp_path / "docs/changes").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\nWhat this is.\n")
    return tmp_path


def change(checkout: Path, name: str, text: str) -> None:
    (checkout / "docs/changes" / name).write_text(text)


def test_two_releases_stand_newest_first(releasing: ModuleType, checkout: Path) -> None:
    """Breaking changes lead, paragraphs become items, and no fragment is told twice."""
    change(checkout, "slow.fix.md", "A paragraph\nof two lines.\n")
    change(checkout, "other.breaking.md", "- One.\n- Two.\n")
    assert releasing.release(checkout, "0.1.0", DAY) == 2
    assert not list((checkout / "docs/changes").iterdir())
    change(checkout, "new.feature.md", "More.")
    releasing.release(checkout, "0.2.0", DAY)
    assert (checkout / "CHANGELOG.md").read_text() == (
        "# Changelog\n\nWhat this is.\n\n"
        "## 0.2.0 (2026-12-01)\n\n### New\n\n- More.\n\n"
        "## 0.1.0 (2026-12-01)\n\n### Breaking\n\n- One.\n- Two.\n\n"
        "### Fixed\n\n- A paragraph\n  of two lines.\n"
    )
    assert 'version = "0.2.0"' in (checkout / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("version", "name", "text", "told"),
    [
        ("0.2", "a.fix.md", "x", "is no version"),
        ("0.0.9", "a.fix.md", "x", "comes before"),
        ("0.1.0", "a.fix.md", "x", "already"),
        ("0.2.0", "a.bug.md", "x", "a.bug.md: wanted"),
        ("0.2.0", "fix.md", "", "is empty"),
        ("0.2.0", "a.fix.txt", "x", "a.fix.txt: wanted"),
    ],
)
def test_a_mistake_changes_nothing(
    releasing: ModuleType, checkout: Path, version: str, name: str, text: str, told: str
) -> None:
    """Each is told before anything is written."""
    with (checkout / "CHANGELOG.md").open("a") as log:
        log.write("\n## 0.1.0 (2026-11-01)\n\n### New\n\n- Old.\n")
    change(checkout, name, text)
    before = (checkout / "CHANGELOG.md").read_text()
    with pytest.raises(releasing.ReleaseError, match=told):
        releasing.release(checkout, version, DAY)
    assert (checkout / "CHANGELOG.md").read_text() == before
    assert (checkout / "docs/changes" / name).exists()


def test_the_fragments_of_this_tree_can_be_released(releasing: ModuleType, checkout: Path) -> None:
    """All of them, each with a name that says its kind."""
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, checkout / name)
    texts = []
    for path in (ROOT / "docs/changes").glob("*"):
        shutil.copy(path, checkout / "docs/changes")
        texts.append(path.read_text())
    # A release has just taken them all.
    if texts:
        assert releasing.release(checkout, "999.0.0", DAY) == len(texts)
    folded = (checkout / "CHANGELOG.md").read_text()
    for text in texts:
        for line in text.splitlines():
            assert line in folded
