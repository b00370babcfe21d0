"""Policy files: read whole or refused with every mistake."""

from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from headrace_common.settings import SettingsError
from headrace_common.toml_file import load_toml


class Part(BaseModel):
    size: int = Field(ge=1)


class Whole(BaseModel):
    name: str
    part: Part


def test_reads_what_is_right(tmp_path: Path) -> None:
    """The model, filled."""
    path = tmp_path / "right.toml"
    path.write_text('name = "a"\n[part]\nsize = 2\n')
    assert load_toml(path, Whole, "a file") == Whole(name="a", part=Part(size=2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 1\n[part]\nsize = 0\n", r"a file .*name: .*; part\.size: "),
        ("name =", "a file "),
        (None, "a file .*No such file"),
    ],
)
def test_names_every_mistake(tmp_path: Path, text: str | None, message: str) -> None:
    """One message for all of them, with the file and the place in it."""
    path = tmp_path / "wrong.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_toml(path, Whole, "a file")
