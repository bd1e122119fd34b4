"""Before any kernel is imported: without a GPU, Triton kernels run in the interpreter."""

import os
import signal

import torch

# Ignored in what a shell starts in the background, and in all that this starts: tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Read when `@triton.jit` decorates, so it must be set before a kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# Triton 3.9 warns at each launch on a GPU until this is set; 1 is what it does by default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
