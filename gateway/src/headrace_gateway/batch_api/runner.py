"""Works through batches in the gaps of other traffic.

Every process of a gateway runs one; a lease in the state says whose a batch is. A process that dies
leaves its batches to the others: lines with a result keep it, lines without one run again under the
request id they had, so that each has one result and one bill (`tries_log`).

Lines go with the lowest priority and few at a time, by turns of tenants; one that must wait for
another try leaves its place to others. While requests queue at any replica no further one is begun.

Long because the life of a batch is one sequence, from its lease to its files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from headrace_common.errors import HeadraceError, NotFound, Unavailable, UnknownKey
from headrace_common.fair_places import FairPlaces
from headrace_common.lifecycle import cancel_and_wait
from headrace_gateway.auth import KeyAuth
from headrace_gateway.batch_api.input_lines import (
    MAX_ERRORS,
    MAX_LINE_BYTES,
    MAX_LINES,
    InputLine,
    LineError,
    dropped_line,
    read_line,
    result_line,
)
from headrace_gateway.batch_api.line_call import LineCaller, LineOutcome
from headrace_gateway.batch_api.lines_usage import LinesUsage
from headrace_gateway.batch_api.message_lines import ENDPOINT as MESSAGES
from headrace_gateway.batch_api.message_lines import OutcomeCounts
from headrace_gateway.batch_api.stored_batches import LEASE_S, Batch, PendingLine, StoredBatches
from headrace_gateway.batch_api.stored_files import RESULTS, StoredFiles
from headrace_gateway.principal import Principal
from headrace_gateway.state.store import once_there

_log = logging.getLogger(__name__)

# Batches that one process works on side by side; they share its places for lines. Beyond the first
# bound only those of tenants of whom it works on none.
_MAX_BATCHES, _MAX_TENANTS = 4, 32
_IDLE_POLL_S = 2.0
_GAP_POLL_S = 0.1
# While billing cannot say whose the key is.
_KEY_POLL_S = 1.0
_PAGE_LINES = 100
# What is answered has so long to be kept when the batch is let go.
_KEEP_S = 5.0
_MAX_RETRY_S = 30.0


@dataclass(frozen=True)
class RunnerParts:
    """What a runner needs.

    Args:
        batches: the batches.
        files: their files.
        caller: answers lines.
        auth: whose key made a batch.
        is_busy: whether requests queue for some model, so that no line may begin.
        concurrency: lines under way at once in this process; 0 = it runs no batches.
    """

    batches: StoredBatches
    files: StoredFiles
    caller: LineCaller
    auth: KeyAuth
    is_busy: Callable[[], bool]
    concurrency: int


class BatchRunner:
    """Runs batches. Belongs to one event loop.

    Args:
        parts: see `RunnerParts`.
        worker_id: of this process, drawn at its start.
    """

    def __init__(self, parts: RunnerParts, worker_id: str) -> None:
        self._parts, self._worker_id = parts, worker_id
        self._places = FairPlaces(max(1, parts.concurrency))
        self._running: dict[str, asyncio.Task[None]] = {}
        # The same batches, each with its tenant.
        self._tenants: dict[str, str] = {}
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Look for batches now."""
        self._woken.set()

    async def keep(self) -> None:
        """Work on whatever there is, until cancelled; run under `supervise`."""
        if self._parts.concurrency == 0:
            await asyncio.Event().wait()
        try:
            while True:
                self._woken.clear()
                try:
                    while len(self._running) < _MAX_TENANTS and await self._begin_one():
                        pass
                except Unavailable as error:
                    # Those that run go on.
                    _log.info("no batch can be looked for: %s", error)
                try:
                    async with asyncio.timeout(_IDLE_POLL_S):
                        await self._woken.wait()
                except TimeoutError:
                    continue
        finally:
            await cancel_and_wait(*self._running.values())

    async def _begin_one(self) -> bool:
        batch = await self._parts.batches.claim(
            self._worker_id, self._tenants, of_others=len(self._running) >= _MAX_BATCHES
        )
        if batch is None:
            return False
        task = asyncio.create_task(self._run_leased(batch))
        self._running[batch.batch_id] = task
        self._tenants[batch.batch_id] = batch.owner.tenant_id
        task.add_done_callback(lambda _: self._ended(batch.batch_id))
        return True

    def _ended(self, batch_id: str) -> None:
        self._running.pop(batch_id, None)
        self._tenants.pop(batch_id, None)
        self._woken.set()

    async def _run_leased(self, batch: Batch) -> None:
        """Work on a batch for as long as it is ours."""
        work = asyncio.create_task(self._run(batch))
        try:
            held_until_s = time.monotonic() + LEASE_S
            while not work.done():
                await asyncio.wait({work}, timeout=LEASE_S / 10)
                now_s = time.monotonic()
                try:
                    status = await self._parts.batches.renew(batch.batch_id, self._worker_id)
                except Unavailable:
                    if now_s >= held_until_s:
                        raise
                    continue
                held_until_s = now_s + LEASE_S
                if status in ("", "cancelling") and status != batch.status and not work.done():
                    break
            if work.done():
                work.result()
        except HeadraceError as error:
            _log.warning("batch %s waits: %s", batch.batch_id, error)
            await asyncio.sleep(1.0)
        except Exception:  # noqa: BLE001 - one batch must not end the others
            _log.exception("batch %s failed, will be tried again", batch.batch_id)
            await asyncio.sleep(5.0)
        finally:
            await cancel_and_wait(work)
            await asyncio.shield(self._let_go(batch))

    async def _let_go(self, batch: Batch) -> None:
        try:
            await self._parts.batches.release(batch.batch_id, self._worker_id)
        except HeadraceError as error:
            _log.warning("the lease of batch %s ends by itself: %s", batch.batch_id, error)

    async def _run(self, batch: Batch) -> None:
        if batch.status == "validating":
            if not await self._validate(batch):
                return
            status = "in_progress"
        else:
            status = batch.status
        ended = {"cancelling": "cancelled", "finalizing": batch.body.get("ends_as", "completed")}
        why: dict[str, object] = {}
        reason = "The request was not answered."
        if status != "in_progress":
            ending = str(ended[status])
        else:
            try:
                ending = await self._answer_lines(batch)
            except UnknownKey as error:
                ending = "failed"
                reason = error.public_message
                why = _told([LineError("invalid_api_key", reason, None)])
        if status != "finalizing":
            await self._drop_rest(batch, ending, reason)
            why |= {"finalizing_at": self._parts.batches.now_s(), "ends_as": ending}
            if not await self._parts.batches.move(batch.batch_id, (status,), "finalizing", **why):
                return
        await self._finalize(batch, ending)

    # --- validating -------------------------------------------------------------------------

    async def _validate(self, batch: Batch) -> bool:
        """Read the input file; return whether the batch may begin."""
        errors: list[LineError] = []
        waiting: list[InputLine] = []
        seen: set[str] = set()
        num_lines = 0
        try:
            async for line_no, raw in _numbered(
                self._parts.files.read(batch.owner, batch.body["input_file_id"])
            ):
                try:
                    line = read_line(raw, line_no, batch.body["endpoint"], seen)
                except LineError as error:
                    errors.append(error)
                    if len(errors) >= MAX_ERRORS:
                        break
                    continue
                seen.add(line.custom_id)
                num_lines += 1
                waiting.append(line)
                if len(waiting) >= _PAGE_LINES:
                    await self._parts.batches.add_lines(batch.batch_id, waiting)
                    waiting = []
            if not num_lines and not errors:
                raise LineError("empty_file", "The input file holds no requests.", None)
        except LineError as error:
            errors.append(error)
        if not await self._has_input(batch):
            message = "The input file was deleted before it was read."
            errors = [LineError("input_file_deleted", message, None)]
        now_s = self._parts.batches.now_s()
        if errors:
            await self._parts.batches.move(
                batch.batch_id, ("validating",), "failed", **_told(errors), failed_at=now_s
            )
            return False
        await self._parts.batches.add_lines(batch.batch_id, waiting)
        return await self._parts.batches.move(
            batch.batch_id, ("validating",), "in_progress", in_progress_at=now_s
        )

    async def _has_input(self, batch: Batch) -> bool:
        """Whether the input file is there, which asked after reading says that all was read."""
        try:
            await self._parts.files.find(batch.owner, batch.body["input_file_id"])
        except NotFound:
            return False
        return True

    # --- in progress ------------------------------------------------------------------------

    async def _answer_lines(self, batch: Batch) -> str:
        """Answer all lines; return how the batch ends."""
        after_no = 0
        tasks: set[asyncio.Task[None]] = set()
        room = asyncio.Semaphore(self._parts.concurrency)
        try:
            while lines := await self._parts.batches.pending(batch.batch_id, after_no, _PAGE_LINES):
                after_no = lines[-1].line_no
                for line in lines:
                    await room.acquire()
                    if self._is_late(batch):
                        return "expired"
                    task = asyncio.create_task(self._answer(batch, line))
                    task.add_done_callback(lambda _: room.release())
                    tasks.add(task)
                    tasks -= {it for it in tasks if it.done() and it.result() is None}
            await asyncio.gather(*tasks)
        finally:
            await cancel_and_wait(*tasks)
        return "expired" if self._is_late(batch) else "completed"

    async def _wait_for_gap(self, batch: Batch) -> None:
        while self._parts.is_busy() and not self._is_late(batch):  # noqa: ASYNC110 - told by polls
            await asyncio.sleep(_GAP_POLL_S)

    async def _answer(self, batch: Batch, line: PendingLine) -> None:
        """Bring a line to its end; cancelled, still keep an answer that is in the books already."""
        work = asyncio.create_task(self._try_on(batch, line))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            if self._parts.caller.is_answered(line.request_id):
                await asyncio.wait({work}, timeout=_KEEP_S)
            raise
        finally:
            await cancel_and_wait(work)

    async def _try_on(self, batch: Batch, line: PendingLine) -> None:
        """Try a line until it has a result, or the batch's time is over."""
        num_tries = 0
        while not self._is_late(batch):
            try:
                principal = await self._parts.auth.resolve(batch.key)
            except Unavailable:
                await asyncio.sleep(_KEY_POLL_S)
                continue
            outcome = await self._try(batch, principal, line)
            if outcome is None:
                return
            if outcome.retry_after_s is None:
                await self._keep_result(batch, line, outcome)
                return
            num_tries += 1
            await asyncio.sleep(min(_MAX_RETRY_S, outcome.retry_after_s * min(2**num_tries, 32)))

    async def _try(
        self, batch: Batch, principal: Principal, line: PendingLine
    ) -> LineOutcome | None:
        """Try a line once a place and a gap are there; None = the batch's time is over."""
        async with self._places.place(batch.owner.tenant_id):
            await self._wait_for_gap(batch)
            if self._is_late(batch):
                return None
            endpoint = batch.body["endpoint"]
            return await self._parts.caller.call(principal, endpoint, line.request_id, line.body)

    async def _keep_result(self, batch: Batch, line: PendingLine, outcome: LineOutcome) -> None:
        result = result_line(
            _line_id(line.request_id),
            line.custom_id,
            line.request_id,
            outcome.status,
            outcome.body,
        )
        end = partial(self._parts.batches.end_line, batch.batch_id, line.line_no, result)
        await once_there(partial(end, succeeded=outcome.status == 200))
        self._parts.caller.close_line(line.request_id)

    def _is_late(self, batch: Batch) -> bool:
        return self._parts.batches.now_s() >= batch.deadline_s

    # --- the end ----------------------------------------------------------------------------

    async def _drop_rest(self, batch: Batch, ending: str, reason: str) -> None:
        """Give lines that will never be answered a result that says so."""
        message = {
            "expired": "The batch's time was over before this request could be answered.",
            "cancelled": "The batch was cancelled before this request was answered.",
        }.get(ending, reason)
        while lines := await self._parts.batches.pending(batch.batch_id, 0, _PAGE_LINES):
            results = [
                (
                    line.line_no,
                    dropped_line(
                        _line_id(line.request_id), line.custom_id, f"batch_{ending}", message
                    ),
                )
                for line in lines
            ]
            await self._parts.batches.drop_lines(batch.batch_id, results)
            for line in lines:
                self._parts.caller.close_line(line.request_id)

    async def _finalize(self, batch: Batch, ending: str) -> None:
        """Tell how a batch ended, by files or by counts; may be repeated."""
        is_message_batch = batch.body["endpoint"] == MESSAGES
        told = await (self._counted(batch) if is_message_batch else self._filed(batch))
        told[f"{ending}_at"] = self._parts.batches.now_s()
        await self._parts.batches.move(batch.batch_id, ("finalizing",), ending, **told)

    async def _counted(self, batch: Batch) -> dict[str, object]:
        """Count how the requests of a message batch ended: its results are read as they are."""
        counts = OutcomeCounts()
        async for lines in self._parts.batches.each_result(batch.batch_id):
            for line in lines:
                counts.add(line)
        return {"outcomes": counts.as_json()}

    async def _filed(self, batch: Batch) -> dict[str, object]:
        """Write the files of results and add up what they used."""
        serial = batch.batch_id.removeprefix("batch_")
        usage = LinesUsage()
        told: dict[str, object] = {}
        for succeeded, kind in ((True, "output"), (False, "error")):
            if await self._parts.batches.results(batch.batch_id, 0, 1, succeeded=succeeded):
                file_id = f"file-{serial}{kind[0]}"
                name = f"{batch.batch_id}_{kind}.jsonl"
                pieces = self._result_pieces(batch.batch_id, usage if succeeded else None)
                ttl_s = batch.body.get("output_ttl_s")
                await self._parts.files.save(batch.owner, file_id, name, RESULTS, pieces, ttl_s)
                told[f"{kind}_file_id"] = file_id
        return told | {"usage": usage.as_json()}

    async def _result_pieces(self, batch_id: str, usage: LinesUsage | None) -> AsyncIterator[bytes]:
        """Yield the answered lines, counted in *usage*; without one, those that failed."""
        is_good = usage is not None
        async for lines in self._parts.batches.each_result(batch_id, succeeded=is_good):
            if usage is not None:
                for line in lines:
                    usage.add(line)
            yield b"".join(line + b"\n" for line in lines)


async def _numbered(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers from 1.

    Raises:
        LineError: one is too long, or there are too many.
    """
    rest, line_no, num_lines = b"", 0, 0
    async for piece in _with_end(pieces):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line_no += 1
            _check_length(line, line_no)
            if line_no == 1:
                # Editors of some systems begin a file so.
                line = line.removeprefix(BOM_UTF8)
            if line.strip():
                num_lines += 1
                if num_lines > MAX_LINES:
                    message = f"A batch may hold at most {MAX_LINES} requests."
                    raise LineError("too_many_requests", message, line_no)
                yield line_no, line
        _check_length(rest, line_no + 1)


def _check_length(line: bytes, line_no: int) -> None:
    if len(line) > MAX_LINE_BYTES:
        message = f"A line may have at most {MAX_LINE_BYTES} bytes."
        raise LineError("line_too_long", message, line_no)


async def _with_end(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for piece in pieces:
        yield piece
    yield b"\n"


def _told(errors: list[LineError]) -> dict[str, object]:
    return {"errors": {"object": "list", "data": [error.as_json() for error in errors]}}


def _line_id(request_id: str) -> str:
    return "batch_req_" + request_id.removeprefix("req_")
