"""Before any kernel is imported: without a GPU, Triton kernels run in the interpreter."""

import os

import torch

if not torch.cuda.is_available():
    # Read when `@triton.jit` decorates, so it must be set before a kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# Triton 3.9 warns at each launch on a GPU until this is set; 1 is what it does by default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
