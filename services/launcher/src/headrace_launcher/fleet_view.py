"""What is known of a fleet at one moment: displays show it, ``fleet.json`` keeps it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

VERSION = 1


class FleetState(StrEnum):
    """``STARTING -> RUNNING -> STOPPING -> STOPPED``; FAILED instead of STOPPED after a mishap."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Role(StrEnum):
    """What kind of line this is in the list of a fleet's parts."""

    STEP = "step"  # done once at the start, e.g. bringing the model
    STORE = "store"
    SERVICE = "service"
    WORKER = "worker"


@dataclass
class ChildView:
    """One part of a fleet. Addresses are ``host:port``, empty where there is none."""

    name: str
    role: Role
    state: str
    address: str = ""
    metrics_address: str = ""
    # Of an admin API over HTTP.
    admin_address: str = ""
    pid: int | None = None
    restarts: int = 0
    # Share of loading done, 0..1; None = nothing to show.
    progress_ratio: float | None = None
    detail: str = ""
    log: str = ""


@dataclass
class FleetView:
    """A whole fleet; `pid` and `pid_created_s` (Unix seconds) together name its supervisor."""

    state: FleetState
    pid: int
    pid_created_s: float
    base_url: str
    model: str
    state_dir: str
    message: str = ""
    children: list[ChildView] = field(default_factory=list)
    version: int = VERSION

    def child(self, name: str) -> ChildView | None:
        """Find a part by name."""
        return next((child for child in self.children if child.name == name), None)

    def to_json(self) -> str:
        """Render for ``fleet.json``."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> FleetView:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else, or of another version.
        """
        try:
            values: dict[str, Any] = json.loads(text)  # Any: JSON, checked by the constructors
            if values["version"] != VERSION:
                raise ValueError(f"version {values['version']} of fleet.json is not known")
            children = [ChildView(**{**c, "role": Role(c["role"])}) for c in values["children"]]
            return cls(**{**values, "state": FleetState(values["state"]), "children": children})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a fleet.json: {error}") from error


def public_status(view: FleetView, *, alive: bool) -> dict[str, Any]:  # Any: JSON values
    """Return what ``headrace status --json`` prints; the names in it are stable."""
    state = view.state if alive else FleetState.STOPPED
    return {
        "state": state.value,
        "pid": view.pid if alive else None,
        "base_url": view.base_url,
        "admin_url": next(
            (f"http://{c.admin_address}" for c in view.children if c.admin_address), ""
        ),
        "model": view.model,
        "state_dir": view.state_dir,
        "message": view.message
        if alive or view.state is not FleetState.RUNNING
        else "its supervisor is gone",
        "services": [
            {"name": c.name, **_public_child(c, alive=alive)}
            for c in view.children
            if c.role in (Role.STORE, Role.SERVICE)
        ],
        "workers": [
            {"id": c.name, **_public_child(c, alive=alive)}
            for c in view.children
            if c.role is Role.WORKER
        ],
    }


def scrape_targets(view: FleetView) -> list[dict[str, Any]]:  # Any: JSON values
    """Return what a Prometheus reads as a file of targets, with the labels that the rules need."""
    return [
        {
            "targets": [child.metrics_address],
            "labels": {"service": _service_of(child), "instance": child.name},
        }
        for child in view.children
        if child.metrics_address
    ]


def _service_of(child: ChildView) -> str:
    # The second gateway is named gateway-2; a worker may have any name.
    return "worker" if child.role is Role.WORKER else child.name.rstrip("0123456789").rstrip("-")


def _public_child(child: ChildView, *, alive: bool) -> dict[str, Any]:  # Any: JSON values
    return {
        "state": child.state if alive else "stopped",
        "address": child.address,
        "pid": child.pid if alive else None,
        "metrics_address": child.metrics_address,
        **({"admin_url": f"http://{child.admin_address}"} if child.admin_address else {}),
        "restarts": child.restarts,
        "log": child.log,
    }
