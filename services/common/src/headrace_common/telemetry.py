"""Logs and traces: one set-up call per process, and the two helpers that code uses.

Spans go to an OTLP endpoint, to a JSON-lines file, or nowhere. An exporter that fails never touches
the request path: spans queue in memory and are dropped when the queue is full.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from pathlib import Path
from random import getrandbits
from typing import ClassVar

from opentelemetry import context, propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode
from pydantic import Field

from headrace_common.settings import ServiceSettings, config

_MAX_FILE_BYTES = 64 * 2**20
_SHUTDOWN_S = 2.0
# A proxy until `Telemetry` sets the provider.
_TRACER = trace.get_tracer("headrace")
# Flags at the end of a trace context: not sampled, with or without a random id.
_UNSAMPLED = ("-00", "-02")
_TRACEPARENT = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
# The W3C context of a trace that is not recorded; empty = one that may be; None = there is none.
_TRACE: ContextVar[str | None] = ContextVar("trace", default=None)
_NO_SPAN = nullcontext(INVALID_SPAN)

Attributes = Mapping[str, str | int | float | bool]


class TelemetrySettings(ServiceSettings):
    """Where logs and traces of any service go."""

    prefix: ClassVar[str] = "HEADRACE_TELEMETRY_"
    model_config = config(prefix)

    log_level: str = Field(
        "INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="Least severity that is logged."
    )
    trace_dir: Path | None = Field(
        None, description="Folder for <service>.jsonl span files; unset = none."
    )
    otlp_endpoint: str = Field(
        "", description="OTLP/gRPC collector, e.g. http://127.0.0.1:4317; empty = none."
    )
    sample_ratio: float = Field(
        0.05, ge=0, le=1, description="Share of new traces that is recorded."
    )


class JsonLinesExporter(SpanExporter):
    """Appends one JSON object per span to a file; at 64 MiB the file is moved to `<file>.1`.

    Several processes of one service may write to the same file.
    """

    def __init__(self, path: Path, service: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._service = path, service
        self._file = path.open("a", encoding="utf-8")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write the spans; a full disk loses them and says so by the result."""
        try:
            self._file.write("".join(json.dumps(self._row(span)) + "\n" for span in spans))
            self._file.flush()
            if self._file.tell() > _MAX_FILE_BYTES:
                self._begin_anew()
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin_anew(self) -> None:
        """Move the full file out of the way; if another process has done so, join it."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                self._path.replace(self._path.with_suffix(".jsonl.1"))
        # Where that fails, the old one goes on being written to.
        fresh = self._path.open("a", encoding="utf-8")
        self._file.close()
        self._file = fresh

    def _row(self, span: ReadableSpan) -> dict[str, object]:
        place = span.get_span_context()
        start, end = span.start_time or 0, span.end_time or 0
        return {
            "trace_id": f"{place.trace_id:032x}" if place else "",
            "span_id": f"{place.span_id:016x}" if place else "",
            "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
            "service": self._service,
            "name": span.name,
            "start_unix_us": start // 1000,
            "duration_us": (end - start) // 1000,
            "attributes": dict(span.attributes or {}),
            "error": span.status.description or ""
            if span.status.status_code is StatusCode.ERROR
            else "",
        }


class Telemetry:
    """The process's logging and tracing. Make one, at start, after any fork."""

    def __init__(self, service: str, settings: TelemetrySettings) -> None:
        logging.basicConfig(
            level=settings.log_level,
            stream=sys.stderr,
            format=f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s",
        )
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
        # It has a line for every request.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        is_kept = settings.trace_dir is not None or bool(settings.otlp_endpoint)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            # Spans that go nowhere are not worth their making.
            sampler=_RatioSampler(settings.sample_ratio if is_kept else 0.0),
            shutdown_on_exit=False,
        )
        if settings.trace_dir is not None:
            self._add(JsonLinesExporter(settings.trace_dir / f"{service}.jsonl", service))
        if settings.otlp_endpoint:
            # Imported here: it costs each process a tenth of a second, and few set an endpoint.
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            self._add(OTLPSpanExporter(endpoint=settings.otlp_endpoint, timeout=2))
        trace.set_tracer_provider(self._provider)

    def shutdown(self) -> None:
        """Write out what is queued, for two seconds at most."""
        # On a thread that may be left behind: the library gives each batch its time, however many
        # there are, and a collector that is away would hold up the process's end for a minute.
        leaving = threading.Thread(target=self._provider.shutdown, daemon=True)
        leaving.start()
        leaving.join(_SHUTDOWN_S)

    def _add(self, exporter: SpanExporter) -> None:
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=16_384, schedule_delay_millis=500)
        )


