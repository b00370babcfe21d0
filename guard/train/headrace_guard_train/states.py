"""What the embedding model says of windows, kept in a file so that each is looked at once."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.embedding import Embedded, Embeds

_SAVE_EVERY = 4000
Half = NDArray[np.float16]


def key_of(text: str) -> str:
    """Return the key of a text; runs of white space make no difference to the model."""
    return hashlib.sha256(" ".join(text.split()).encode("utf-8", "surrogatepass")).hexdigest()[:24]


class StateCache:
    """Token states and embeddings by text.

    Args:
        path: the file; it is made if need be.
        embedder: makes what is missing; None = only what is there is used.
    """

    def __init__(self, path: Path, embedder: Embeds | None) -> None:
        self._path, self._embedder = path, embedder
        self._known: dict[str, tuple[Half, Half]] = {}
        if path.is_file():
            with np.load(path, allow_pickle=False) as kept:
                states = np.split(kept["states"], np.cumsum(kept["lengths"])[:-1])
                pairs = zip(kept["vectors"], states, strict=True)
                self._known = dict(zip(kept["keys"].tolist(), pairs, strict=True))

    def get(self, text: str) -> Embedded | None:
        """Return what the model says of a text, if it is there."""
        found = self._known.get(key_of(text))
        if found is None:
            return None
        return Embedded(found[0].astype(np.float32), found[1].astype(np.float32))

    def fill(self, texts: Iterable[str]) -> None:
        """Make what is missing, one text at a time as in serving."""
        if self._embedder is None:
            return
        missing = {key: text for text in texts if (key := key_of(text)) not in self._known}
        for number, (key, text) in enumerate(missing.items(), 1):
            found = self._embedder.look(text)
            self._known[key] = found.vector.astype(np.float16), found.states.astype(np.float16)
            if number % _SAVE_EVERY == 0 or number == len(missing):
                self._save()
                sys.stderr.write(f"embedded {number} of {len(missing)}\n")

    def _save(self) -> None:
        draft = self._path.with_suffix(".tmp.npz")
        np.savez(
            draft,
            keys=np.array(list(self._known)),
            vectors=np.array([vector for vector, _ in self._known.values()], np.float16),
            lengths=np.array([len(states) for _, states in self._known.values()]),
            states=np.concatenate([states for _, states in self._known.values()]),
        )
        draft.replace(self._path)
