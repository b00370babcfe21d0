"""The folder that `headrace_worker.prepare` makes once and every later start maps into memory.

::

    headrace_model.json    format, config, fingerprint, special tokens, source, sizes of the others
    model.safetensors      float32, fused matrices, one entry per key of `weights.tensor_plan`
    blocks.safetensors     uint8, the matrices that the source has quantised, as `kernels.blocks`
    tokenizer.json
    chat_template.jinja    empty if the model has none
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import safe_open

from headrace_worker.kernels.blocks import BlockMatrix
from headrace_worker.model.config import ModelConfig
from headrace_worker.model.info import ModelInfo
from headrace_worker.model.weights import LoadedModel, assemble, num_columns
from headrace_worker.sampling_defaults import SamplingDefaults, recommended

# Raised when files of an older layout must be made anew.
FORMAT = 2
MANIFEST = "headrace_model.json"
WEIGHTS = "model.safetensors"
BLOCKS = "blocks.safetensors"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
# Rows start on cache lines.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Source:
    """The file that a folder was made of.

    Args:
        sha256: of its content, hex.
        sampling: what it recommends.
    """

    sha256: str
    sampling: SamplingDefaults

    def to_json(self) -> dict[str, Any]:
        """Return it as the manifest has it."""
        return {"sha256": self.sha256, "sampling": self.sampling.said}


@dataclass(frozen=True)
class Manifest:
    """Content of headrace_model.json beside format and file sizes."""

    config: ModelConfig
    fingerprint: str
    special_tokens: Mapping[str, str]
    created_unix_s: int
    source: Source

    def write(self, folder: Path) -> None:
        """Write it, last of all files, with the sizes of the others."""
        files = (WEIGHTS, BLOCKS, TOKENIZER, CHAT_TEMPLATE)
        values = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "created_unix_s": self.created_unix_s,
            "special_tokens": dict(self.special_tokens),
            "source": self.source.to_json(),
            "config": self.config.to_json(),
            "file_bytes": {name: (folder / name).stat().st_size for name in files},
        }
        (folder / MANIFEST).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def is_complete(folder: Path) -> bool:
    """Say whether *folder* is a prepared model of the current format with all its files."""
    try:
        values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = values["file_bytes"].items()
        return values["format"] == FORMAT and all(
            (folder / name).stat().st_size == size for name, size in sizes
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def tells_source(folder: Path) -> bool:
    """Say whether a complete folder names its source; those of earlier versions do not."""
    return "source" in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def tell_source(folder: Path, source: Source) -> None:
    """Write the source into the manifest of a complete folder; atomic."""
    values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    draft = folder / f"{MANIFEST}.tmp"
    told = {**values, "source": source.to_json()}
    draft.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    draft.replace(folder / MANIFEST)


def load_prepared_folder(folder: Path) -> LoadedModel:
    """Map a prepared folder into memory."""
    values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    config = ModelConfig.from_json(values["config"])
    with safe_open(folder / WEIGHTS, framework="pt") as opened:
        weights = assemble(config, opened.get_tensor)
    with safe_open(folder / BLOCKS, framework="pt") as opened:
        blocks = {
            name: BlockMatrix(opened.get_tensor(name), num_columns(config, name))
            for name in opened.keys()  # noqa: SIM118 - not a dict
        }
    info = ModelInfo(
        fingerprint=values["fingerprint"],
        context_tokens=config.context_tokens,
        vocab_size=config.vocab_size,
        chat_template=(folder / CHAT_TEMPLATE).read_text(encoding="utf-8"),
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        add_bos=config.add_bos,
        tokenizer_json=(folder / TOKENIZER).read_bytes(),
        special_tokens=values["special_tokens"],
        kv_bytes_per_token=config.kv_bytes_per_token,
        created_unix_s=values["created_unix_s"],
        sampling_defaults=_sampling_defaults(values.get("source")),
    )
    return LoadedModel(config, weights, info, blocks)


def _sampling_defaults(source: dict[str, Any] | None) -> SamplingDefaults:
    if source is None:
        return SamplingDefaults()
    return SamplingDefaults(**source["sampling"]).over(recommended(source["sha256"]))


def write_safetensors_header(
    file: BinaryIO, shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: str = "F32"
) -> None:
    """Write the header of a safetensors file whose tensors, "F32" or "U8", follow in this order.

    Streaming the tensors after it keeps memory at one tensor, where the library wants them all.
    """
    entries: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes:
        end = offset + (4 if dtype == "F32" else 1) * _product(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT_BYTES)
    file.write(len(header).to_bytes(8, "little") + header)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
