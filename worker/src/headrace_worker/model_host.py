"""Brings the model into memory, on a thread, and says how far it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headrace_common.blocks import BLOCK_SIZE_TOKENS
from headrace_common.errors import Unavailable
from headrace_common.process_tuning import spare_heap
from headrace_worker.engine.engine import StepRunner
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.host_memory import free_bytes
from headrace_worker.kernels.rounding import Rounding
from headrace_worker.model.info import ModelInfo
from headrace_worker.model.loader import load_model
from headrace_worker.model.runner import ModelRunner
from headrace_worker.model.weights import ON_CPU, Placement, placed
from headrace_worker.prepare import ensure_prepared

_MAX_DEFAULT_KV_BYTES = 1 << 30
_DEFAULT_MEMORY_SHARE = 0.25
# Of what a GPU has left once the weights are there; the rest is for the steps themselves.
_GPU_MEMORY_SHARE = 0.85
_FLOAT32_BYTES = 4
ON_GPU = Placement("cuda", torch.bfloat16)
# Shares of the bar: conversion of a GGUF (its phases in order), then mapping and warming up.
_PHASE_STARTS = {"lock": 0.0, "hash": 0.02, "tokenizer": 0.1, "weights": 0.15, "done": 0.85}
_PHASE_ENDS = {"lock": 0.02, "hash": 0.1, "tokenizer": 0.15, "weights": 0.85, "done": 0.85}
_MAPPED_RATIO = 0.95


@dataclass(frozen=True)
class ReadyModel:
    """A model that can run, with the size of its KV pool."""

    info: ModelInfo
    runner: StepRunner
    table: TokenTable
    num_blocks: int


class ModelHost:
    """Loads one model.

    Args:
        model_path: GGUF file or model folder.
        cache_dir: where prepared models and compiled kernels are kept.
        kv_capacity_tokens: size of the KV pool; 0 = by memory.
        num_threads: compute threads.
        rounding: of activations.
        device: "cpu", or "cuda" for one GPU: bfloat16 weights and KV, Triton kernels.
    """

    def __init__(
        self,
        model_path: Path,
        cache_dir: Path,
        kv_capacity_tokens: int,
        num_threads: int,
        rounding: Rounding = Rounding.FLOAT32,
        device: str = "cpu",
    ) -> None:
        self._placement = ON_GPU if device == ON_GPU.device else ON_CPU
        self._model_path, self._cache_dir = model_path, cache_dir
        self._kv_capacity_tokens, self._num_threads = kv_capacity_tokens, num_threads
        self._rounding = rounding
        # Share of loading done; may be read from any thread.
        self.progress_ratio = 0.0

    def load(self) -> ReadyModel:
        """Do all of it; blocks for seconds.

        Raises:
            HeadraceError: there is no such model or no such device, or it cannot be run here.
            UnknownTokenizer: its tokens cannot be turned into text here.
        """
        is_on_gpu = self._placement == ON_GPU
        if is_on_gpu and not torch.cuda.is_available():
            raise Unavailable("this process sees no CUDA device; set the worker's device to cpu")
        folder = ensure_prepared(self._model_path, self._cache_dir, self._note)
        loaded = load_model(folder)
        table = TokenTable.from_json(loaded.info.tokenizer_json)
        if is_on_gpu:
            weights = placed(loaded.weights, self._placement)
            loaded = replace(loaded, weights=weights)
        num_blocks = self._num_blocks(loaded.info.kv_bytes_per_token)
        runner = ModelRunner(
            loaded,
            num_blocks,
            num_threads=self._num_threads,
            backend="triton" if is_on_gpu else "cpu",
            kernel_cache_dir=self._cache_dir / "kernels",
            placement=self._placement,
            rounding=self._rounding,
        )
        self.progress_ratio = _MAPPED_RATIO
        runner.warm_up()
        spare_heap()
        self.progress_ratio = 1.0
        return ReadyModel(loaded.info, runner, table, num_blocks)

    def _note(self, phase: str, done: int, total: int) -> None:
        start, end = _PHASE_STARTS[phase], _PHASE_ENDS[phase]
        ratio = start + (end - start) * done / max(1, total)
        self.progress_ratio = max(self.progress_ratio, ratio)

    def _num_blocks(self, kv_bytes_per_token: int) -> int:
        tokens = self._kv_capacity_tokens
        if tokens == 0:
            # The info counts float32.
            item_bytes = self._placement.dtype.itemsize
            tokens = self._free_bytes() * _FLOAT32_BYTES // (kv_bytes_per_token * item_bytes)
        return max(1, tokens // BLOCK_SIZE_TOKENS)

    def _free_bytes(self) -> int:
        if self._placement == ON_GPU:
            free, _ = torch.cuda.mem_get_info()
            return int(free * _GPU_MEMORY_SHARE)
        return min(_MAX_DEFAULT_KV_BYTES, int(free_bytes() * _DEFAULT_MEMORY_SHARE))
