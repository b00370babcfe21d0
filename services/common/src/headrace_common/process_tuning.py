"""What the interpreter is told in a process that requests wait for."""

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

    Call it when everything is imported.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    spare_heap()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


def spare_heap() -> None:
    """Let the collector never look again through what lives now.

    Modules, classes, tokenizers and models are most of a heap and stay; looking through them stops
    all threads, and so all streams, for a third of a second in a worker.
    """
    gc.collect()
    gc.freeze()
