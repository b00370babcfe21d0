"""The figures as JSON, a table in Markdown, and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace_guard.classifiers.heads import INDIRECT
from headrace_guard.classifiers.text_model import Point
from headrace_guard_train import plan
from headrace_guard_train.cascade_figures import HeadFigures, Stage
from headrace_guard_train.hazards import Hazards
from headrace_guard_train.operating import (
    Scored,
    auc,
    only,
    ordinary,
    source_weights,
    true_ratio_at,
)
from headrace_guard_train.plots import line_plot
from headrace_guard_train.topics import NUM_EXAMPLES, OFF_TOPIC, Topics

_NUM_POINTS = 60
# What the heads judge, as an operator names it: attacks on the model reach two heads.
_KINDS = {
    "injection and jailbreaks, from users and in documents": ("injection", "indirect"),
    "of these, from users": ("injection",),
    "of these, in documents": ("indirect",),
    "harmful requests": ("harm",),
    "toxicity": ("toxicity",),
}
Json = dict[str, Any]  # Any: JSON


def figures(
    heads: Mapping[str, HeadFigures],
    hazards: Hazards | None,
    topics: Topics | None,
    embedded_ratio: float,
) -> Json:
    """Return every figure of the report.

    Args:
        heads: by name.
        hazards: if they were fitted.
        topics: if they were fitted.
        embedded_ratio: share of ordinary texts that any head asks the embedding stage about.
    """
    found: Json = {"heads": {name: _head(one) for name, one in heads.items()}}
    found["embedded_ratio_of_ordinary"] = round(embedded_ratio, 4)
    if hazards is not None:
        found["hazards"] = {
            "right_by_words": round(hazards.right_by_words, 3),
            "right_by_vectors": round(hazards.right_by_vectors, 3),
        }
    if topics is not None:
        found["topics"] = {
            "auc": {
                name: {kind: round(area, 3) for kind, area in row.items()}
                for name, row in topics.auc.items()
            },
            "false_ratio_strict": round(topics.false_ratio, 3),
            "true_ratio_strict": round(topics.true_ratio, 3),
        }
    return found


def write(folder: Path, found: Json, heads: Mapping[str, HeadFigures], foreword: str) -> None:
    """Write figures.json, README.md and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ratio = 100 * found["embedded_ratio_of_ordinary"]
    lines = [foreword, *_summary(found)]
    lines.append(f"Of ordinary texts, {ratio:.1f} % are looked at by the embedding stage.\n")
    for name, one in heads.items():
        lines += _tables(name, found["heads"][name])
        _plots(folder, name, one)
        lines.append(
            f"![ROC of {name}](roc-{name}.svg) ![Reliability of {name}](reliability-{name}.svg)\n"
        )
    if "hazards" in found or "topics" in found:
        lines += _rest(found)
    (folder / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _summary(found: Json) -> list[str]:
    """Return one line a left-out source, as the whole guard judges it."""
    lines = [
        "## In short: cascade, TPR on left-out sources, and the worst clean source at `balanced`",
        "| head | source | at 1 % FPR | at 1 % of ordinary | at balanced | worst clean source |",
        "|---|---|---|---|---|---|",
    ]
    for name, head in found["heads"].items():
        clean = head["cascade"]["clean"]
        worst = max(clean, key=lambda source: clean[source]["fpr_balanced"])
        said = f"{worst} {clean[worst]['fpr_balanced']:.3f}"
        for source, row in head["cascade"]["positives"].items():
            rates = ("tpr_at_1_percent_fpr", "tpr_at_1_percent_of_ordinary", "tpr_balanced")
            cells = " | ".join(f"{row[rate]:.2f}" for rate in rates)
            lines.append(f"| {name} | {source} | {cells} | {said} |")
    return [*lines, "", *by_kind(found)]


def by_kind(found: Json) -> list[str]:
    """Return one line a kind: all its left-out sources, each or each row counting the same."""
    lines = [
        "## By kind: cascade, TPR at 1 % FPR over all left-out sources",
        "| kind | sources | mean of the sources | lowest, highest | of all rows |",
        "|---|---|---|---|---|",
    ]
    for kind, heads in _KINDS.items():
        rows = [
            row
            for head in heads
            if head in found["heads"]
            for row in found["heads"][head]["cascade"]["positives"].values()
        ]
        if rows:
            rates = [row["tpr_at_1_percent_fpr"] for row in rows]
            of_rows = np.average(rates, weights=[row["rows"] for row in rows])
            lines.append(
                f"| {kind} | {len(rows)} | {np.mean(rates):.2f} "
                f"| {min(rates):.2f}, {max(rates):.2f} | {of_rows:.2f} |"
            )
    return [*lines, ""]


def _head(one: HeadFigures) -> Json:
    return {
        "linear": _stage(one.linear),
        "cascade": _stage(one.cascade),
        "embedded_ratio": round(one.embedded_ratio, 4),
        "band_recall": {name: round(share, 3) for name, share in one.band_recall.items()},
        "words_share": round(one.words_share, 3),
        "linear_share": one.linear_share,
    }


def _stage(stage: Stage) -> Json:
    scored = stage.scored
    clean = only(scored, scored.clean())
    usual = ordinary(scored, plan.ORDINARY)
    positives: Json = {}
    negatives: Json = {}
    for source in np.unique(scored.sources[~scored.clean()]).tolist():
        logits = scored.logits[~scored.clean() & (scored.sources == source)]
        positives[source] = {
            "rows": len(logits),
            "auc": round(auc(logits, clean.logits), 3),
            "tpr_at_1_percent_fpr": round(true_ratio_at(logits, clean, 0.01), 3),
            "tpr_at_1_percent_of_ordinary": round(true_ratio_at(logits, usual, 0.01), 3),
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
        f"The embedding stage is asked about {asked:.1f} % of clean texts. Of positives it sees "
        + ", ".join(f"{source} {share:.2f}" for source, share in found["band_recall"].items())
        + "; the rest is a miss before it.\n",
    ]
    for stage in ("linear", "cascade"):
        lines += [
            f"### {stage}: positives of a source that was left out",
            "| source | rows | AUC | TPR at 1 % FPR | at 1 % of ordinary | strict | balanced "
            "| lenient |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for source, row in found[stage]["positives"].items():
            rates = ["tpr_at_1_percent_fpr", "tpr_at_1_percent_of_ordinary"]
            rates += ["tpr_strict", "tpr_balanced", "tpr_lenient"]
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
    lines = _disguised(found.get("found_in_disguise", {}))
    for head, forms in found.get("found_in_forms", {}).items():
        lines += _in_forms(head, forms)
    if "hazards" in found:
        lines += [
            "## Hazard ids",
            f"Right on held-out own rows: {found['hazards']['right_by_words']:.2f} by words, "
            f"{found['hazards']['right_by_vectors']:.2f} by embedding.\n",
        ]
    if "topics" in found:
        lines += [
            f"## Off topic, {NUM_EXAMPLES} examples, AUC of left-out domains",
            "The centre was learnt from neither the domain nor what is off topic there "
            "(`topics.py`). Other requests are what else people ask an assistant: the weather, "
            "alarms, sums, words, jokes.\n",
            "| domain | " + " | ".join(f"against {kind}" for kind in OFF_TOPIC) + " |",
            "|---" * (1 + len(OFF_TOPIC)) + "|",
        ]
        areas = found["topics"]["auc"]
        means = {kind: np.mean([row[kind] for row in areas.values()]) for kind in OFF_TOPIC}
        for name, row in {**areas, "mean": means}.items():
            lines.append(f"| {name} | " + " | ".join(f"{row[it]:.3f}" for it in OFF_TOPIC) + " |")
        hit, wrong = found["topics"]["true_ratio_strict"], found["topics"]["false_ratio_strict"]
        lines.append(
            f"\nAt `strict`, by thresholds of the other domains: {hit:.2f} of off-topic texts are "
            f"hit, {wrong:.3f} of on-topic ones.\n"
        )
    return lines


def _disguised(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a table of what is still found in disguise."""
    if not found:
        return []
    kinds = list(next(iter(found.values())))
    return [
        "## In disguise: share of positives of left-out sources found at `balanced`, whole guard",
        "| head | " + " | ".join(kinds) + " |",
        "|---|" + "---|" * len(kinds),
        *(
            f"| {head} | " + " | ".join(f"{row[kind]:.2f}" for kind in kinds) + " |"
            for head, row in found.items()
        ),
        "",
    ]


def _in_forms(head: str, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a table of texts of left-out sources in the forms in which they are sent."""
    sources = list(next(iter(found.values())))
    what = "documents, in JSON" if head == INDIRECT else "requests, in JSON and among other text"
    return [
        f"## Share of {what}, of left-out sources, hit by `{head}` at `balanced`, whole guard",
        "| form | " + " | ".join(sources) + " |",
        "|---|" + "---|" * len(sources),
        *(
            f"| {form} | " + " | ".join(f"{row[source]:.2f}" for source in sources) + " |"
            for form, row in found.items()
        ),
        "",
    ]


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
