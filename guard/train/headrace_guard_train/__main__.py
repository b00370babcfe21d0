"""Train, judge and ship the guard's models.

``python -m headrace_guard_train --data DIR --embedding DIR [--work DIR] [--out DIR]``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from headrace_guard.classifiers.embedding import Embedder
from headrace_guard.classifiers.heads import HARM, HEADS
from headrace_guard_train import export, hazards, own, plan, report, sources, topics
from headrace_guard_train.cascade_figures import figures_of, linear_figures
from headrace_guard_train.fit import Fitted, fit_embedding, fit_linear, windows_of
from headrace_guard_train.instances import Cutter
from headrace_guard_train.vectors import VectorCache

_ROOT = Path(__file__).parents[3]
_FOREWORD = Path(__file__).parent.parent / "report-foreword.md"


def main(arguments: list[str] | None = None) -> None:
    """Run all steps."""
    given = _parse(arguments)
    fetched, manifest = sources.read(given.data)
    own_rows = own.generate(plan.SEED)
    rows = plan.training_rows([*fetched, *own_rows])
    manifest.append(sources.described("own templates", own.LICENCE, [row.text for row in own_rows]))
    cutter = Cutter(rows)
    given.work.mkdir(parents=True, exist_ok=True)
    linear = {head: _linear(head, cutter, given.work) for head in given.heads}
    if tuple(given.heads) != HEADS:
        return
    cache = VectorCache(given.work / "vectors.npz", Embedder(given.embedding))
    embedding: dict[str, Fitted] = {}
    found = {}
    for head in HEADS:
        if head not in plan.EMBEDDED:
            found[head] = linear_figures(head, rows, linear[head])
            continue
        embedding[head], kept = fit_embedding(head, rows, linear[head], cache)
        found[head] = figures_of(head, rows, linear[head], embedding[head], kept)
    meant = hazards.fit(linear[HARM].windows.items, rows, cache)
    topic = topics.fit([*fetched, *own_rows], cache, plan.SEED)
    export.write(given.out, linear, embedding, found, meant, topic, manifest)
    foreword = _FOREWORD.read_text(encoding="utf-8")
    report.write(given.report, report.figures(found, meant, topic), found, foreword)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace_guard_train", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the fetched sources")
    parser.add_argument("--embedding", type=Path, required=True, help="folder of the MiniLM files")
    parser.add_argument(
        "--work", type=Path, default=Path("build/guard-train"), help="kept between runs"
    )
    parser.add_argument("--out", type=Path, default=_ROOT / "guard/src/headrace_guard/models")
    parser.add_argument("--report", type=Path, default=_ROOT / "docs/guard-report")
    parser.add_argument(
        "--heads", nargs="+", default=HEADS, choices=HEADS, help="linear stage only"
    )
    return parser.parse_args(arguments)


def _linear(head: str, cutter: Cutter, work: Path) -> Fitted:
    """Fit a linear stage, or take it from an earlier run of the same work folder."""
    kept = work / f"linear-{head}.npz"
    if not kept.is_file():
        fitted = fit_linear(head, cutter)
        np.savez(kept, logits=fitted.logits, weights=fitted.weights, bias=fitted.bias)
        return fitted
    windows = windows_of(cutter.instances(head), cutter.rows)
    with np.load(kept, allow_pickle=False) as found:
        return Fitted(windows, found["logits"], found["weights"], float(found["bias"]))


if __name__ == "__main__":
    main()
