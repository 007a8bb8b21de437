"""Code for GPUs: kernels that are compiled at first use, and the calls of the driver.

Nothing here has run on a GPU yet. No module imports torch, and nothing links with CUDA: the driver and NVRTC
are opened when they are needed.
"""
