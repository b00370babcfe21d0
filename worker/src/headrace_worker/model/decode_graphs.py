"""Steps of single tokens as recorded programs: one launch instead of some hundred.

A step that only decodes does the same operations every time, so they are recorded once for each of
a few batch sizes (CUDA graphs) and played again over the same memory: the step's numbers are
written where the recording reads them. A batch is padded to the next size; the rows that pad it
compute one token in a block that no request has. Recordings are made when a size is first needed. A
size that cannot be recorded is computed step by step for ever after, and so is every other step.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from headrace_worker.model.batch import Batch, Row
from headrace_worker.model.decoder import Decoder

_log = logging.getLogger(__name__)

MAX_ROWS = 256
_SIZES: tuple[int, ...] = (1, 2, 4, *range(8, 64, 8), *range(64, MAX_ROWS + 1, 16))
# Runs before recording: compilation, and libraries that choose by trying.
_TRIALS = 2

Compute = Callable[[], torch.Tensor]
PlanMaker = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Any]


class Recorder(Protocol):
    """Records a computation over fixed memory."""

    def record(self, compute: Compute) -> tuple[Callable[[], None], torch.Tensor]:
        """Return what plays it again, and where its result lies then.

        Raises:
            RuntimeError: it cannot be recorded, for lack of memory for instance.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs, which share their memory: one result at a time is valid."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Compute) -> tuple[Callable[[], None], torch.Tensor]:
        """See `Recorder`."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own is untyped
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_TRIALS):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        return graph.replay, result


@dataclass(frozen=True)
class _Recorded:
    """One size's program and the memory that it reads.

    Attributes:
        numbers: (4, B) int64: token ids, positions, slots, contexts.
        tables: (B, M) int32.
        play: computes anew.
        logits: (B, V) float32, the result.
    """

    numbers: torch.Tensor
    tables: torch.Tensor
    play: Callable[[], None]
    logits: torch.Tensor


class DecodeGraphs:
    """Computes decode steps of one model over one pool.

    Args:
        decoder: the model.
        plan: makes the backend's plan over tensors that are filled anew.
        kv: the pool; its last block belongs to the rows that pad a batch.
        context_tokens: no row ever has more.
        recorder: how computations are recorded.
    """

    def __init__(
        self,
        decoder: Decoder,
        plan: PlanMaker,
        kv: torch.Tensor,
        context_tokens: int,
        recorder: Recorder,
    ) -> None:
        self._decoder, self._plan, self._kv, self._recorder = decoder, plan, kv, recorder
        self._block_size, self._padding_block = kv.shape[3], kv.shape[2] - 1
        self._width = -(-context_tokens // self._block_size)
        self._recorded: dict[int, _Recorded | None] = {}

    def __call__(self, rows: Sequence[Row]) -> torch.Tensor | None:
        """Compute a step of rows of one token each.

        Returns:
            (B, V) float32 logits, valid until the next call; None = compute it in another way.
        """
        if len(rows) > MAX_ROWS or not all(_is_decode(row) for row in rows):
            return None
        size = padded_size(len(rows))
        if size not in self._recorded:
            self._recorded[size] = self._record(size)
        recorded = self._recorded[size]
        if recorded is None:
            return None
        self._fill(recorded, rows, size)
        recorded.play()
        return recorded.logits[: len(rows)]

    @property
    def recorded_sizes(self) -> list[int]:
        """Sizes that are played, in the order in which they were recorded."""
        return [size for size, recorded in self._recorded.items() if recorded is not None]

    def _record(self, size: int) -> _Recorded | None:
        device = self._kv.device
        numbers = torch.zeros((4, size), dtype=torch.int64, device=device)
        tables = torch.zeros((size, self._width), dtype=torch.int32, device=device)
        contexts = torch.ones(size, dtype=torch.int32, device=device)
        numbers[2] = self._padding_block * self._block_size
        tables.fill_(self._padding_block)
        max_context = self._width * self._block_size
        batch = Batch(
            token_ids=numbers[0],
            positions=numbers[1],
            plan=self._plan(numbers[2], contexts, tables, max_context),
            logit_idx=torch.arange(size, device=device),
        )

        def compute() -> torch.Tensor:
            contexts.copy_(numbers[3].clamp(min=1))
            return self._decoder.forward(batch, self._kv).float()

        try:
            play, logits = self._recorder.record(compute)
        except RuntimeError as error:
            _log.warning("decode steps of %d rows cannot be recorded: %s", size, error)
            return None
        return _Recorded(numbers, tables, play, logits)

    def _fill(self, recorded: _Recorded, rows: Sequence[Row], size: int) -> None:
        width = max(row.start_pos // self._block_size + 1 for row in rows)
        numbers = np.zeros((4, size), dtype=np.int64)
        tables = np.full((size, width), self._padding_block, dtype=np.int32)
        numbers[2], numbers[3] = self._padding_block * self._block_size, 1
        for idx, row in enumerate(rows):
            position = row.start_pos
            place, offset = divmod(position, self._block_size)
            tables[idx, : place + 1] = row.block_table[: place + 1]
            slot = row.block_table[place] * self._block_size + offset
            numbers[:, idx] = row.token_ids[0], position, slot, position + 1
        recorded.numbers.copy_(torch.from_numpy(numbers))
        recorded.tables[:, :width].copy_(torch.from_numpy(tables))


def padded_size(num_rows: int) -> int:
    """The next of the sizes that are recorded: few, and little padding."""
    return _SIZES[bisect_left(_SIZES, num_rows)]


def _is_decode(row: Row) -> bool:
    return len(row.token_ids) == 1 and row.num_logits == 1
