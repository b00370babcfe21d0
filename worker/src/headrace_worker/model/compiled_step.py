"""Steps through the C kernels: one foreign call each.

Reads the quantised matrices instead of float32 ones. Each token is computed on its own, in one
order of summation: its logits depend neither on the batch nor on how its prompt was cut, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from headrace_common.blocks import BLOCK_SIZE_TOKENS
from headrace_worker.kernels.blocks import GROUP, from_float
from headrace_worker.kernels.native import NativeKernels
from headrace_worker.kernels.native_step import NativeStep, StepLayer, StepModel
from headrace_worker.kernels.native_types import PANEL, PanelMatrix, TokenPlan
from headrace_worker.kernels.rounding import Rounding
from headrace_worker.model.batch import Row
from headrace_worker.model.config import GELU_TANH, ModelConfig
from headrace_worker.model.decoder import scoring_of
from headrace_worker.model.rope import RopeTable
from headrace_worker.model.weights import LoadedModel

# Two vectors of eight per head: the rotary halves.
_HEAD_DIM_STEP = 16


class CompiledStep:
    """Runs steps; no state of requests."""

    def __init__(self, loaded: LoadedModel, kernels: NativeKernels, rounding: Rounding) -> None:
        self._embedding = loaded.weights.embedding
        self._embedding_scale = loaded.config.embedding_scale
        self._rope = RopeTable.of(loaded.config)
        is_windowed = loaded.config.window_tokens > 0
        self._local_rope = RopeTable.of_windowed_layers(loaded.config) if is_windowed else None
        self._step = NativeStep(kernels, _step_model(loaded, kernels), rounding)

    def __call__(
        self, rows: Sequence[Row], kv: torch.Tensor, *, logits: bool = True
    ) -> torch.Tensor:
        """Compute *rows*; see `ModelRunner.forward`, and `ModelRunner.hidden` without logits."""
        token_ids = torch.tensor([token for row in rows for token in row.token_ids])
        positions, plan = _plan(rows, kv.shape[3])
        hidden = F.embedding(token_ids, self._embedding)
        if self._embedding_scale != 1.0:
            hidden *= self._embedding_scale
        rope = self._rope(positions)
        ropes = rope, self._local_rope(positions) if self._local_rope else rope
        logit_idx = torch.tensor(_logit_idx(rows), dtype=torch.int64)
        return self._step(hidden, ropes, kv, plan, logit_idx, logits=logits)


def compiled_step(
    loaded: LoadedModel,
    kernels: NativeKernels,
    rounding: Rounding = Rounding.FLOAT32,
    block_size: int = BLOCK_SIZE_TOKENS,
) -> CompiledStep | None:
    """Return the step of a model; None if its sizes are not those that the kernels take."""
    config = loaded.config
    widths = (config.hidden_size, config.ffn_size, config.num_heads * config.head_dim)
    if config.head_dim % _HEAD_DIM_STEP or any(width % GROUP for width in widths):
        return None
    if block_size % PANEL:
        return None
    return CompiledStep(loaded, kernels, rounding)


def _plan(rows: Sequence[Row], block_size: int) -> tuple[torch.Tensor, TokenPlan]:
    positions, slots, starts = [], [], []
    tables = [
        np.asarray(row.block_table[: -(-(row.start_pos + len(row.token_ids)) // block_size)])
        for row in rows
    ]
    start = 0
    for row, table in zip(rows, tables, strict=True):
        pos = np.arange(row.start_pos, row.start_pos + len(row.token_ids))
        positions.append(pos)
        slots.append(table[pos // block_size] * block_size + pos % block_size)
        starts.append(np.full(len(pos), start))
        start += len(table)
    flat_positions = torch.from_numpy(np.concatenate(positions))
    plan = TokenPlan(
        slots=torch.from_numpy(np.concatenate(slots)),
        block_ids=torch.from_numpy(np.concatenate(tables)),
        table_start=torch.from_numpy(np.concatenate(starts)),
        context=flat_positions + 1,
    )
    return flat_positions, plan


def _logit_idx(rows: Sequence[Row]) -> list[int]:
    found: list[int] = []
    end = 0
    for row in rows:
        end += len(row.token_ids)
        found.extend(range(end - row.num_logits, end))
    return found


def _step_model(loaded: LoadedModel, kernels: NativeKernels) -> StepModel:
    config: ModelConfig = loaded.config
    weights, blocks = loaded.weights, loaded.blocks

    def matrix(name: str, weight: torch.Tensor) -> PanelMatrix:
        return kernels.pack(blocks[name] if name in blocks else from_float(weight))

    layers = [
        StepLayer(
            attention_norm=layer.attention_norm,
            ffn_norm=layer.ffn_norm,
            qkv=matrix(f"layers.{idx}.qkv", layer.qkv),
            attention_out=matrix(f"layers.{idx}.attention_out", layer.attention_out),
            gate_up=matrix(f"layers.{idx}.gate_up", layer.gate_up),
            down=matrix(f"layers.{idx}.down", layer.down),
            scoring=scoring_of(config, idx),
            qkv_bias=layer.qkv_bias,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            attention_post_norm=layer.attention_post_norm,
            ffn_post_norm=layer.ffn_post_norm,
        )
        for idx, layer in enumerate(weights.layers)
    ]
    head_name = "embedding" if config.is_head_tied else "head"
    return StepModel(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_eps,
        layers=layers,
        final_norm=weights.final_norm,
        head=matrix(head_name, weights.head),
        has_gelu=config.activation == GELU_TANH,
        logit_soft_cap=config.logit_soft_cap,
    )
