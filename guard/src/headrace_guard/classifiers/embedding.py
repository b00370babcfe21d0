"""Sentence embeddings by all-MiniLM-L6-v2 (int8, ONNX): one thread, one window at a time.

The model is not part of this distribution: two files in a folder, ``model.onnx`` and
``tokenizer.json``, each checked by SHA-256 (``headrace model fetch`` brings them). Without them
there is no embedding stage, and whoever needs it is told so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

MODEL_FILE, TOKENIZER_FILE = "model.onnx", "tokenizer.json"
SHA256 = {
    MODEL_FILE: "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
    TOKENIZER_FILE: "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
NAME = "minilm-l6-int8"
NUM_DIMENSIONS = 384
MAX_TOKENS = 128


class EmbeddingMissingError(Exception):
    """The model's files are not there or not the right ones; the message says which and why."""


class Embeds(Protocol):
    """Makes embeddings."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one unit vector a text."""
        ...


class Embedder:
    """Turns texts into unit vectors. May be used by several threads, but uses one at a time.

    Args:
        folder: where the two files are.

    Raises:
        EmbeddingMissingError: a file is missing or is not what it should be.
    """

    def __init__(self, folder: Path) -> None:
        for name, expected in SHA256.items():
            _check(folder / name, expected)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # A thread that spins doubles the use of CPU for nothing.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            str(folder / MODEL_FILE), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {one.name for one in self._session.get_inputs()}
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TOKENS)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one unit vector a text; what is behind `MAX_TOKENS` of a text is not seen."""
        vectors = np.empty((len(texts), NUM_DIMENSIONS), np.float32)
        for row, text in enumerate(texts):
            vectors[row] = self._one(text)
        return vectors

    def _one(self, text: str) -> NDArray[np.float32]:
        ids = np.array([self._tokenizer.encode(text).ids], np.int64)
        given = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids),
        }
        output = self._session.run(None, {k: v for k, v in given.items() if k in self._inputs})[0]
        vector = np.asarray(output, np.float32)[0]
        if vector.ndim == 2:
            vector = vector.mean(axis=0)
        unit: NDArray[np.float32] = vector / max(float(np.linalg.norm(vector)), 1e-9)
        return unit


def _check(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EmbeddingMissingError(f"{path} cannot be read: {error.strerror}") from error
    if found != expected:
        raise EmbeddingMissingError(f"{path} has SHA-256 {found}, expected {expected}")
