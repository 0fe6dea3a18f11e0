"""One decode step of one layer on a GPU, beside the time that reading its occupied state takes.

    python -m eval.benchmarks.decode [--tokens 16383] [--batch 1 16]

H = 32, N = 128, P = 64, one key group, chunks of 64, bfloat16 tail and float32 levels. Median over replays of a CUDA graph;
between two replays other memory is written, so that no state is read from the L2 cache. Bytes: the occupied levels and the
valid tail, once. The target is three times their time at `BANDWIDTH` (measured on an H200) plus 5 us. The step that also
merges a chunk, one in 64, is timed on its own.
"""

import argparse
import sys

import torch

from eval.records import environment
from modeling_loglinear.attention_loglinear import LogLinearState, advanced, empty_state, loglinear_attention_step

BANDWIDTH = 4.3e12  # bytes per second
H, N, P, L, C = 32, 128, 64, 15, 64


def make_state(B, tokens):
    """A state after `tokens` tokens, of random numbers."""
    state = empty_state(B, 1, H, N, P, L, C, torch.bfloat16, "cuda")
    for x in state[:4]:
        x.normal_()
    state.log_decay.abs_().mul_(-0.01)
    lengths, merged = advanced(state.lengths, state.merged_chunks, tokens, C)
    return LogLinearState(*state[:4], merged, lengths)


def occupied_bytes(state, tokens):
    """Bytes of the levels and tail positions that a step reads."""
    B, K = state.levels.shape[:2]
    merged = int(state.merged_chunks[0])
    levels = sum((merged >> l if l == K - 1 else merged >> l & 1) > 0 for l in range(K))
    tail = tokens - merged * C
    return B * (levels * H * N * P * 4 + tail * (N * 2 + H * P * 2 + H * 4))


def microseconds(state):
    """Median time of a step's graph with a cold L2 cache."""
    from triton.testing import do_bench

    B = state.lengths.shape[0]
    token = [
        torch.randn(B, 1, N, device="cuda", dtype=torch.bfloat16),
        torch.randn(B, 1, N, device="cuda", dtype=torch.bfloat16),
        torch.randn(B, H, P, device="cuda", dtype=torch.bfloat16),
        -torch.rand(B, H, device="cuda"),
        torch.rand(B, H, L, device="cuda", dtype=torch.bfloat16),
    ]
    for _ in range(2):
        loglinear_attention_step(*token, state, backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loglinear_attention_step(*token, state, backend="triton")
    return do_bench(graph.replay, return_mode="median") * 1e3  # do_bench clears the cache before every replay


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16383)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    print("#", " ".join(sys.argv), environment("cuda"))
    for B in args.batch:
        for name, tokens in (("plain", args.tokens), ("merging", (args.tokens + C) // C * C)):
            state = make_state(B, tokens)
            size = occupied_bytes(state, tokens)
            floor = size / BANDWIDTH * 1e6
            print(
                f"B={B} tokens={tokens} step={name} us={microseconds(state):.1f} state_MB={size / 1e6:.2f} "
                f"floor_us={floor:.1f} target_us={3 * floor + 5:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
