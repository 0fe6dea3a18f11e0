"""Compiles for an H100 or H200 every kernel that the operator and a model launch, on a machine without a GPU; runs none.

    python tests/compile_for_hopper.py float32 64 64

takes a dtype, the key size N and the value size P, and prints as JSON, for each kernel, the most shared memory in bytes that a
program of it takes. Results of the launches do not exist, so whatever computes with them computes with arbitrary numbers.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from modeling_loglinear import (
    LogLinearConfig,
    LogLinearForCausalLM,
    attention_loglinear,
    modeling_loglinear,
    step_loglinear,
    triton_loglinear,
)

shared_memory = {}  # kernel: bytes


class Hopper:
    """What Triton asks a driver for before it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_instead_of_launching():
    compile_or_launch = JITFunction.run

    def run(kernel, *args, grid, warmup, **kwargs):
        compiled = compile_or_launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        shared_memory[kernel.__name__] = max(shared_memory.get(kernel.__name__, 0), compiled.metadata.shared)
        return compiled

    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = run
    # Tensors of the CPU stand for those of a GPU.
    attention_loglinear._use_triton = modeling_loglinear.use_fused = lambda *_: True
    triton_loglinear.early_launch = step_loglinear.early_launch = lambda device: {"EARLY": True, "launch_pdl": True}


def run_operator(dtype, N, P):
    """Forward and backward, of dense rows and of packed sequences that continue a state."""
    B, T, G, H, L = 1, 4096, 1, 2, 13
    query, key, value, weights = (
        torch.zeros(shape, dtype=dtype, requires_grad=True)
        for shape in ((B, T, G, N), (B, T, G, N), (B, T, H, P), (B, T, H, L))
    )
    inputs = query, key, value, torch.zeros(B, T, H, requires_grad=True), weights
    options = {"chunk_size": 64, "return_final_state": True}
    for packing in ({}, {"cu_seqlens": torch.tensor([0, 100, T])}):
        output, state = attention_loglinear.loglinear_attention(*inputs, **packing, **options)
        state = state._replace(levels=state.levels.detach().zero_().requires_grad_())
        if packing:
            output, state = attention_loglinear.loglinear_attention(*inputs, **packing, **options, initial_state=state)
        (output.sum() + state.levels.sum()).backward()


@torch.no_grad()
def run_model(dtype, N, P):
    """A prefill and steps of one row and of several."""
    config = LogLinearConfig(
        vocab_size=50, hidden_size=1024, head_dim=P, num_heads=2048 // P, state_size=N, num_hidden_layers=1,
        mlp_intermediate_size=2816,
    )  # fmt: skip
    model = LogLinearForCausalLM(config).to(dtype).eval()
    for rows in (1, 2):
        ids = torch.ones(rows, 3, dtype=torch.long)
        cache = model(ids, use_cache=True).cache
        model(ids[:, :1], cache=cache)
        step_loglinear.step_through(model.backbone.layers, model.backbone.embeddings(ids[:, :1]), cache.layers)


if __name__ == "__main__":
    compile_instead_of_launching()
    sizes = getattr(torch, sys.argv[1]), *map(int, sys.argv[2:])
    run_operator(*sizes)
    run_model(*sizes)
    print(json.dumps(shared_memory))
