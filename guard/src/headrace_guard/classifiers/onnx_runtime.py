"""onnxruntime without its telemetry.

From its import on it keeps a device id and an event file in the home folder and reports to
Microsoft, unless this variable is there when the library is loaded; `disable_telemetry_events`
comes too late for the first reports. So everything here imports it from this module.
"""

from __future__ import annotations

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # noqa: TID251 - for the library, not a setting of ours

import onnxruntime

__all__ = ["onnxruntime"]