def span(
    name: str,
    *,
    traceparent: str | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes | None = None,
) -> AbstractContextManager[Span]:
    """Run a block inside a span, the current one's child or *traceparent*'s.

    An exception ends the span as failed and goes on up. Inside a trace that is not recorded no
    span is made: only its name is carried on, which costs a fiftieth.
    """
    if traceparent is None or not _TRACEPARENT.fullmatch(traceparent):
        traceparent = None
        current = _TRACE.get()
        if current:
            return _NO_SPAN
        if current is None and (unsampled := _unsampled_root()):
            return _Unrecorded(unsampled)
    elif traceparent.endswith(_UNSAMPLED):
        return _Unrecorded(traceparent)
    return _recorded(name, traceparent, kind, attributes)


def _unsampled_root() -> str:
    """Begin a trace that nobody records; empty = this one is to be recorded, or nobody can say."""
    sampler = getattr(trace.get_tracer_provider(), "sampler", None)
    if not isinstance(sampler, _RatioSampler):
        return ""
    return "" if sampler.takes_next() else sampler.unsampled


class _RatioSampler(ParentBased):
    """Takes a share of new traces; that is decided before a span is made, and once."""

    def __init__(self, ratio: float) -> None:
        super().__init__(ALWAYS_ON)
        self._bound = TraceIdRatioBased.get_bound_for_rate(ratio)
        # The name of all traces that are not recorded: nobody tells them apart.
        self.unsampled = f"00-{getrandbits(128) or 1:032x}-{getrandbits(64) or 1:016x}-00"

    def takes_next(self) -> bool:
        """Whether the trace that begins now is recorded."""
        return getrandbits(64) < self._bound


class _Unrecorded(AbstractContextManager[Span]):
    """Carries on a trace that nobody records: its name, and no span."""

    __slots__ = ("_token", "_traceparent")

    def __init__(self, traceparent: str) -> None:
        self._traceparent = traceparent

    def __enter__(self) -> Span:
        self._token = _TRACE.set(self._traceparent)
        return INVALID_SPAN

    def __exit__(self, *exc_info: object) -> None:
        _leave(self._token)


def _leave(token: Token[str | None]) -> None:
    try:
        _TRACE.reset(token)
    except ValueError:
        # A generator that was closed from another task: that one's context is not ours to change.
        return


@contextmanager
def _recorded(
    name: str, traceparent: str | None, kind: SpanKind, attributes: Attributes | None
) -> Iterator[Span]:
    parent = propagate.extract({"traceparent": traceparent}) if traceparent else None
    token = _TRACE.set("")
    it = _TRACER.start_span(name, context=parent, kind=kind, attributes=attributes)
    shown = trace.set_span_in_context(it)
    attached = context.attach(shown)
    try:
        yield it
    except Exception as error:
        it.record_exception(error)
        it.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
        raise
    finally:
        it.end()
        # As for `_leave`; the library would log an error with a traceback.
        if context.get_current() is shown:
            context.detach(attached)
        _leave(token)


def is_recorded() -> bool:
    """Whether spans made now might be recorded: asked where even an empty block is too much."""
    return not _TRACE.get()


def start_span(name: str, traceparent: str, *, kind: SpanKind = SpanKind.SERVER) -> Span:
    """Start *traceparent*'s child, for work that is not a block of code; the caller ends it."""
    parent = propagate.extract({"traceparent": traceparent})
    return _TRACER.start_span(name, context=parent, kind=kind)


def current_traceparent() -> str:
    """Return the W3C trace context of the current span; empty if there is none."""
    if unrecorded := _TRACE.get():
        return unrecorded
    place = trace.get_current_span().get_span_context()
    if not place.is_valid:
        return ""
    return f"00-{place.trace_id:032x}-{place.span_id:016x}-{place.trace_flags:02x}"


def sampled_traceparent() -> str:
    """Return the W3C trace context if the current span is recorded, else nothing: it costs less."""
    if _TRACE.get() or not trace.get_current_span().get_span_context().trace_flags.sampled:
        return ""
    return current_traceparent()
