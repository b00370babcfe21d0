"""Tests of what a worker takes from where it runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from headrace_worker.settings import WorkerSettings


def test_a_worker_is_named_after_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of one container or pod specification differ in nothing else."""
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-0.fleet_x/y" + "z" * 80)
    name = WorkerSettings(model_path=Path("m.gguf")).worker_id
    assert name.startswith("worker-0.fleet_x-yz")
    assert len(name) == 64


def test_zero_threads_are_one_for_each_core_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that the process may use, not of all that the machine has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4, 7})
    settings = WorkerSettings(model_path=Path("m.gguf"), num_threads=0)
    assert settings.compute_threads() == 3
    assert WorkerSettings(model_path=Path("m.gguf"), num_threads=2).compute_threads() == 2
