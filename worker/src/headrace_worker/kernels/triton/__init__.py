"""Triton kernels, one operation a file; each has its plain-torch twin in `kernels.reference`.

They run compiled on a CUDA device, and with ``TRITON_INTERPRET=1`` in Triton's interpreter on a
CPU, which is how the tests compare them with their twins. `kernels.triton.ahead_of_time` compiles
them without a device.
"""
