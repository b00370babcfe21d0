"""A Hugging Face model folder: config.json, safetensors (one file or shards), tokenizer.json."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from headrace_common.errors import InvalidRequest
from headrace_worker.model.config import ModelConfig
from headrace_worker.model.damage import refusing_damage
from headrace_worker.model.hf_config import config_from_hf
from headrace_worker.model.info import ModelInfo
from headrace_worker.model.weights import LoadedModel, assemble, tensor_plan

# Of each weight file, for the fingerprint.
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 4096
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_hf_folder(folder: Path) -> LoadedModel:
    """Load a folder; weights of another type become float32.

    Raises:
        InvalidRequest: a file is missing or the model is of an unsupported kind.
    """
    tokenizer_json = _required(folder / "tokenizer.json").read_bytes()
    config = _config(folder, tokenizer_json)
    shards = _shards(folder)
    with ExitStack() as stack:
        opened = {
            path: stack.enter_context(safe_open(path, framework="pt"))
            for path in sorted(set(shards.values()))
        }
        weights = assemble(config, _fused_reader(config, opened, shards))
    return LoadedModel(config, weights, _info(folder, config, shards, tokenizer_json))


def _config(folder: Path, tokenizer_json: bytes) -> ModelConfig:
    values = _read_json(_required(folder / "config.json"))
    config = config_from_hf({**values, **_generation_ids(folder)})
    bos = config.bos_token_id
    first = _tokenizer(tokenizer_json).encode("a", add_special_tokens=True).ids[:1]
    return dataclasses.replace(config, add_bos=bos is not None and first == [bos])


def _tokenizer(tokenizer_json: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_str(tokenizer_json.decode())
    except Exception as error:  # the library raises nothing narrower
        raise InvalidRequest(f"tokenizer.json cannot be read: {error}") from error


def _generation_ids(folder: Path) -> dict[str, Any]:
    # generation_config.json knows all end tokens; config.json often only the first.
    values = _read_json(folder / "generation_config.json")
    return {"eos_token_id": values["eos_token_id"]} if "eos_token_id" in values else {}


def _shards(folder: Path) -> dict[str, Path]:
    """Map tensor names to their files."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index)["weight_map"]
        return {name: _required(folder / file) for name, file in weight_map.items()}
    single = _required(folder / "model.safetensors")
    with safe_open(single, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), single)


def _fused_reader(
    config: ModelConfig, opened: Mapping[Path, Any], shards: Mapping[str, Path]
) -> Callable[[str], torch.Tensor]:
    plan = tensor_plan(config)
    missing = [part for parts in plan.values() for part in parts if part not in shards]
    if missing:
        raise InvalidRequest(f"the checkpoint lacks {len(missing)} tensors, first {missing[0]!r}")

    def fused(name: str) -> torch.Tensor:
        parts = [opened[shards[part]].get_tensor(part).float() for part in plan[name]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole + config.norm_offset if plan[name][0].endswith("norm.weight") else whole

    return fused


def _info(
    folder: Path, config: ModelConfig, shards: Mapping[str, Path], tokenizer_json: bytes
) -> ModelInfo:
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    files = sorted(set(shards.values()))
    return ModelInfo(
        fingerprint=_fingerprint(folder, files, tokenizer_json),
        context_tokens=config.context_tokens,
        vocab_size=config.vocab_size,
        chat_template=_chat_template(folder, tokenizer_config),
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        add_bos=config.add_bos,
        tokenizer_json=tokenizer_json,
        special_tokens=_special_tokens(tokenizer_config),
        kv_bytes_per_token=config.kv_bytes_per_token,
        created_unix_s=int(files[0].stat().st_mtime),
    )


def _fingerprint(folder: Path, files: list[Path], tokenizer_json: bytes) -> str:
    """Hash names, sizes, headers and samples of the weight files, the config and the tokenizer.

    Not all of the weights: that would read gigabytes at each start. Two models of one shape differ
    in every sample, and must not take each other's KV.
    """
    digest = hashlib.sha256(b"headrace-hf/2")
    for path in files:
        with path.open("rb") as file:
            size = file.read(8)
            header = size + file.read(int.from_bytes(size, "little"))
            num_bytes = path.stat().st_size
            samples = b""
            for numerator in range(_NUM_SAMPLES):
                file.seek(len(header) + (num_bytes - len(header)) * numerator // _NUM_SAMPLES)
                samples += file.read(_SAMPLE_BYTES)
        for part in (path.name.encode(), str(num_bytes).encode(), header, samples):
            digest.update(hashlib.sha256(part).digest())
    digest.update(hashlib.sha256((folder / "config.json").read_bytes()).digest())
    digest.update(hashlib.sha256(tokenizer_json).digest())
    return digest.hexdigest()


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    beside = folder / "chat_template.jinja"
    if beside.exists():
        return beside.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template") or ""
    if isinstance(template, str):
        return template
    named = {entry["name"]: str(entry["template"]) for entry in template}
    return named.get("default", "")


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_TOKENS:
        value = tokenizer_config.get(name)
        if value:
            found[name] = value if isinstance(value, str) else str(value["content"])
    return found


def _required(path: Path) -> Path:
    if not path.is_file():
        raise InvalidRequest(f"the model folder lacks {path.name} ({path})")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with refusing_damage(path, "JSON object"):
        return dict(json.loads(path.read_text(encoding="utf-8")))
