"""What one run leaves for the next: arrays in files whose names say what they were made from.

A file of other rows, another plan or another program has another name, so it is never taken; one
that was not written to its end has none yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[np.generic]]


class Kept:
    """Arrays in a folder.

    Args:
        folder: it is made if need be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def arrays(self, name: str, made_from: Iterable[object], make: Callable[[], Arrays]) -> Arrays:
        """Return what *make* returns, or what it returned when it was made from the same before.

        Args:
            name: of the file's beginning.
            made_from: everything that the arrays follow from: arrays, and what prints alike.
            make: makes them.
        """
        path = self._folder / f"{name}-{key_of(made_from)}.npz"
        if not path.is_file():
            draft = path.with_suffix(".tmp.npz")
            np.savez(draft, **make())  # type: ignore[arg-type]  # numpy's stub
            draft.replace(path)
        with np.load(path, allow_pickle=False) as found:
            return dict(found)


def key_of(made_from: Iterable[object]) -> str:
    """Return a short digest of arrays and of what prints alike."""
    digest = hashlib.sha256()
    for one in made_from:
        if isinstance(one, np.ndarray):
            digest.update(f"{one.dtype} {one.shape} ".encode())
            digest.update(np.ascontiguousarray(one).tobytes())
        else:
            digest.update(f"{one!r}\0".encode())
    return digest.hexdigest()[:16]
