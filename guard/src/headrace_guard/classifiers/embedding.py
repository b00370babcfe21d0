"""Sentence embeddings by all-MiniLM-L6-v2 (int8, ONNX): one thread, one window at a time.

One run of the model gives both a text's embedding, for topics and hazards, and the states of its
tokens behind the fourth of six layers, both of which the dense stage reads
(`headrace_guard.classifiers.dense`). The file has no output for these; since messages of protocol
buffers that are written one behind the other are merged, a few bytes at its end add one.

The model is not part of this distribution: two files in a folder, ``model.onnx`` and
``tokenizer.json``, each checked by SHA-256 (``headrace model fetch`` brings them). Without them
there is no embedding stage, and whoever needs it is told so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from headrace_guard.classifiers.onnx_runtime import onnxruntime
from headrace_guard.classifiers.pieces import WordPieces

MODEL_FILE, TOKENIZER_FILE = "model.onnx", "tokenizer.json"
SHA256 = {
    MODEL_FILE: "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
    TOKENIZER_FILE: "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
NAME = "minilm-l6-int8"
NUM_DIMENSIONS = 384
MAX_TOKENS = 128
# The norm at the end of the fourth layer.
_STATES = "layer_norm_8"


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a protocol buffer message that is shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


# ModelProto.graph (7), GraphProto.output (12), ValueInfoProto.name (1).
_FURTHER_OUTPUT = _field(7, _field(12, _field(1, _STATES.encode())))


class EmbeddingMissingError(Exception):
    """The model's files are not there or not the right ones; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """What the model says of one text.

    Args:
        vector: its embedding, of length one.
        states: of its tokens behind the fourth layer, one row a token.
    """

    vector: NDArray[np.float32]
    states: NDArray[np.float32]


class Embeds(Protocol):
    """Makes embeddings."""

    def look(self, text: str) -> Embedded:
        """Return what the model says of a text."""
        ...

    def pieces(self, text: str) -> Sequence[int]:
        """Return the ids of a text's word pieces, without those that frame it."""
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
        model = (folder / MODEL_FILE).read_bytes() + _FURTHER_OUTPUT
        self._session = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {one.name for one in self._session.get_inputs()}
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._pieces = WordPieces(self._tokenizer)

    @property
    def num_pieces(self) -> int:
        """Number of word pieces that the model knows."""
        return self._tokenizer.get_vocab_size()

    def pieces(self, text: str) -> list[int]:
        """Return the ids of a text's word pieces; what is behind `MAX_TOKENS` is not seen."""
        return self._pieces.of(text)[: MAX_TOKENS - 2]

    def look(self, text: str) -> Embedded:
        """Return what the model says of a text; what is behind `MAX_TOKENS` of it is not seen."""
        last, states = self._run(np.array([self._tokenizer.encode(text).ids], np.int64))
        vector = last[0].mean(axis=0) if last.ndim == 3 else last[0]
        unit: NDArray[np.float32] = vector / max(float(np.linalg.norm(vector)), 1e-9)
        return Embedded(unit, states[0])

    def look_at_pieces(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the embedding of each word piece alone, one row a piece."""
        first, last = self._tokenizer.encode("").ids
        framed = np.array([[first, one, last] for one in ids], np.int64)
        vectors = self._run(framed)[0].mean(axis=1)
        rows: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return rows

    def _run(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        given = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids),
        }
        inputs = {name: value for name, value in given.items() if name in self._inputs}
        last, states = self._session.run(None, inputs)
        return np.asarray(last, np.float32), np.asarray(states, np.float32)


def _check(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EmbeddingMissingError(f"{path} cannot be read: {error.strerror}") from error
    if found != expected:
        raise EmbeddingMissingError(f"{path} has SHA-256 {found}, expected {expected}")
