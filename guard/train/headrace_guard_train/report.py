"""The figures as JSON, a table in Markdown, and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace_guard.classifiers.text_model import Point
from headrace_guard_train.cascade_figures import HeadFigures, Stage
from headrace_guard_train.hazards import Hazards
from headrace_guard_train.operating import Scored, auc, only, source_weights, true_ratio_at
from headrace_guard_train.plots import line_plot
from headrace_guard_train.topics import Topics

_NUM_POINTS = 60
Json = dict[str, Any]  # Any: JSON


def figures(
    heads: Mapping[str, HeadFigures], hazards: Hazards | None, topics: Topics | None
) -> Json:
    """Return every figure of the report."""
    found: Json = {"heads": {name: _head(one) for name, one in heads.items()}}
    if hazards is not None:
        found["hazards"] = {
            "right_by_words": round(hazards.right_by_words, 3),
            "right_by_vectors": round(hazards.right_by_vectors, 3),
        }
    if topics is not None:
        found["topics"] = {
            "auc_by_domain": {
                name: {"other domains": round(a, 3), "ordinary": round(b, 3)}
                for name, (a, b) in topics.auc_by_domain.items()
            },
            "false_ratio_strict": round(topics.false_ratio, 3),
            "true_ratio_strict": round(topics.true_ratio, 3),
        }
    return found


def write(folder: Path, found: Json, heads: Mapping[str, HeadFigures], foreword: str) -> None:
    """Write figures.json, README.md and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    lines = [foreword]
    for name, one in heads.items():
        lines += _tables(name, found["heads"][name])
        _plots(folder, name, one)
        lines.append(
            f"![ROC of {name}](roc-{name}.svg) ![Reliability of {name}](reliability-{name}.svg)\n"
        )
    if "hazards" in found or "topics" in found:
        lines += _rest(found)
    (folder / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _head(one: HeadFigures) -> Json:
    return {
        "linear": _stage(one.linear),
        "cascade": _stage(one.cascade),
        "embedded_ratio": round(one.embedded_ratio, 4),
        "linear_share": one.linear_share,
    }


def _stage(stage: Stage) -> Json:
    scored = stage.scored
    clean = only(scored, scored.clean())
    positives: Json = {}
    negatives: Json = {}
    for source in np.unique(scored.sources[~scored.clean()]).tolist():
        logits = scored.logits[~scored.clean() & (scored.sources == source)]
        positives[source] = {
            "rows": len(logits),
            "auc": round(auc(logits, clean.logits), 3),
            "tpr_at_1_percent_fpr": round(true_ratio_at(logits, clean, 0.01), 3),
            **{
                f"tpr_{point.value}": round(float(np.mean(logits >= stage.logits[point])), 3)
                for point in (Point.STRICT, Point.BALANCED, Point.LENIENT)
            },
        }
    for source in np.unique(clean.sources).tolist():
        logits = clean.logits[clean.sources == source]
        negatives[source] = {
            "rows": len(logits),
            **{
                f"fpr_{point.value}": round(float(np.mean(logits >= stage.logits[point])), 4)
                for point in (Point.STRICT, Point.BALANCED, Point.LENIENT)
            },
        }
    return {"positives": positives, "clean": negatives}


def _tables(name: str, found: Json) -> list[str]:
    asked = 100 * found["embedded_ratio"]
    lines = [
        f"## {name}",
        "",
        f"The embedding stage is asked about {asked:.1f} % of clean texts.\n",
    ]
    for stage in ("linear", "cascade"):
        lines += [
            f"### {stage}: positives of a source that was left out",
            "| source | rows | AUC | TPR at 1 % FPR | strict | balanced | lenient |",
            "|---|---|---|---|---|---|---|",
        ]
        for source, row in found[stage]["positives"].items():
            rates = ["tpr_at_1_percent_fpr", "tpr_strict", "tpr_balanced", "tpr_lenient"]
            cells = " | ".join(f"{row[rate]:.2f}" for rate in rates)
            lines.append(f"| {source} | {row['rows']} | {row['auc']:.3f} | {cells} |")
        lines += [
            "",
            f"### {stage}: clean texts of a source that was left out, share hit",
            "| source | rows | strict | balanced | lenient |",
            "|---|---|---|---|---|",
        ]
        for source, row in found[stage]["clean"].items():
            lines.append(
                f"| {source} | {row['rows']} | {row['fpr_strict']:.3f} | {row['fpr_balanced']:.3f} "
                f"| {row['fpr_lenient']:.3f} |"
            )
        lines.append("")
    return lines


def _rest(found: Json) -> list[str]:
    lines: list[str] = []
    if "hazards" in found:
        lines += [
            "## Hazard ids",
            f"Right on held-out own rows: {found['hazards']['right_by_words']:.2f} by words, "
            f"{found['hazards']['right_by_vectors']:.2f} by embedding.\n",
        ]
    if "topics" in found:
        lines += [
            "## Off topic, 20 examples, domains that the scale was not fitted on",
            "| domain | AUC against other domains | AUC against ordinary requests |",
            "|---|---|---|",
        ]
        for name, row in found["topics"]["auc_by_domain"].items():
            lines.append(f"| {name} | {row['other domains']:.3f} | {row['ordinary']:.3f} |")
        hit, wrong = found["topics"]["true_ratio_strict"], found["topics"]["false_ratio_strict"]
        lines.append(
            f"\nAt `strict`: {hit:.2f} of off-topic texts are hit, {wrong:.3f} of on-topic ones.\n"
        )
    return lines


def _plots(folder: Path, name: str, one: HeadFigures) -> None:
    stages = {"linear": one.linear, "cascade": one.cascade}
    line_plot(
        folder / f"roc-{name}.svg",
        f"ROC, left-out sources: {name}",
        ("clean texts hit", "positives hit"),
        [(stage, _roc(figures.scored)) for stage, figures in stages.items()],
    )
    line_plot(
        folder / f"reliability-{name}.svg",
        f"Reliability, left-out sources: {name}",
        ("score", "share that is positive"),
        [("ideal", [(0, 0), (1, 1)])]
        + [(stage, _reliability(figures)) for stage, figures in stages.items()],
    )


def _roc(scored: Scored) -> list[tuple[float, float]]:
    clean = scored.clean()
    weights = np.zeros(len(clean))
    for mine in (clean, ~clean):
        weights[mine] = source_weights(scored.sources[mine])
    levels = np.quantile(scored.logits, np.linspace(1, 0, _NUM_POINTS))
    points = [(0.0, 0.0)]
    for level in levels.tolist():
        hit = scored.logits >= level
        points.append((float(weights[clean & hit].sum()), float(weights[~clean & hit].sum())))
    return points


def _reliability(stage: Stage) -> list[tuple[float, float]]:
    scored = stage.scored
    weights = np.zeros(len(scored.labels))
    for mine in (scored.clean(), ~scored.clean()):
        weights[mine] = source_weights(scored.sources[mine])
    scores = np.array([stage.probability(logit) for logit in scored.logits.tolist()])
    points: list[tuple[float, float]] = []
    for low in np.arange(0, 1, 0.1):
        mine = (scores >= low) & (scores < low + 0.1)
        if weights[mine].sum() > 0:
            share = weights[mine & ~scored.clean()].sum() / weights[mine].sum()
            points.append((float(np.average(scores[mine], weights=weights[mine])), float(share)))
    return points
