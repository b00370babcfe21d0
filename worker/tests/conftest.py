"""Time for the worker's tests: whichever comes first compiles the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

# A compiler that shares its cores with other work may take minutes.
_TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give them longer than the rest, where they do not say it themselves."""
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))
