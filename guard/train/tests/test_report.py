"""The written report says what its figures say."""

import json
from pathlib import Path

from headrace_guard_train import report

_REPORT = Path(__file__).parents[3] / "docs/guard-report"


def _head(**rates: tuple[int, float]) -> dict[str, object]:
    return {
        "cascade": {
            "positives": {
                source: {"rows": rows, "tpr_at_1_percent_fpr": rate}
                for source, (rows, rate) in rates.items()
            }
        }
    }


def test_a_kind_is_all_its_sources() -> None:
    """Attacks of users and in documents are one kind; a head that was not fitted is left out."""
    heads = {"injection": _head(a=(100, 0.2)), "indirect": _head(b=(300, 0.6))}
    lines = report.by_kind({"heads": heads})
    both = next(line for line in lines if "users and in documents" in line)
    assert both.endswith("| 2 | 0.40 | 0.20, 0.60 | 0.50 |")
    assert not any("harmful" in line for line in lines)


def test_the_report_is_of_its_figures() -> None:
    """Neither was written without the other."""
    figures = json.loads((_REPORT / "figures.json").read_text(encoding="utf-8"))
    text = (_REPORT / "README.md").read_text(encoding="utf-8")
    assert "\n".join(report.by_kind(figures)) in text
