"""Embeddings of windows, kept in a file so that each is made once."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.embedding import Embedder

_SAVE_EVERY = 1000


def key_of(text: str) -> str:
    """Return the key of a text; runs of white space make no difference to the model."""
    return hashlib.sha256(" ".join(text.split()).encode("utf-8", "surrogatepass")).hexdigest()[:24]


class VectorCache:
    """Embeddings by text.

    Args:
        path: the file; it is made if need be.
        embedder: makes what is missing; None = only what is there is used.
    """

    def __init__(self, path: Path, embedder: Embedder | None) -> None:
        self._path, self._embedder = path, embedder
        self._known: dict[str, NDArray[np.float16]] = {}
        if path.is_file():
            with np.load(path, allow_pickle=False) as kept:
                self._known = dict(zip(kept["keys"].tolist(), kept["vectors"], strict=True))

    def get(self, text: str) -> NDArray[np.float32] | None:
        """Return the embedding of a text, if it is there."""
        found = self._known.get(key_of(text))
        return None if found is None else found.astype(np.float32)

    def fill(self, texts: Iterable[str]) -> None:
        """Make what is missing, one text at a time as in serving."""
        if self._embedder is None:
            return
        missing = {key: text for text in texts if (key := key_of(text)) not in self._known}
        for number, (key, text) in enumerate(missing.items(), 1):
            self._known[key] = self._embedder.embed([text])[0].astype(np.float16)
            if number % _SAVE_EVERY == 0 or number == len(missing):
                self._save()
                sys.stderr.write(f"embedded {number} of {len(missing)}\n")

    def _save(self) -> None:
        draft = self._path.with_suffix(".tmp.npz")
        vectors = np.array(list(self._known.values()), np.float16)
        np.savez(draft, keys=np.array(list(self._known)), vectors=vectors)
        draft.replace(self._path)
