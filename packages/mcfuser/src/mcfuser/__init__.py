"""Rows of a matrix, each scaled by its weight.

scale_rows   the operation, on torch or in a Triton kernel
reference    what it means
"""

from mcfuser.scale_rows import backends, scale_rows

__all__ = ["backends", "scale_rows"]
__version__ = "0.1.0.dev0"
