"""The operator on one GPU beside FLA's log-linear kernel, a linear scan and flash attention, on the same inputs in one run.

    python -m eval.benchmarks.operator [--lengths 2048 4096 16384 65536] [--heads 32] [--out FOLDER] [--kernels]

bfloat16, one row, N = 128, P = 64, one key group. Times are medians over replays of a CUDA graph (forward; forward and
backward), so launch gaps of small shapes do not count; what cannot be captured is timed by events. FLA's two kernels run when
`flash-linear-attention` is installed. Floors: bytes are every input and output once over `BANDWIDTH`, flops those of this
operator's tree over `MATRIX_RATE`, both measured on an H200. With --out: operator.csv and operator.png there. With --kernels:
instead, each kernel's time and what it achieves of the two rates, counting every byte that must move and every product once.
"""

import argparse
import csv
import io
import math
import pathlib
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from eval.records import environment, write
from modeling_loglinear import loglinear_attention

BANDWIDTH, MATRIX_RATE = 4.3e12, 7.9e14  # bytes and bf16 flops per second
N, P, CHUNK = 128, 64, 64


def make_inputs(T, H):
    L = (T - 1).bit_length() + 1
    kwargs = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = [
        torch.randn(1, T, 1, N, **kwargs) / N**0.5,
        torch.randn(1, T, 1, N, **kwargs),
        torch.randn(1, T, H, P, **kwargs),
        -F.softplus(torch.randn(1, T, H, device="cuda") - 4),
        torch.rand(1, T, H, L, **kwargs) + 0.5,
    ]
    return [x.requires_grad_() for x in inputs]


def rivals(inputs):
    """name -> (function, its leaves), for whatever is installed."""
    q, k, v, g, weights = inputs
    T, H = v.shape[1:3]
    found = {"ours": (lambda: loglinear_attention(q, k, v, g, weights)[0], inputs)}
    try:
        from fla.ops.log_linear_attn import chunk_log_linear_attn
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        print("flash-linear-attention is not installed: its two kernels are left out", file=sys.stderr)
    else:
        found["fla log-linear"] = (lambda: chunk_log_linear_attn(q, k, v, g, weights)[0], inputs)
        qh, kh = (x.detach().expand(1, T, H, N).contiguous().requires_grad_() for x in (q, k))
        found["linear scan"] = (lambda: chunk_simple_gla(qh, kh, v, g)[0], [qh, kh, v, g])
    shape = 1, H * P // 128, T, 128
    heads = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def flash():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*heads, is_causal=True)

    found["flash attention"] = (flash, heads)
    return found


def milliseconds(fn):
    """Median over replays of `fn` as a CUDA graph; by events around plain calls where it cannot be captured."""
    from triton.testing import do_bench

    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
    except RuntimeError as error:
        print(f"not captured, timed by events: {error}".splitlines()[0], file=sys.stderr)
        torch.cuda.synchronize()
        return do_bench(fn, return_mode="median")
    return do_bench(graph.replay, return_mode="median")


def measure(name, fn, leaves):
    """(forward ms, forward and backward ms, peak MiB of the latter above what stood before); nan for a backward pass that a
    rival refuses, as FLA's linear scan does with some versions of Triton."""
    with torch.no_grad():
        forward = milliseconds(fn)
    d_output = torch.randn_like(fn().detach())

    def step():
        torch.autograd.grad(fn(), leaves, d_output)

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        step()
    except RuntimeError as error:
        if name == "ours":
            raise
        print(f"{name}: no backward pass: {error}".splitlines()[0], file=sys.stderr)
        return forward, math.nan, math.nan
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return forward, milliseconds(step), peak


