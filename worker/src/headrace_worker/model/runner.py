"""The engine's view of a model: rows in, logits out.

The engine decides which blocks belong to whom; the runner owns their memory. A runner is used from
one thread.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from headrace_common.blocks import BLOCK_SIZE_TOKENS
from headrace_worker.kernels.dispatch import kernels_for, native_for
from headrace_worker.kernels.rounding import Rounding
from headrace_worker.model import kv_memory
from headrace_worker.model.batch import Batch, Row, build_batch
from headrace_worker.model.compiled_step import compiled_step
from headrace_worker.model.decode_graphs import CudaRecorder, DecodeGraphs
from headrace_worker.model.decoder import Decoder
from headrace_worker.model.info import ModelInfo
from headrace_worker.model.loader import load_model
from headrace_worker.model.weights import ON_CPU, LoadedModel, Placement, placed
from headrace_worker.sampling import Sampled, SampleSpec, sample

__all__ = ["ModelRunner", "Row"]

# Long enough for every matrix shape class to be seen, short enough to cost next to nothing.
_WARM_UP_TOKENS = 8


class ModelRunner:
    """Runs batches over a paged KV pool that it owns.

    The pool takes memory when its blocks are first used. A row's result depends neither on what
    else is in the batch nor on how it is cut into steps, beyond float32 rounding; with compiled
    kernels, not even by that.
    """

    def __init__(
        self,
        model: LoadedModel | Path,
        num_blocks: int,
        block_size: int = BLOCK_SIZE_TOKENS,
        num_threads: int = 1,
        backend: str = "cpu",
        kernel_cache_dir: Path | None = None,
        placement: Placement = ON_CPU,
        rounding: Rounding = Rounding.FLOAT32,
    ) -> None:
        """Load the model unless it is loaded, and set up the pool.

        Args:
            model: a loaded model, or a prepared or Hugging Face folder.
            num_blocks: blocks of the KV pool; ids are 0 .. num_blocks - 1, all usable.
            block_size: tokens per block.
            num_threads: compute threads at most; less while other workers of this machine compute.
            backend: name of a kernel backend.
            kernel_cache_dir: where compiled kernels are kept; None = in the user's home.
            placement: device and type of weights and KV; the backend "cpu" takes the default only.
            rounding: what compiled kernels round activations to.

        Raises:
            InvalidRequest: the model is of a kind that this engine does not compute.
        """
        loaded = load_model(model) if isinstance(model, Path) else model
        self.info: ModelInfo = loaded.info
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._device = torch.device(placement.device)
        self._kernels = kernels_for(backend, self._device)
        weights = loaded.weights if placement == ON_CPU else placed(loaded.weights, placement)
        self._model = Decoder(loaded.config, weights, self._kernels)
        on_cpu = placement == ON_CPU
        native = native_for(backend, kernel_cache_dir, num_threads) if on_cpu else None
        self._compiled = compiled_step(loaded, native, rounding, block_size) if native else None
        self._sample = partial(sample, drawer=native.draw) if native else self._kernels.sample
        # Two sets of threads would fight for the cores, and torch's know nothing of other workers.
        torch.set_num_threads(1 if self._compiled else min(num_threads, torch.get_num_threads()))
        config = loaded.config
        # The rows that pad a recorded step have a block of their own.
        records = placement.records_decodes and self._device.type == "cuda"
        shape = (
            config.num_layers, 2, num_blocks + records, block_size, config.num_kv_heads,
            config.head_dim,
        )  # fmt: skip
        self._kv = _lazy_zeros(shape) if placement == ON_CPU else _zeros(shape, placement)
        plan = self._kernels.decode_plan if records else None
        self._graphs = plan and DecodeGraphs(
            self._model, plan, self._kv, config.context_tokens, CudaRecorder()
        )

    @property
    def uses_compiled_kernels(self) -> bool:
        """Whether steps go through the C kernels."""
        return self._compiled is not None

    @property
    def recorded_sizes(self) -> list[int]:
        """Batch sizes of decode steps that are played from a recording so far."""
        return self._graphs.recorded_sizes if self._graphs else []

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute one step of a ragged batch; decodes and prefill chunks may be mixed.

        All rows' keys and values are written before any row attends, so rows may share blocks that
        were complete before this step, but no two rows may write to the same block.

        Args:
            rows: at least one; token ids and block ids must be in range (not checked here).

        Returns:
            (sum of num_logits, V) float32 in row order, on the runner's device, valid until the
            next call.
        """
        if self._compiled is not None:
            return self._compiled(rows, self._kv)
        logits = self._graphs(rows) if self._graphs else None
        if logits is None:
            logits = self._model.forward(self._batch(rows), self._kv).float()
        return logits

    @torch.inference_mode()
    def hidden(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute a step like `forward`, up to the last norm; (sum of num_logits, E)."""
        if self._compiled is not None:
            return self._compiled(rows, self._kv, logits=False)
        batch = self._batch(rows)
        return self._model.hidden(batch, self._kv, batch.logit_idx).float().cpu()

    def _batch(self, rows: Sequence[Row]) -> Batch:
        return build_batch(rows, self.block_size, self._kernels.make_plan, self._device)

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
        """Draw one token per row of what `forward` gave; see `headrace_worker.sampling.sample`."""
        return self._sample(logits, specs)

    def copy_block(self, src: int, dst: int) -> None:
        """Copy one block's KV over all layers (copy-on-write)."""
        pair = torch.tensor([[src, dst]], dtype=torch.int32, device=self._device)
        self._kernels.copy_blocks(self._kv, self._kv, pair)

    @property
    def layout(self) -> str:
        """Name of the layout of a block's bytes; see `kv_memory`."""
        return kv_memory.layout_name(self._kv, has_key_panels=self.uses_compiled_kernels)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return kv_memory.bytes_per_block(self._kv)

    def read_blocks(self, block_ids: Sequence[int]) -> bytes:
        """Copy blocks out, for another worker."""
        return kv_memory.read(self._kv, block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: bytes) -> None:
        """Copy blocks in that another worker computed."""
        kv_memory.write(self._kv, block_ids, data)

    def warm_up(self) -> None:
        """Run a prefill and a decode once, so that the first request does not pay for page faults.

        Call it before any block is in use: it writes to block 0 and clears it again.
        """
        tokens = [0] * min(_WARM_UP_TOKENS, self.block_size - 1)
        self.forward([Row(tokens, 0, [0], 1)])
        self.forward([Row([0], len(tokens), [0], 1)])
        self._kv[:, :, 0].zero_()


def _zeros(shape: tuple[int, ...], placement: Placement) -> torch.Tensor:
    return torch.zeros(shape, dtype=placement.dtype, device=placement.device)


def _lazy_zeros(shape: tuple[int, ...]) -> torch.Tensor:
    # torch.zeros writes every page; here the kernel does, when a page is first used. Small ones:
    # numpy would ask for huge pages, and the first token in new ones of all layers' keys and values
    # would wait for all of them to be cleared, 300 ms where a hypervisor has to find the memory.
    memory = mmap.mmap(-1, math.prod(shape) * torch.float32.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)
