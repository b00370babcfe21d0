"""Train, judge and ship the guard's models.

``python -m headrace_guard_train --data DIR --embedding DIR [--work DIR] all``; a head at a time
before that, if wanted: ``linear --head HEAD``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace_guard.classifiers.embedding import Embedder
from headrace_guard.classifiers.heads import HEADS
from headrace_guard_train import finish, own, plan, sources
from headrace_guard_train.duplicates import without_doubles
from headrace_guard_train.fit import Fitted, fit_linear
from headrace_guard_train.instances import Cutter
from headrace_guard_train.rows import Row
from headrace_guard_train.states import StateCache

_ROOT = Path(__file__).parents[3]


def main(arguments: list[str] | None = None) -> None:
    """Run a step, or all."""
    given = _parse(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    fetched, manifest = sources.read(given.data)
    own_rows = own.generate(plan.SEED)
    rows = without_doubles([*fetched, *own_rows])
    manifest.append(sources.described("own templates", own.LICENCE, [row.text for row in own_rows]))
    steps = _Steps(given, rows)
    if given.step == "linear":
        steps.linear(given.head)
    else:
        fits = {head: steps.linear(head) for head in HEADS}
        embedder = Embedder(given.embedding)
        cache = StateCache(given.work / "states.npz", embedder)
        made = finish.Made(rows, manifest, fits, embedder, cache)
        finish.run(made, given.out, given.report, given.work)


class _Steps:
    """The steps that take long; each is kept in the work folder."""

    def __init__(self, given: argparse.Namespace, rows: Sequence[Row]) -> None:
        self._given, self._rows = given, rows
        self._cutter: Cutter | None = None

    def linear(self, head: str) -> Fitted:
        """Fit a linear stage, or take it from an earlier run."""
        kept = self._given.work / f"linear-{head}.npz"
        if not kept.is_file():
            self._cutter = self._cutter or Cutter(plan.training_rows(self._rows))
            np.savez(kept, **vars(fit_linear(head, self._cutter, work=self._given.work)))
        with np.load(kept, allow_pickle=False) as found:
            return Fitted(
                found["fold_weights"], found["fold_biases"], found["weights"], float(found["bias"])
            )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace_guard_train", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the fetched sources")
    parser.add_argument("--embedding", type=Path, required=True, help="folder of the MiniLM files")
    parser.add_argument(
        "--work", type=Path, default=Path("build/guard-train"), help="kept between runs"
    )
    parser.add_argument("--out", type=Path, default=_ROOT / "guard/src/headrace_guard/models")
    parser.add_argument("--report", type=Path, default=_ROOT / "docs/guard-report")
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("linear").add_argument("--head", choices=HEADS, required=True)
    steps.add_parser("all", help="makes what is missing, judges, writes models and report")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
