"""Documents can be followed: links lead somewhere, files shown are read, options exist."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest

from headrace_gateway.model_routes.route_file import load_route_file
from headrace_launcher.cli import build_parser
from headrace_launcher.service_programs import program_of
from headrace_launcher.upstream_file import load_upstreams

ROOT = Path(__file__).parents[1]
# Written to be read elsewhere: folded into the change log, or put before a report.
_PARTS = ("docs/changes/", "guard/train/report-foreword.md")
DOCUMENTS = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    if not name.startswith(_PARTS)
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_FILE = re.compile(r"`([\w./-]+\.py)`")
# A command in a line of text, or on an indented line of its own.
_COMMAND = re.compile(r"`(headrace [^`|]+)`|^ {4}(headrace [^;#|\n]+)", re.MULTILINE)
Options = dict[tuple[str, ...], set[str]]


def anchors(path: Path) -> set[str]:
    headings = (re.sub(r"[^\w\- ]", "", it.lower()) for it in _HEADING.findall(path.read_text()))
    return {it.strip().replace(" ", "-") for it in headings}


def options(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Options:
    """Return the options of each command and of the groups it is in."""
    found: Options = {words: set()}
    for action in parser._actions:
        found[words] |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                found |= options(below, (*words, word))
    return found


def test_links_lead_somewhere() -> None:
    """To a file that is there, and to a heading of it."""
    dead = []
    for document in DOCUMENTS:
        for link in _LINK.findall(document.read_text()):
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            if ":" in name:
                continue
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(f"{document.relative_to(ROOT)}: {link}")
    assert dead == []
    assert len(DOCUMENTS) > 50


def test_files_that_are_named_are_there() -> None:
    """By the end of their path; a decision keeps the names of its day."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    there, seen, gone = listed.stdout.split(), 0, []
    for document in DOCUMENTS:
        if document.parent.name == "adr":
            continue
        for name in _FILE.findall(document.read_text()):
            end = "/" + name.rpartition(".../")[2]
            seen += 1
            if not any(f"/{path}".endswith(end) for path in there):
                gone.append(f"{document.relative_to(ROOT)}: {name}")
    assert gone == []
    assert seen > 100


def test_commands_have_the_options_that_are_told() -> None:
    """In every document; of programs with a command line of their own others know."""
    known, wrong, seen = options(build_parser()), [], 0
    for document in DOCUMENTS:
        for found in _COMMAND.findall(document.read_text()):
            command = "".join(found)
            words = command.split()[1:]
            if program_of(words) is not None:
                continue
            ends = [end for end in range(len(words) + 1) if tuple(words[:end]) in known]
            offered = known[tuple(words[: ends[-1]])]
            if ends[-1] == 0 and words[0].isalpha() and words[0].islower():
                wrong.append(f"{document.relative_to(ROOT)}: there is no {command}")
            told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", command))
            wrong += [f"{document.relative_to(ROOT)}: {command}: {it}" for it in told - offered]
            seen += len(told)
    assert wrong == []
    assert seen > 20


@pytest.mark.parametrize(
    ("document", "read"), [("model-routes", load_route_file), ("upstreams", load_upstreams)]
)
def test_a_file_that_is_shown_is_one_that_is_read(document: str, read, tmp_path: Path) -> None:
    """What is copied out of a document is refused by nobody."""
    shown = re.findall(r"```toml\n(.*?)```", (ROOT / f"docs/{document}.md").read_text(), re.DOTALL)
    assert shown
    for number, text in enumerate(shown):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        read(path)
