"""Runs the Triton kernels in the interpreter, which must be chosen before they are imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
