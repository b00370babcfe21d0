"""What the interpreter is told once, at the start of a process that requests wait for."""

from __future__ import annotations

import gc
import sys

# A gateway's outbox needs the interpreter on its thread some times for each commit, and answers
# wait for it. By default a busy event loop would keep it for 5 ms each time.
_SWITCH_INTERVAL_S = 0.0005
# Requests leave few cycles; the youngest generation is looked through this seldom. Objects.
_YOUNG_OBJECTS = 10_000


def tune_process() -> None:
    """Hand the interpreter over sooner, and keep the collector off what lives as long as we do.

    Call it when everything is imported: modules and classes, most of the heap, are never looked
    through again, so that a full collection does not stop all streams for a tenth of a second.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)
