"""Code for GPUs: kernels that are compiled at first use.

Nothing here has run on a GPU yet. No module imports torch, and nothing links with CUDA.
"""
