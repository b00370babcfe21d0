"""One fleet from start to end: model, children, first key, and ``fleet.json`` all along."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from headrace_common.lifecycle import cancel_and_wait
from headrace_common.settings import SettingsError, join_address
from headrace_launcher import model_fetch, model_prepare, programs
from headrace_launcher.billing_client import open_billing
from headrace_launcher.child_state import ChildState, RestartPolicy
from headrace_launcher.display import Display
from headrace_launcher.first_key import FirstKey, ensure_first_key
from headrace_launcher.fleet_view import ChildView, FleetState, FleetView, Role
from headrace_launcher.log_file import rotate
from headrace_launcher.model_catalog import MODELS, ensure_known_model
from headrace_launcher.model_fetch import ModelError
from headrace_launcher.peer import PeerError
from headrace_launcher.plan import MODEL_GATE, ChildSpec, FleetOptions, num_ports, plan_fleet
from headrace_launcher.ports import free_ports
from headrace_launcher.preflight import PreflightError, explain_os_error
from headrace_launcher.process import Spawner, StartError
from headrace_launcher.settings import LauncherSettings, child_environment
from headrace_launcher.state_dir import StateDir, own_identity
from headrace_launcher.supervisor import Supervisor
from headrace_launcher.text import say
from headrace_launcher.upstream_file import Upstream, load_upstreams
from headrace_launcher.worker_progress import loading_progress

_SHOW_INTERVAL_S = 0.1
_DEFAULT_MODEL = "smollm2-135m-instruct"

OnRunning = Callable[[FleetView, FirstKey], None]


class FleetError(Exception):
    """The fleet could not start or had to stop; the message says why."""


class Fleet:
    """Runs a fleet in this process. The state directory must be checked and locked.

    Args:
        settings: what the fleet is made of.
        state_dir: where it keeps its things.
        display: sees every change.
    """

    def __init__(self, settings: LauncherSettings, state_dir: StateDir, display: Display) -> None:
        self._settings, self._state_dir, self._display = settings, state_dir, display
        pid, created_s = own_identity()
        self._view = FleetView(
            state=FleetState.STARTING,
            pid=pid,
            pid_created_s=created_s,
            base_url=f"http://{join_address(settings.host, settings.port)}",
            model=settings.model_name,
            state_dir=str(state_dir.path),
        )
        self._model_step = ChildView("model", Role.STEP, ChildState.STARTING.value)
        self._supervisor: Supervisor | None = None
        self._dirty = asyncio.Event()

    async def run(self, stopping: asyncio.Event, on_running: OnRunning) -> None:
        """Start everything, tell *on_running*, and stop everything when *stopping* is set.

        Raises:
            FleetError: it did not come up, or a child kept crashing. Nothing runs any more.
        """
        shower = asyncio.create_task(self._show_changes())
        message = ""
        try:
            async with Spawner([self._state_dir.lock_descriptor()]) as spawner:
                message = await self._start_and_wait(spawner, stopping, on_running)
                self._view.state = FleetState.STOPPING
                self._dirty.set()
                if self._supervisor is not None:
                    await self._supervisor.stop()
        finally:
            await cancel_and_wait(shower)
            self._view.state = FleetState.FAILED if message else FleetState.STOPPED
            self._view.message = message
            self._show()
        if message:
            raise FleetError(message)

    async def _start_and_wait(
        self, spawner: Spawner, stopping: asyncio.Event, on_running: OnRunning
    ) -> str:
        """Return why the fleet must stop; empty if it was asked to."""
        work = asyncio.create_task(self._start(spawner, on_running))
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await cancel_and_wait(work, stop)
            return ""
        try:
            supervisor = await work
        except FleetError as error:
            await cancel_and_wait(stop)
            return str(error)
        failed = asyncio.create_task(supervisor.failed.wait())
        await asyncio.wait([failed, stop], return_when=asyncio.FIRST_COMPLETED)
        await cancel_and_wait(failed, stop)
        return supervisor.failure

    async def _start(self, spawner: Spawner, on_running: OnRunning) -> Supervisor:
        try:
            supervisor = await self._start_children(spawner)
        except (ModelError, PreflightError, StartError, programs.ProgramMissingError) as error:
            self._model_step.state = ChildState.FAILED.value
            raise FleetError(str(error)) from error
        except OSError as error:
            # A folder that cannot be written to, no free ports, no descriptors left.
            raise FleetError(f"the fleet could not start: {error}") from error
        await supervisor.wait_ready()
        if supervisor.failed.is_set():
            raise FleetError(supervisor.failure)
        key = await self._first_key()
        self._view.state = FleetState.RUNNING
        self._show()
        on_running(self._view, key)
        return supervisor

    async def _start_children(self, spawner: Spawner) -> Supervisor:
        """Start everything; the model is prepared while the services come up."""
        valkey, kafka = programs.valkey_server(), programs.kafka_broker()
        model = await fetch_model(self._settings, spawner, self._report)
        prepared = model_prepare.prepared_path(self._settings.cache_dir, model)
        specs = self._plan(valkey, kafka, prepared, await self._embedding(spawner))
        # The mark by which an operator finds the processes of one fleet.
        environment = {**child_environment(), "HEADRACE_STATE_DIR": str(self._state_dir.path)}
        for spec in specs:
            rotate(self._state_dir.log_of(spec.name))
        is_prepared = asyncio.Event()
        supervisor = Supervisor(
            specs,
            self._state_dir,
            environment,
            spawner,
            self._dirty.set,
            RestartPolicy(self._settings.max_crashes, self._settings.crash_window_s),
            loading_progress,
            {MODEL_GATE: is_prepared},
        )
        self._supervisor = supervisor
        supervisor.start()
        log = self._state_dir.log_of(self._model_step.name)
        await model_prepare.prepare_model(model, prepared, log, spawner, environment, self._report)
        self._model_step.state = ChildState.READY.value
        self._report(None, model.name)
        is_prepared.set()
        return supervisor

    async def _embedding(self, spawner: Spawner) -> Path | None:
        """Return the folder of the guard's embedding model; the guard can do without it."""
        try:
            return await fetch_embedding(self._settings, spawner, self._report)
        except (ModelError, PreflightError) as error:
            say(f"the guard goes without its embedding model: {error}")
            return None

    def _plan(
        self, valkey: Path, kafka: Path, model: Path, embedding: Path | None
    ) -> list[ChildSpec]:
        settings = self._settings
        options = FleetOptions(
            state_dir=self._state_dir.path,
            host=settings.host,
            port=settings.port,
            num_workers=settings.workers,
            num_gateways=settings.gateways,
            num_prefill_workers=min(settings.prefill_workers, settings.workers - 1),
            model_path=model,
            embedding_dir=embedding,
            model_name=settings.model_name,
            valkey_server=valkey,
            kafka_broker=kafka,
            redis_url=settings.redis_url,
            kafka_bootstrap=settings.kafka_bootstrap,
            kafka_max_bytes=settings.kafka_max_bytes,
            database_url=settings.database_url.get_secret_value(),
            drain_grace_s=settings.drain_grace_s,
            num_cpus=os.cpu_count() or 1,
            model_routes_file=settings.model_routes_file,
            upstreams=self._upstreams(),
        )
        return plan_fleet(options, free_ports(num_ports(options)))

    def _upstreams(self) -> Mapping[str, Upstream]:
        try:
            return load_upstreams(self._settings.upstreams_file)
        except SettingsError as error:
            raise FleetError(str(error)) from error

    async def _first_key(self) -> FirstKey:
        self._collect()
        try:
            return await first_key_of(self._view, self._state_dir)
        except PeerError as error:
            raise FleetError(f"the first key cannot be had: {error}") from error
        except OSError as error:
            raise FleetError(explain_os_error(error, self._state_dir.first_key)) from error

    def _report(self, ratio: float | None, detail: str) -> None:
        self._model_step.progress_ratio, self._model_step.detail = ratio, detail
        self._dirty.set()

    async def _show_changes(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            self._show()
            await asyncio.sleep(_SHOW_INTERVAL_S)

    def _show(self) -> None:
        self._collect()
        with contextlib.suppress(OSError):  # a full disk must not end a fleet that runs
            self._state_dir.write_view(self._view)
        self._display.update(self._view)

    def _collect(self) -> None:
        children = self._supervisor.views() if self._supervisor is not None else []
        self._view.children = [self._model_step, *children]


async def fetch_model(
    settings: LauncherSettings, spawner: Spawner, report: model_fetch.Report
) -> Path:
    """Return the model that the settings name; one that is known by name is fetched if need be.

    Raises:
        ModelError: it does not exist or cannot be had.
    """
    name = str(settings.model or _DEFAULT_MODEL)
    if settings.model is not None:
        model = settings.model.expanduser().absolute()
        if model.exists():
            return model
        if name not in MODELS:
            raise ModelError(
                f"there is no model at {model}: a GGUF file or Hugging Face folder; "
                f"or one that is fetched by its name: {', '.join(MODELS)}"
            )
    models = settings.cache_dir / "models"
    return await ensure_known_model(models, MODELS[name], spawner, child_environment(), report)


async def fetch_embedding(
    settings: LauncherSettings, spawner: Spawner, report: model_fetch.Report
) -> Path:
    """Return the folder with the guard's embedding model; fetch what is missing.

    Raises:
        ModelError: it cannot be had.
        PreflightError: no room.
    """
    models = settings.cache_dir / "models"
    return await model_fetch.ensure_embedding(models, spawner, child_environment(), report)


async def first_key_of(view: FleetView, state_dir: StateDir) -> FirstKey:
    """Make or find the first key of a running fleet.

    Raises:
        PeerError: billing refuses or does not answer.
        OSError: the key's file cannot be read or written.
    """
    billing = view.child("billing")
    async with open_billing(billing.address if billing else "") as client:
        return await ensure_first_key(client, state_dir.first_key)


def run_until_done(main: Coroutine[Any, Any, int]) -> int:  # Any: the coroutine's own send types
    """Run a command's coroutine.

    On asyncio's own loop: it starts children by vfork, which is safe beside gRPC's threads;
    uvloop's fork is not.
    """
    return asyncio.run(main)
