"""Before anything imports Triton: without a GPU its kernels run in Triton's interpreter, on CPU tensors."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
