"""Triton kernels of the symmetric heap, one file each."""
