"""What rounding activations costs in accuracy, on real texts.

``python worker/benchmarks/bench_accuracy.py MODEL.gguf GOLDEN.json`` teaches the golden file's
prompts and greedy continuations (tests/golden/greedy_smollm2.json) to the model with each rounding
and prints, against float32: the mean and the largest KL divergence (nats) over all positions, how
often the likeliest token is the same, and the same where float32's best two logits are clearly
apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from headrace_worker.kernels.rounding import Rounding
from headrace_worker.model.loader import load_model
from headrace_worker.model.runner import ModelRunner, Row
from headrace_worker.model.weights import LoadedModel
from headrace_worker.prepare import ensure_prepared

# Two logits this far apart are not a matter of rounding.
CLEAR_GAP = 0.5
_S = 16


def main() -> int:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("golden", type=Path)
    args = parser.parse_args()
    model = load_model(ensure_prepared(args.model, args.model.parents[1] / "prepared"))
    cases = json.loads(args.golden.read_text(encoding="utf-8"))["cases"]
    texts = [_ids(case) for case in cases]
    sys.stdout.write(f"{sum(map(len, texts))} positions of {len(texts)} texts\n")
    for rounding in (Rounding.INT16, Rounding.INT8):
        sys.stdout.write(f"{rounding.name.lower()}: {compare(model, texts, rounding)}\n")
    return 0


def _ids(case: dict[str, Any]) -> list[int]:
    return [*case["prompt_token_ids"], *case["output_token_ids"]]


def compare(model: LoadedModel, texts: list[list[int]], rounding: Rounding) -> str:
    """Return the figures of one rounding."""
    divergence, same, is_clear = (
        torch.cat(parts) for parts in zip(*_compared(model, texts, rounding), strict=True)
    )
    return (
        f"KL mean {divergence.mean():.2e}, largest {divergence.max():.2e}; likeliest token the "
        f"same {same.float().mean():.2%}, where clear {same[is_clear].float().mean():.2%} "
        f"({int(is_clear.sum())} positions)"
    )


def _compared(
    model: LoadedModel, texts: list[list[int]], rounding: Rounding
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    num_blocks = max(map(len, texts)) // _S + 1
    exact, rounded = (
        ModelRunner(model, num_blocks, rounding=each) for each in (Rounding.FLOAT32, rounding)
    )
    for ids in texts:
        rows = [Row(ids, 0, range(num_blocks), len(ids))]
        expected, result = exact.forward(rows).double(), rounded.forward(rows).double()
        best = expected.topk(2).values
        logs = expected.log_softmax(-1), result.log_softmax(-1)
        divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
        same = expected.argmax(-1) == result.argmax(-1)
        yield divergence, same, best[:, 0] - best[:, 1] > CLEAR_GAP


if __name__ == "__main__":
    sys.exit(main())
