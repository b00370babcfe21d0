"""Train, judge and ship the guard's models.

``python -m headrace_guard_train --data DIR --embedding DIR [--work DIR] all``; a head at a time
before that, if wanted: ``linear --head HEAD``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace_guard.classifiers.embedding import SHA256, Embedder
from headrace_guard.classifiers.heads import HEADS
from headrace_guard_train import finish, own, plan, sources
from headrace_guard_train.duplicates import without_doubles
from headrace_guard_train.fit import fit_linear
from headrace_guard_train.instances import Cutter
from headrace_guard_train.kept import Kept, key_of
from headrace_guard_train.states import StateCache

_ROOT = Path(__file__).parents[3]


def main(arguments: list[str] | None = None) -> None:
    """Run a step, or all."""
    given = _parse(arguments)
    fetched, manifest = sources.read(given.data)
    own_rows = own.generate(plan.SEED)
    rows = without_doubles([*fetched, *own_rows])
    manifest.append(sources.described("own templates", own.LICENCE, [row.text for row in own_rows]))
    kept = Kept(given.work)
    cutter = Cutter(plan.training_rows(rows))
    heads = HEADS if given.step == "all" else (given.head,)
    fits = {head: fit_linear(head, cutter, kept=kept) for head in heads}
    if given.step == "all":
        embedder = Embedder(given.embedding)
        states = given.work / f"states-{key_of([sorted(SHA256.items())])}.npz"
        cache = StateCache(states, embedder)
        made = finish.Made(rows, manifest, fits, embedder, cache, kept)
        finish.run(made, given.out, given.report, given.work)


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
