"""Rotary embeddings (arXiv 2104.09864): the angle of each pair at each position."""

from __future__ import annotations

import math

import torch

from headrace_worker.model.config import ModelConfig, RopeScaling


class RopeTable:
    """Cosines and sines of positions.

    Args:
        inv_freq: (D/2,) angle per position of each pair.
        factor: multiplies cosines and sines (YaRN's attention factor).
    """

    def __init__(self, inv_freq: torch.Tensor, factor: float = 1.0) -> None:
        self._inv_freq, self._factor = inv_freq, factor

    @classmethod
    def of(cls, config: ModelConfig) -> RopeTable:
        """The table of the layers that see everything, scaling applied."""
        plain = _frequencies(config.rope_theta, config.head_dim)
        scaling = config.rope_scaling
        factor = _yarn_factor(scaling) if scaling.kind == "yarn" else 1.0
        return cls(_scaled(plain, config.rope_theta, scaling), factor)

    @classmethod
    def of_windowed_layers(cls, config: ModelConfig) -> RopeTable:
        """The table of windowed layers."""
        if not config.local_rope_theta:
            return cls.of(config)
        return cls(_frequencies(config.local_rope_theta, config.head_dim))

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of (T,) positions, (T, D/2) each."""
        if self._inv_freq.device != positions.device:
            self._inv_freq = self._inv_freq.to(positions.device)
        angles = torch.outer(positions.to(torch.float32), self._inv_freq)
        return angles.cos() * self._factor, angles.sin() * self._factor


def _frequencies(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**exponents)


def _scaled(inv_freq: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "factors":
        return inv_freq / torch.tensor(scaling.factors)
    if scaling.kind == "llama3":
        return _llama3(inv_freq, scaling)
    if scaling.kind == "yarn":
        return _yarn(inv_freq, theta, scaling)
    return inv_freq


def _llama3(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow the long waves down by *factor*, leave the short ones, blend between."""
    turns = scaling.original_context_tokens * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share_kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (share_kept + (1.0 - share_kept) / scaling.factor)


def _yarn(inv_freq: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Slow waves down by *factor* that turn seldom within the original context."""
    head_dim = 2 * len(inv_freq)

    def dimension_of(turns: float) -> float:
        wave = scaling.original_context_tokens / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.does_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Two borders in one place would divide by zero.
    width = high - low or 0.001
    ramp = ((torch.arange(len(inv_freq), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return inv_freq / scaling.factor * ramp + inv_freq * (1.0 - ramp)


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1.0 else 1.0
