"""One decode step of one layer on a GPU, beside the time that reading its occupied state takes.

    python -m eval.benchmarks.decode [--tokens 16383] [--batch 1 16]

H = 32, N = 128, P = 64, one key group, chunks of 64, bfloat16 tail and float32 levels. As in a model, one CUDA graph steps
through many layers, each with its own state; together these are larger than the L2 cache, so every state is read from memory.
Median over replays, per layer. Bytes: the occupied levels and the valid tail, once. The target is three times their time at
`BANDWIDTH` (measured on an H200) plus 5 us. The step that also merges a chunk, one in 64, is timed on its own, and so is a
graph of one step, which includes the launch of the graph (`alone_us`).
"""

import argparse
import sys

import torch

from eval.records import environment
from modeling_loglinear.attention_loglinear import LogLinearState, advanced, empty_state, loglinear_attention_step

BANDWIDTH = 4.3e12  # bytes per second
TOTAL_BYTES = 3e8  # of the occupied parts of all states: several times the L2 cache
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


def microseconds(states):
    """Median time per step of a graph that steps once on every state."""
    from triton.testing import do_bench

    B = states[0].lengths.shape[0]
    token = [
        torch.randn(B, 1, N, device="cuda", dtype=torch.bfloat16),
        torch.randn(B, 1, N, device="cuda", dtype=torch.bfloat16),
        torch.randn(B, H, P, device="cuda", dtype=torch.bfloat16),
        -torch.rand(B, H, device="cuda"),
        torch.rand(B, H, L, device="cuda", dtype=torch.bfloat16),
    ]
    for _ in range(2):
        loglinear_attention_step(*token, states[0], backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for state in states:
            loglinear_attention_step(*token, state, backend="triton")
    return do_bench(graph.replay, return_mode="median") * 1e3 / len(states)  # do_bench clears the cache before every replay


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
            states = [make_state(B, tokens)]
            size = occupied_bytes(states[0], tokens)
            states += [make_state(B, tokens) for _ in range(int(TOTAL_BYTES / size))]
            floor = size / BANDWIDTH * 1e6
            print(
                f"B={B} tokens={tokens} step={name} layers={len(states)} us={microseconds(states):.1f} "
                f"alone_us={microseconds(states[:1]):.1f} state_MB={size / 1e6:.2f} floor_us={floor:.1f} "
                f"target_us={3 * floor + 5:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