def floors(inputs):
    """(ms to move every input and output once, ms of the tree's forward matrix products)."""
    T, H = inputs[2].shape[1:3]
    moved = sum(x.numel() * x.element_size() for x in inputs) + inputs[2].numel() * 2
    chunks = -(-T // CHUNK)
    reads = sum(chunk.bit_count() for chunk in range(chunks)) / chunks  # nodes that a chunk reads
    flops = T * H * (2 * CHUNK * P + 2 * N * P * (1 + reads)) + T * 2 * CHUNK * N
    return moved / BANDWIDTH * 1e3, flops / MATRIX_RATE * 1e3


def kernel_work(T, H, L):
    """kernel -> (bytes that it has to move, each once; flops of its matrix products), forward and backward."""
    x, chunks = T * H, -(-T // CHUNK)
    node = H * N * P * 2
    bits = sum(chunk.bit_count() for chunk in range(chunks)) * CHUNK * H  # (token, node) pairs of the walks, over the heads
    keys, values, weights, scalars = T * N * 2, x * P * 2, x * L * 2, x * 4
    scores = T * 2 * CHUNK * N  # one product for all heads of the group
    merged = sum((chunks >> level) + (chunks >> level + 1) for level in range(2, chunks.bit_length() - 1, 3))
    return {
        "_chunk_decays": (3 * scalars, 0),
        "_chunk_states": (keys + values + scalars + chunks * node, 2 * x * N * P),
        "_merge": (merged * node, 0),
        "_output": (2 * keys + 2 * values + weights + scalars + chunks * node, scores + x * 2 * CHUNK * P + bits * 2 * N * P),
        "_query_gradient": (
            3 * keys + 2 * values + 2 * weights + 2 * scalars + chunks * node,
            scores + x * 2 * CHUNK * (P + N) + bits * 4 * N * P,
        ),
        "_node_gradient": (keys + values + weights + scalars + chunks * node, bits * 2 * N * P),
        "_split": (3 * chunks * node, 0),
        "_key_gradient": (
            3 * keys + 3 * values + weights + 3 * scalars + chunks * node,
            scores + x * (4 * N * P + 2 * CHUNK * (2 * P + N)),
        ),
    }


def print_kernels(T, H):
    """A line per kernel of a forward and backward pass: what it takes, and its parts of the two rates."""
    from torch.profiler import ProfilerActivity, profile

    inputs = make_inputs(T, H)
    L = inputs[4].shape[-1]
    d_output = torch.randn_like(inputs[2])

    def step():
        torch.autograd.grad(loglinear_attention(*inputs)[0], inputs, d_output)

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    taken = {event.key: event.self_device_time_total / 5 * 1e-6 for event in profiler.key_averages()}  # seconds per step
    for name, (moved, flops) in kernel_work(T, H, L).items():
        # The backward pass builds the tree once more.
        passes = 2 if name in ("_chunk_decays", "_chunk_states", "_merge") else 1
        seconds = taken[name] / passes
        print(
            f"T={T} H={H} kernel={name} us={seconds * 1e6:.1f} bandwidth={moved / seconds / BANDWIDTH:.0%} "
            f"matrix_rate={flops / seconds / MATRIX_RATE:.0%}",
            flush=True,
        )


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharex=True)
    for axis, column in zip(axes, ("forward ms", "forward+backward ms")):
        for name in dict.fromkeys(row["operator"] for row in rows):
            mine = [row for row in rows if row["operator"] == name]
            axis.loglog([row["T"] for row in mine], [row[column] for row in mine], marker="o", label=name)
        axis.set(xlabel="tokens T", ylabel=column)
        axis.grid(True, which="both", alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(image.getvalue())
    temporary.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 16384, 65536])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    print("#", " ".join(sys.argv), environment("cuda"))
    if args.kernels:
        for T in args.lengths:
            print_kernels(T, args.heads)
        return
    rows = []
    for T in args.lengths:
        inputs = make_inputs(T, args.heads)
        byte_floor, flop_floor = floors(inputs)
        for name, (fn, leaves) in rivals(inputs).items():
            forward, both, peak = measure(name, fn, leaves)
            rows.append(
                {
                    "operator": name,
                    "T": T,
                    "H": args.heads,
                    "forward ms": round(forward, 4),
                    "forward+backward ms": round(both, 4),
                    "peak MiB": round(peak, 0),
                    "byte floor ms": round(byte_floor, 4),
                    "flop floor ms": round(flop_floor, 4),
                }
            )
            print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if args.out:
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        writer.writerows(rows)
        write(args.out / "operator.csv", text.getvalue())
        plot(rows, args.out / "operator.png")


if __name__ == "__main__":
    main()
