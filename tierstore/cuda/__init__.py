"""Rows in GPU memory: kernels that are compiled at first use, streams, and the device that owns the rows.

No module imports torch, and nothing links with CUDA: the driver and NVRTC are opened when they are needed.
"""
