"""How the C kernels round what a quantised matrix is multiplied with."""

from __future__ import annotations

from enum import IntEnum


class Rounding(IntEnum):
    """Each group of 32 activations is scaled so that its largest becomes the type's largest.

    The numbers are those of kernels.h. Matrices of floats are always multiplied in float32, and
    8-bit weights with int16 where int8 is chosen.
    """

    FLOAT32 = 0
    INT16 = 1
    INT8 = 2
