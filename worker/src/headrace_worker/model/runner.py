"""The engine's view of a model: rows in, logits out.

The engine decides which blocks belong to whom; the runner owns their memory. A runner is used from
one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from headrace_common.blocks import BLOCK_SIZE_TOKENS
from headrace_worker.kernels.dispatch import kernels_for
from headrace_worker.model.batch import Row, build_batch
from headrace_worker.model.info import ModelInfo
from headrace_worker.model.llama import Llama
from headrace_worker.model.loader import load_model
from headrace_worker.model.weights import LoadedModel

__all__ = ["ModelRunner", "Row"]

# Long enough for every matrix shape class to be seen, short enough to cost next to nothing.
_WARM_UP_TOKENS = 8


class ModelRunner:
    """Runs batches over a paged KV pool that it owns.

    The pool takes memory when its blocks are first used. A row's result does not depend on what
    else is in the batch, beyond float32 rounding.
    """

    def __init__(
        self,
        model: LoadedModel | Path,
        num_blocks: int,
        block_size: int = BLOCK_SIZE_TOKENS,
        num_threads: int = 1,
        backend: str = "cpu",
    ) -> None:
        """Load the model unless it is loaded, and set up the pool.

        Args:
            model: a loaded model, or a prepared or Hugging Face folder.
            num_blocks: blocks of the KV pool; ids are 0 .. num_blocks - 1, all usable.
            block_size: tokens per block.
            num_threads: compute threads of the whole process.
            backend: name of a kernel backend.

        Raises:
            InvalidRequest: the model is of a kind that this engine does not compute.
        """
        torch.set_num_threads(num_threads)
        loaded = load_model(model) if isinstance(model, Path) else model
        self.info: ModelInfo = loaded.info
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._model = Llama(loaded.config, loaded.weights, kernels_for(backend))
        self._kv = _lazy_zeros(
            loaded.config.num_layers,
            2,
            num_blocks,
            block_size,
            loaded.config.num_kv_heads,
            loaded.config.head_dim,
        )

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute one step of a ragged batch; decodes and prefill chunks may be mixed.

        All rows' keys and values are written before any row attends, so rows may share blocks that
        were complete before this step, but no two rows may write to the same block.

        Args:
            rows: at least one; token ids and block ids must be in range (not checked here).

        Returns:
            (sum of num_logits, V) float32 in row order, owned by the caller.
        """
        return self._model.forward(build_batch(rows, self.block_size), self._kv)

    def copy_block(self, src: int, dst: int) -> None:
        """Copy one block's KV over all layers (copy-on-write)."""
        self._kv[:, :, dst].copy_(self._kv[:, :, src])

    def warm_up(self) -> None:
        """Run a prefill and a decode once, so that the first request does not pay for page faults.

        Call it before any block is in use: it writes to block 0 and clears it again.
        """
        tokens = [0] * min(_WARM_UP_TOKENS, self.block_size - 1)
        self.forward([Row(tokens, 0, [0], 1)])
        self.forward([Row([0], len(tokens), [0], 1)])
        self._kv[:, :, 0].zero_()


def _lazy_zeros(*shape: int) -> torch.Tensor:
    # torch.zeros writes every page; numpy leaves that to the kernel until a page is used.
    return torch.from_numpy(np.zeros(shape, dtype=np.float32))
