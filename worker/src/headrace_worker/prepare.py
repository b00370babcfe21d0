"""Convert a GGUF file once into a folder that loads in no time.

``python -m headrace_worker.prepare FILE.gguf FOLDER`` prints one JSON object a line:
``{"phase": "weights", "done": 12, "total": 272}``. The folder appears whole or not at all (it is
made beside its place and renamed), a complete one is left alone, and processes that want the same
folder at the same time wait for one another on a file lock.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace_common.errors import HeadraceError, InvalidRequest, Unavailable
from headrace_worker.kernels.blocks import ByteArray
from headrace_worker.model import prepared_folder
from headrace_worker.model.config import ModelConfig
from headrace_worker.model.damage import refusing_damage
from headrace_worker.model.gguf_reader import GgufFile
from headrace_worker.model.gguf_tokenizer import build_tokenizer
from headrace_worker.model.prepared_folder import Manifest, Source
from headrace_worker.model.weights import tensor_plan

# Called with a phase ("lock", "hash", "tokenizer", "weights", "done"), units done and units in all.
Progress = Callable[[str, int, int], None]

_SPARE_BYTES = 64 << 20
# float32, and at most one byte and an eighth for the quantised form.
_BYTES_PER_PARAMETER = 6
# Holds the header, and at the other end weights, which differ between any two trainings.
_END_BYTES = 1 << 20
_HASH_CHUNK_BYTES = 4 << 20


def ensure_prepared(source: Path, cache_dir: Path, progress: Progress | None = None) -> Path:
    """Return a folder that `model.loader.load_model` takes, making it if need be.

    Args:
        source: a GGUF file, or a model folder, which is returned as it is.
        cache_dir: where prepared folders are kept.
        progress: told what is being done; may be called from the calling thread only.

    Raises:
        InvalidRequest: there is no such model, or it is of a kind that the engine cannot compute.
        Unavailable: the disk is too full.
    """
    if source.is_dir():
        return source
    if not source.is_file():
        raise InvalidRequest(f"there is no model at {source}")
    folder = prepared_dir(source, cache_dir)
    prepare(source, folder, progress)
    return folder


def prepared_dir(source: Path, cache_dir: Path) -> Path:
    """Name the folder of a GGUF file, by its size, its two ends and the format.

    The whole content is not hashed: that would read the file at each start. The time of change is
    no part of it: a file fetched again is the same file.
    """
    digest = hashlib.sha256(f"{prepared_folder.FORMAT}|{source.stat().st_size}|".encode())
    with source.open("rb") as file:
        digest.update(file.read(_END_BYTES))
        file.seek(max(0, source.stat().st_size - _END_BYTES))
        digest.update(file.read(_END_BYTES))
    return cache_dir / f"{source.stem}-{digest.hexdigest()[:12]}"


def prepare(source: Path, folder: Path, progress: Progress | None = None) -> None:
    """Make *folder* from a GGUF file unless it is there and complete.

    Raises:
        InvalidRequest: the file is no GGUF or of a kind that this engine does not compute.
        Unavailable: the disk is too full.
    """
    report = progress or _ignore
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not _is_current(folder):
        with _locked(folder, report):
            # Another process may have made it while we waited.
            if not prepared_folder.is_complete(folder):
                _prepare_locked(source, folder, report)
            elif not prepared_folder.tells_source(folder):
                sampling = GgufFile(source).sampling_defaults
                prepared_folder.tell_source(folder, Source(_file_sha256(source, report), sampling))
    report("done", 1, 1)


def _is_current(folder: Path) -> bool:
    return prepared_folder.is_complete(folder) and prepared_folder.tells_source(folder)


def _prepare_locked(source: Path, folder: Path, report: Progress) -> None:
    for left_over in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(left_over)
    gguf = GgufFile(source)
    _check_disk(folder.parent, gguf.config)
    unfinished = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    unfinished.mkdir()
    try:
        with refusing_damage(source, "GGUF file"):
            _write(gguf, source, unfinished, report)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write(gguf: GgufFile, source: Path, folder: Path, report: Progress) -> None:
    source_sha256 = _file_sha256(source, report)
    report("tokenizer", 0, 1)
    tokenizer_json = build_tokenizer(gguf.metadata).to_str().encode()
    (folder / prepared_folder.TOKENIZER).write_bytes(tokenizer_json)
    (folder / prepared_folder.CHAT_TEMPLATE).write_text(gguf.chat_template, encoding="utf-8")
    report("tokenizer", 1, 1)
    _write_weights(gguf, folder / prepared_folder.WEIGHTS, report)
    _write_blocks(gguf, folder / prepared_folder.BLOCKS)
    tokenizer_sha256 = hashlib.sha256(tokenizer_json).hexdigest()
    identity = f"headrace-gguf/{prepared_folder.FORMAT}|{source_sha256}|{tokenizer_sha256}"
    Manifest(
        config=gguf.config,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        special_tokens=gguf.special_tokens,
        created_unix_s=int(source.stat().st_mtime),
        source=Source(source_sha256, gguf.sampling_defaults),
    ).write(folder)


def _write_weights(gguf: GgufFile, path: Path, report: Progress) -> None:
    plan = tensor_plan(gguf.config)
    total = sum(len(parts) for parts in plan.values())
    done = 0
    with path.open("wb") as file:
        shapes = [(name, _fused_shape(gguf, parts)) for name, parts in plan.items()]
        prepared_folder.write_safetensors_header(file, shapes)
        for parts in plan.values():
            for part in parts:
                file.write(gguf.tensor(part).data)
                done += 1
                report("weights", done, total)
        file.flush()
        os.fsync(file.fileno())


def _write_blocks(gguf: GgufFile, path: Path) -> None:
    """Write the fused matrices of which every part is quantised alike."""
    fused: dict[str, list[ByteArray]] = {}
    for name, parts in tensor_plan(gguf.config).items():
        rows = [rows for rows in map(gguf.blocks, parts) if rows is not None]
        if len(rows) == len(parts) and len({part.shape[1] for part in rows}) == 1:
            fused[name] = rows
    with path.open("wb") as file:
        shapes = [(name, (sum(map(len, rows)), rows[0].shape[1])) for name, rows in fused.items()]
        prepared_folder.write_safetensors_header(file, shapes, "U8")
        for rows in fused.values():
            for part in rows:
                file.write(part.data)
        file.flush()
        os.fsync(file.fileno())


def _fused_shape(gguf: GgufFile, parts: Sequence[str]) -> tuple[int, ...]:
    shapes = [gguf.shape(part) for part in parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _check_disk(folder: Path, config: ModelConfig) -> None:
    needed = _BYTES_PER_PARAMETER * config.num_parameters + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Unavailable(
            f"Preparing the model needs {needed >> 20} MiB in {folder}, but only {free >> 20} MiB "
            "are free. Free space there or choose another cache folder."
        )


@contextmanager
def _locked(folder: Path, report: Progress) -> Iterator[None]:
    """Hold the folder's lock; the kernel frees it if the process dies."""
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        report("lock", 0, 1)
        fcntl.flock(file, fcntl.LOCK_EX)
        report("lock", 1, 1)
        yield


def _file_sha256(path: Path, report: Progress) -> str:
    digest = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report("hash", done, total)
    return digest.hexdigest()


def _ignore(_phase: str, _done: int, _total: int) -> None:
    """Tell nobody."""


def _print_progress(phase: str, done: int, total: int) -> None:
    sys.stdout.write(json.dumps({"phase": phase, "done": done, "total": total}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run the command; 0 = the folder is there, 1 = it could not be made, said on stderr."""
    parser = argparse.ArgumentParser(prog="python -m headrace_worker.prepare", description=__doc__)
    parser.add_argument("source", type=Path, help="a GGUF file")
    parser.add_argument("folder", type=Path, help="the folder to make")
    args = parser.parse_args()
    try:
        prepare(args.source, args.folder, _print_progress)
    except HeadraceError as error:
        sys.stderr.write(f"{error.public_message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
