"""The file of model routes: what is wrong with one is told, by its reader and by the command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace_gateway.__main__ import main

BROKEN = Path(__file__).parent / "broken_routes"
MISTAKES = {
    "chain": "routes.a leads to b, which is a route too",
    "head_missing": "routes.a: cascade head absent.json",
    "leads_nowhere": "routes.a: give either model or split or cascade",
    "misspelt_key": "routes.a.modell: ",
    "name_with_a_blank": "routes.a b.",
    "newer_version": "version: ",
    "no_toml": "line 2",
    "no_version": "version: Field required",
    "twice_in_a_split": "routes.a: split names a model twice",
    "two_ways": "routes.a: give either model or split or cascade",
    "unknown_failure": "routes.a.fallback_on.0: ",
    "weight_of_nothing": "routes.a.split.0.weight: ",
}


def check(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """Run the command in this process; return its exit code and all that it said."""
    monkeypatch.setattr(sys, "argv", ["headrace-gateway", "--check-config", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    return ended.value.code, told.out + told.err


@pytest.mark.parametrize("name", sorted(path.stem for path in BROKEN.glob("*.toml")))
def test_a_broken_file_is_refused_with_its_mistake(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sample per mistake; the key or the line is named."""
    code, told = check(BROKEN / f"{name}.toml", monkeypatch, capsys)
    assert code == 2
    assert MISTAKES[name] in told
    assert "Value error" not in told


def test_every_kind_of_mistake_has_its_sample() -> None:
    """One file each."""
    assert {path.stem for path in BROKEN.glob("*.toml")} == set(MISTAKES)


def test_a_good_file_is_told_with_what_it_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And which cascade would rest, since its head was measured for other models."""
    path = tmp_path / "routes.toml"
    path.write_text(
        'version = 1\nrevision = "r7"\n'
        '[routes.alias]\nmodel = "m"\nfallbacks = ["n"]\n'
        '[routes.auto]\ncascade = { small = "m", large = "n", head = "smollm2-gemma3" }\n'
    )
    code, told = check(path, monkeypatch, capsys)
    assert code == 0
    lines = told.splitlines()
    assert lines[0] == f"{path}: 2 routes, revision r7"
    assert lines[1] == "alias: alias of m, n"
    assert lines[2] == "auto: cascade of m, n"
    assert lines[3].startswith("auto: the cascade is off, ")
