"""Stand-in children and a state directory for the launcher's tests."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_launcher.fleet_view import Role
from headrace_launcher.plan import ChildSpec, ProbeKind
from headrace_launcher.ports import free_ports
from headrace_launcher.state_dir import StateDir

STAND_IN = Path(__file__).parent / "stand_in.py"
MakeSpec = Callable[..., ChildSpec]


@pytest.fixture
def state_dir(tmp_path: Path) -> StateDir:
    folder = StateDir(tmp_path / "state")
    folder.create()
    return folder


@pytest.fixture
def make_spec() -> MakeSpec:
    def make(name: str, *extra: str, stage: int = 0, **fields: object) -> ChildSpec:
        port = free_ports(1)[0]
        values: dict[str, object] = {
            "name": name,
            "role": Role.SERVICE,
            "argv": (sys.executable, "-I", "-S", str(STAND_IN), str(port), *extra),
            "address": f"127.0.0.1:{port}",
            "metrics_address": f"127.0.0.1:{port}",
            "probe": ProbeKind.HTTP,
            "needs": (),
            "stop_stage": stage,
            "stop_grace_s": 5.0,
        }
        return ChildSpec(**{**values, **fields})

    return make
