"""Before any kernel is imported: without a GPU, Triton kernels run in the interpreter."""

import os

import torch

if not torch.cuda.is_available():
    # Read when `@triton.jit` decorates, so it must be set before a kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"
