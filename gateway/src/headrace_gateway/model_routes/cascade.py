"""Which of two models a request needs: a linear head over hashed words, made by `bench/cascade.py`.

The head says what the large model would gain: 1 = it alone answers right, 0 = the small one alone
does, a half = it makes no difference. It comes with what was measured on tasks that it was not
trained on; where the large model is not better by enough, or the head no better than a draw with
the same share, it is off by its rule.

Scoring is plain Python over at most two thousand characters: 60 to 750 us, paid by routes of this
kind alone. Feature hashing: Weinberger et al. 2009.
"""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace_common.settings import SettingsError
from headrace_gateway.answer_extras import Json

BITS = 12
_MAX_CHARS = 2000
_WORD = re.compile(r"[^\W\d]+|\d+|[^\w\s]")


def features(text: str) -> list[int]:
    """Return the distinct buckets of a text: words, pairs, and those of its last lines apart. Pure.

    A number counts by its length, so that what was learned of one holds for others.
    """
    text = text[-_MAX_CHARS:].lower()
    whole, last = _shapes(text), _shapes(" ".join(text.rstrip().rsplit("\n", 2)[-2:]))
    names = {f"w {it}" for it in whole}
    names |= {f"b {a} {b}" for a, b in pairwise(whole)}
    names |= {f"l {it}" for it in last}
    names |= {f"p {a} {b}" for a, b in pairwise(last)}
    names.add(f"n {len(whole).bit_length()}")
    return sorted({zlib.crc32(name.encode("utf-8", "replace")) >> (32 - BITS) for name in names})


def _shapes(text: str) -> list[str]:
    return [f"#{len(it)}" if it[0].isdigit() else it for it in _WORD.findall(text)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measured(_Part):
    """What was found on tasks that the head was not trained on. Shares of right answers, 0 to 1."""

    small: str
    large: str
    num_tasks: int = Field(ge=1)
    small_ratio: float = Field(ge=0, le=1)
    large_ratio: float = Field(ge=0, le=1)
    oracle_ratio: float = Field(ge=0, le=1)
    # At the head's own threshold: right answers, the share sent to the large model, and how many
    # more were right than with the same share drawn at random; with its 95 % interval.
    cascade_ratio: float = Field(ge=0, le=1)
    large_share_ratio: float = Field(ge=0, le=1)
    gain_ratio: float
    gain_low_ratio: float
    gain_high_ratio: float
    threshold: float = Field(ge=0, le=1)

    @property
    def headroom_ratio(self) -> float:
        """How much better the large model is."""
        return self.large_ratio - self.small_ratio


class HeadFile(_Part):
    """The file of a head. `weights` is base64 of one signed byte a bucket, times `scale`."""

    version: Literal[1]
    bits: Literal[12]
    bias: float
    scale: float
    weights: str
    measured: Measured

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(base64.b64decode(self.weights, validate=True)) != 1 << BITS:
            raise ValueError(f"weights must be {1 << BITS} bytes")
        return self


class CascadeHead:
    """A head, ready to score.

    Args:
        file: checked.
    """

    def __init__(self, file: HeadFile) -> None:
        raw = base64.b64decode(file.weights)
        self._weights = [file.scale * (byte - 256 if byte > 127 else byte) for byte in raw]
        self._bias, self.measured = file.bias, file.measured

    def score(self, text: str) -> float:
        """Return what the large model would gain, 0 to 1."""
        buckets = features(text)
        total = sum(self._weights[bucket] for bucket in buckets) / math.sqrt(len(buckets))
        return 1 / (1 + math.exp(-max(-30.0, min(30.0, self._bias + total))))


class CascadeSection(_Part):
    """Two models and who chooses between them."""

    small: str = Field(min_length=1, max_length=200)
    large: str = Field(min_length=1, max_length=200)
    # A file, or the name of a head that comes with Headrace.
    head: str = Field(default="smollm2-gemma3", max_length=500)
    # From this score on the large model is asked; None = where the head did best.
    threshold: float | None = Field(default=None, ge=0, le=1)
    # The large model must be better by so much, or the route is off.
    min_headroom_ratio: float = Field(default=0.02, ge=0, le=1)


@dataclass(frozen=True)
class Cascade:
    """A section with its head.

    Args:
        section: what the operator wrote.
        head: what scores.
    """

    section: CascadeSection
    head: CascadeHead

    @property
    def why_off(self) -> str:
        """Why the head is not asked; empty = it is."""
        found, section = self.head.measured, self.section
        if (found.small, found.large) != (section.small, section.large):
            return f"its head was measured for {found.small} and {found.large}"
        if found.headroom_ratio < section.min_headroom_ratio:
            return f"the large model is better by {found.headroom_ratio:.3f} only"
        if found.gain_low_ratio <= 0:
            return "its head is no better than drawing at random"
        return ""

    @property
    def resting(self) -> str:
        """The model that serves while the route is off: the better one, of equal ones the small."""
        found = self.head.measured
        if (found.small, found.large) != (self.section.small, self.section.large):
            return self.section.large
        is_better = found.headroom_ratio >= self.section.min_headroom_ratio
        return self.section.large if is_better else self.section.small

    def choose(self, text_of: Callable[[], str]) -> tuple[str, Json]:
        """Return a model and the reasons, for the request's story."""
        if self.why_off:
            return self.resting, {"cascade": {"is_on": False, "why": self.why_off}}
        threshold = self.section.threshold
        if threshold is None:
            threshold = self.head.measured.threshold
        score = self.head.score(text_of())
        model = self.section.large if score >= threshold else self.section.small
        told = {"is_on": True, "score": round(score, 4), "threshold": threshold}
        return model, {"cascade": told}


def load_head(name: str, folder: Path) -> CascadeHead:
    """Read a head: a file, relative to the routes' folder, or one that comes along.

    Raises:
        SettingsError: it cannot be read or is not one.
    """
    path: Path | Traversable = folder / name
    if "/" not in name and not name.endswith(".json"):
        path = resources.files("headrace_gateway.model_routes") / f"{name}.json"
    try:
        return CascadeHead(HeadFile.model_validate_json(path.read_text()))
    except (OSError, UnicodeDecodeError, ValidationError, ValueError) as error:
        raise SettingsError(f"cascade head {name}: {error}") from error


def asked_text(messages: Sequence[Json], prompts: Sequence[object]) -> str:
    """Return what a request asks: its last message of a user, or its first prompt."""
    for message in reversed(messages):
        if message["role"] == "user":
            return str(message["content"])
    return next((it for it in prompts if isinstance(it, str)), "")
