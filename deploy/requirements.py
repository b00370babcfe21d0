"""Print what one service needs from other people, for its image: `python requirements.py gateway`.

Read from the extra of that name in the pyproject.toml of the working folder. An image installs this
first and takes the source afterwards, so that a change of the source installs nothing again.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extra: str) -> list[str]:
    """List the common requirements and those of *extra*.

    Raises:
        KeyError: there is no such extra.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"][extra]]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path("pyproject.toml"), sys.argv[1])) + "\n")
