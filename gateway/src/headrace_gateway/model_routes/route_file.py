"""The versioned file of model routes. Read, checked, frozen; every mistake is named."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace_common.settings import SettingsError
from headrace_common.toml_file import load_toml
from headrace_gateway.model_routes.cascade import Cascade, CascadeSection, load_head

ModelName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")]
FailureKind = Literal["unavailable", "overloaded", "timeout"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Variant(_Section):
    """One side of a split."""

    model: ModelName
    weight: float = Field(gt=0, le=1e6)


class RouteSection(_Section):
    """Where one name leads: to a model, or to one of several."""

    model: ModelName | None = None
    split: tuple[Variant, ...] = ()
    cascade: CascadeSection | None = None
    # What keeps to one variant: all turns of a conversation, all requests of a key, or nothing.
    sticky: Literal["conversation", "key", "request"] = "conversation"
    seed: str = Field(default="", max_length=200)
    # Tried in this order before the first byte, if the model cannot answer.
    fallbacks: tuple[ModelName, ...] = Field(default=(), max_length=16)
    fallback_on: frozenset[FailureKind] = frozenset(("unavailable", "overloaded", "timeout"))
    # A model that has not begun by then counts as timed out; only while another is left.
    start_timeout_s: float = Field(default=30.0, gt=0, le=3600)

    @property
    def weights(self) -> dict[str, float]:
        """The models that serve it while they can, with their shares."""
        if self.cascade is not None:
            return {self.cascade.small: 1.0, self.cascade.large: 1.0}
        return {self.model: 1.0} if self.model else {it.model: it.weight for it in self.split}

    @property
    def targets(self) -> tuple[str, ...]:
        """Every model that the route may end on, each once."""
        return tuple(dict.fromkeys((*self.weights, *self.fallbacks)))

    @property
    def kind(self) -> str:
        """What sort of route it is."""
        if self.cascade is not None:
            return "cascade"
        return "alias" if self.model else "split"

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        given = (self.model is not None, bool(self.split), self.cascade is not None)
        if sum(given) != 1:
            raise ValueError("give either model or split or cascade")
        if len({it.model for it in self.split}) < len(self.split):
            raise ValueError("split names a model twice")
        return self


class RouteFile(_Section):
    """The whole file."""

    version: Literal[1]
    # The operator's own name of this content; shown with what it led to.
    revision: str = Field(default="", max_length=100)
    routes: dict[ModelName, RouteSection] = Field(default_factory=dict, max_length=1000)

    @model_validator(mode="after")
    def _no_chains(self) -> Self:
        for name, route in self.routes.items():
            for target in route.targets:
                # A model may have a route of its own name, to give it fallbacks.
                if target in self.routes and target != name:
                    raise ValueError(
                        f"routes.{name} leads to {target}, which is a route too; name models"
                    )
        return self


def load_cascades(file: RouteFile, folder: Path) -> dict[str, Cascade]:
    """Read the heads of a file's cascades, by the name of the route.

    Raises:
        SettingsError: one cannot be read.
    """
    cascades = {}
    for name, route in file.routes.items():
        if route.cascade is not None:
            try:
                cascades[name] = Cascade(route.cascade, load_head(route.cascade.head, folder))
            except SettingsError as error:
                raise SettingsError(f"routes.{name}: {error}") from error
    return cascades


def load_route_file(path: Path) -> tuple[RouteFile, str]:
    """Read a file; return it and the revision to show: its own, or a hash of the content.

    Raises:
        SettingsError: it cannot be read or says something wrong.
    """
    file = load_toml(path, RouteFile, "model routes")
    return file, file.revision or hashlib.sha256(file.model_dump_json().encode()).hexdigest()[:12]


def describe_route_file(path: Path) -> str:
    """Read a file as a gateway would; return, in lines for people, what it leads to.

    Raises:
        SettingsError: a gateway would refuse it.
    """
    file, revision = load_route_file(path)
    cascades = load_cascades(file, path.parent)
    lines = [f"{path}: {len(file.routes)} routes, revision {revision}"]
    for name, route in file.routes.items():
        lines.append(f"{name}: {route.kind} of {', '.join(route.targets)}")
        if name in cascades and cascades[name].why_off:
            lines.append(f"{name}: the cascade is off, {cascades[name].why_off}")
    return "\n".join(lines)
