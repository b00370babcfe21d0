"""Converting a GGUF: once, whole or not at all, and equal to the original."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer

from headrace_common.errors import InvalidRequest, Unavailable
from headrace_testing.tiny_model import TinyShape, tiny_tokenizer, write_gguf, write_hf_folder
from headrace_worker import prepare as prepare_module
from headrace_worker.model.loader import load_model
from headrace_worker.model.prepared_folder import FORMAT, MANIFEST, is_complete
from headrace_worker.model.runner import ModelRunner, Row
from headrace_worker.prepare import ensure_prepared, prepare, prepared_dir

FILES = {
    "headrace_model.json",
    "model.safetensors",
    "blocks.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.mark.parametrize("is_head_tied", [True, False])
def test_prepared_model_equals_the_hf_folder(tmp_path: Path, *, is_head_tied: bool) -> None:
    """The same weights by way of a GGUF and as an HF folder give the same logits, bit for bit."""
    shape = TinyShape(is_head_tied=is_head_tied)
    write_hf_folder(tmp_path / "hf", shape)
    write_gguf(tmp_path / "m.gguf", shape)
    folder = ensure_prepared(tmp_path / "m.gguf", tmp_path / "cache")
    row = Row(list(range(40)), 0, [2, 0, 1], 40)
    logits = [ModelRunner(path, 4).forward([row]) for path in (folder, tmp_path / "hf")]
    assert torch.equal(logits[0], logits[1])


def test_prepared_folder_has_texts_and_tokenizer(tmp_path: Path, source: Path) -> None:
    """The folder holds exactly its files; info is filled from them."""
    folder = ensure_prepared(source, tmp_path / "cache")
    assert {path.name for path in folder.iterdir()} == FILES
    info = load_model(folder).info
    ids = Tokenizer.from_str(info.tokenizer_json.decode()).encode("the 12 ants<|im_end|>").ids
    assert ids == tiny_tokenizer().encode("the 12 ants<|im_end|>").ids
    assert (info.eos_token_ids, info.bos_token_id, info.vocab_size) == ((2,), 1, 265)
    assert "messages" in info.chat_template
    assert info.created_unix_s == int(source.stat().st_mtime)


def test_fingerprint_is_of_the_content(tmp_path: Path, source: Path) -> None:
    """The same file under another name has the same fingerprint, other weights another."""
    copy, other = tmp_path / "copy.gguf", tmp_path / "other.gguf"
    shutil.copy(source, copy)
    write_gguf(other, seed=1)
    prints = [
        load_model(ensure_prepared(path, tmp_path / "cache")).info.fingerprint
        for path in (source, copy, other)
    ]
    assert prints[0] == prints[1] != prints[2]
    assert len(prints[0]) == 64


def test_second_time_leaves_the_folder_alone(tmp_path: Path, source: Path) -> None:
    """A complete folder is not written again."""
    folder = ensure_prepared(source, tmp_path / "cache")
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert ensure_prepared(source, tmp_path / "cache") == folder
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before


@pytest.mark.parametrize("damage", ["truncated", "missing", "older", "no manifest", "nonsense"])
def test_damaged_folder_is_made_anew(tmp_path: Path, source: Path, damage: str) -> None:
    """A folder that is not whole, or of an older format, counts as absent."""
    folder = ensure_prepared(source, tmp_path / "cache")
    manifest, weights = folder / MANIFEST, folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "older":
        values = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**values, "format": FORMAT - 1}))
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("[]")
    assert not is_complete(folder)
    ensure_prepared(source, tmp_path / "cache")
    assert is_complete(folder)


def test_failure_leaves_nothing(tmp_path: Path, source: Path) -> None:
    """When writing fails half way, neither the folder nor its unfinished form stays."""

    def fail(phase: str, done: int, _total: int) -> None:
        if phase == "weights" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "out" / "m", fail)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["m.lock"]
    prepare(source, tmp_path / "out" / "m")
    assert is_complete(tmp_path / "out" / "m")


def test_remains_of_a_killed_process_are_removed(tmp_path: Path, source: Path) -> None:
    """An unfinished folder of a process that died does not stay for ever."""
    stale = tmp_path / "out" / "m.tmp-123"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    prepare(source, tmp_path / "out" / "m")
    assert not stale.exists()


def test_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names both sizes and the folder."""
    usage = namedtuple("usage", "total used free")(10, 10, 5 << 20)
    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(Unavailable, match=r"needs \d+ MiB in .*out, but only 5 MiB are free"):
        prepare(source, tmp_path / "out" / "m")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["m.lock"]


def test_processes_that_want_the_same_folder_take_turns(tmp_path: Path, source: Path) -> None:
    """Of several processes at once one makes the folder and all succeed."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        folders = pool.starmap(ensure_prepared, [(source, tmp_path / "cache")] * 3)
        pool.close()
        pool.join()
    assert set(folders) == {prepared_dir(source, tmp_path / "cache")}
    assert is_complete(folders[0])
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {"", ".lock"}


def test_changed_file_gets_another_folder(tmp_path: Path, source: Path) -> None:
    """A file that was replaced, by one of equal size too, is not served from the old folder."""
    before = prepared_dir(source, tmp_path)
    write_gguf(source, seed=1)
    changed = prepared_dir(source, tmp_path)
    write_gguf(source, quantization=gguf.GGMLQuantizationType.F16)
    assert len({before, changed, prepared_dir(source, tmp_path)}) == 3


def test_file_fetched_again_keeps_its_folder(tmp_path: Path, source: Path) -> None:
    """A new time of change alone does not cost another conversion."""
    before = prepared_dir(source, tmp_path)
    os.utime(source, (1, 1))
    assert prepared_dir(source, tmp_path) == before


def test_model_folder_is_used_directly(tmp_path: Path) -> None:
    """An HF folder needs no preparation."""
    write_hf_folder(tmp_path / "hf")
    assert ensure_prepared(tmp_path / "hf", tmp_path / "cache") == tmp_path / "hf"
    assert not (tmp_path / "cache").exists()


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A path with nothing there is said so, and an empty folder says what to do."""
    with pytest.raises(InvalidRequest, match=r"no model at .*absent\.gguf"):
        ensure_prepared(tmp_path / "absent.gguf", tmp_path)
    with pytest.raises(InvalidRequest, match=r"headrace_worker\.prepare FILE\.gguf FOLDER"):
        load_model(tmp_path)


def test_command_prints_progress(tmp_path: Path, source: Path) -> None:
    """Each line is a JSON object; the last is done; a bad file ends with 1 and a sentence."""
    command = [sys.executable, "-m", "headrace_worker.prepare"]
    run = subprocess.run([*command, source, tmp_path / "m"], capture_output=True, text=True)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, run.stderr
    assert lines[-1] == {"phase": "done", "done": 1, "total": 1}
    assert {"phase": "weights", "done": 20, "total": 20} in lines
    (tmp_path / "bad.gguf").write_bytes(b"x" * 100)
    bad = subprocess.run(
        [*command, tmp_path / "bad.gguf", tmp_path / "n"], capture_output=True, text=True
    )
    assert bad.returncode == 1
    assert "not a readable GGUF" in bad.stderr
