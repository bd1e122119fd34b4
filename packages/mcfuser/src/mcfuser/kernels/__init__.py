"""Triton kernels, one file each; they import triton only."""
