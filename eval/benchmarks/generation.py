"""`generate()` against context length and batch: this model beside Mamba-2, a Llama and FLA's log-linear Mamba-2, in one run.

    python -m eval.benchmarks.generation [--models ours llama] [--contexts 2048 16000] [--batches 1 16] [--out FOLDER]
    python -m eval.benchmarks.generation --long [--tokens 1000000] [--out FOLDER]
    python -m eval.benchmarks.generation --quick [--long]          the same on a CPU, tiny: shows that it runs

24 layers of width 1024, random weights and tokens, bfloat16. `ours` has the gated MLP of FLA's model (`fla`, if
flash-linear-attention is installed), `ours_mixer_only` is the block of `mamba2`. Mode "default" is `generate()` as it is,
"static" is `cache_implementation="static"`: on a GPU ours replays a recorded step, the library compiles the others. Times are
medians: prefill is `generate()` of one token, a token costs (time of 1 + n tokens - time of one) / n. Every result is a line
of JSON; a table follows.

`--long` reads a million tokens in pieces with a small model: bytes of the cache and time of every piece, time per token after
4,096 tokens and at the end, and whether the operator still recalls the first token (compared with the formula in float64).
"""

import argparse
import copy
import json
import os
import pathlib
import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from eval import plots
from eval.records import environment, write
from modeling_loglinear import FenwickCache, LogLinearConfig, LogLinearForCausalLM, loglinear_attention

SIZES = dict(
    hidden_size=1024, num_heads=32, head_dim=64, state_size=128, n_groups=1, num_hidden_layers=24, vocab_size=50280,
    eos_token_id=None, pad_token_id=0,
)  # fmt: skip
QUICK_SIZES = SIZES | dict(hidden_size=64, num_heads=8, head_dim=16, state_size=16, num_hidden_layers=2, vocab_size=512)
SHORT = 4096  # context that the long one is compared with


# ------------------------------------------------------------------------------------------------------------- models


def make_ours(sizes, mlp=True):
    width = sizes["hidden_size"] * 11 // 4 if mlp else None
    return LogLinearForCausalLM(LogLinearConfig(**sizes, mlp_intermediate_size=width))


def make_fla(sizes):
    os.environ.setdefault("FLA_CONV_BACKEND", "triton")
    from fla.models import LogLinearMamba2Config, LogLinearMamba2ForCausalLM

    return LogLinearMamba2ForCausalLM(LogLinearMamba2Config(**sizes, expand=2))


def make_llama(sizes):
    width = sizes["hidden_size"]
    heads = max(1, width // 128)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=heads, num_key_value_heads=heads, vocab_size=sizes["vocab_size"],
        max_position_embeddings=1 << 17, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {
    "ours": make_ours,
    "ours_mixer_only": lambda sizes: make_ours(sizes, mlp=False),
    "fla": make_fla,
    "mamba2": lambda sizes: Mamba2ForCausalLM(Mamba2Config(**sizes, chunk_size=256)),
    "llama": make_llama,
}


def make_model(name, args):
    torch.manual_seed(0)
    with torch.device(args.device):
        return MODELS[name](args.sizes).to(args.dtype).eval()


# ------------------------------------------------------------------------------------------------------------- measuring


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(fn, device, runs, warmup=1):
    """Median time of `fn`."""
    taken = []
    for run in range(warmup + runs):
        synchronize(device)
        start = time.perf_counter()
        fn()
        synchronize(device)
        if run >= warmup:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def measure(model, batch, context, mode, args):
    """Prefill and per-token time and peak memory of one model, batch and context."""
    ids = torch.randint(5, args.sizes["vocab_size"], (batch, context), device=args.device)
    kwargs = {"cache_implementation": "static"} if mode == "static" else {}

    def generate(tokens):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, **kwargs,
        )  # fmt: skip

    generate(4)  # compiles
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    one, many = (seconds(lambda: generate(n), args.device, args.runs) for n in (1, 1 + args.new_tokens))  # noqa: B023
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else None
    return {
        "prefill_ms": round(one * 1e3, 2),
        "ms_per_token": round((many - one) / args.new_tokens * 1e3, 3),
        "peak_GiB": None if peak is None else round(peak, 2),
    }


def compare(args):
    """All models, batches, contexts and modes: a list of rows, each printed when it is there."""
    rows = []
    for name in args.models:
        try:
            model = make_model(name, args)
        except ImportError as error:
            print(f"# {name} is left out: {error}", file=sys.stderr)
            continue
        for mode in ("default", "static"):
            if name == "fla" and mode == "static":
                continue  # its cache has no static form
            for batch in args.batches:
                for context in args.contexts:
                    row = {"model": name, "mode": mode, "batch": batch, "context": context}
                    try:
                        row |= measure(model, batch, context, mode, args)
                    except Exception as error:  # the other models go on; `main` ends with status 1
                        row["error"] = f"{type(error).__name__}: {str(error)[:160]}"
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    if args.device == "cuda":
                        torch.cuda.empty_cache()
        torch.compiler.reset()
        del model
    return rows


# ------------------------------------------------------------------------------------------------------------- a long text


def long_text(args):
    """Bytes and times while a small model reads `args.tokens` tokens, and the operator's recall of the first one."""
    torch.manual_seed(0)
    sizes = QUICK_SIZES if args.quick else SIZES | dict(hidden_size=512, num_heads=16, num_hidden_layers=8)
    levels_for = SHORT if args.quick else 16384
    with torch.device(args.device):
        model = LogLinearForCausalLM(LogLinearConfig(**sizes, max_position_embeddings=levels_for)).to(args.dtype).eval()
    cache, rows, seen = FenwickCache(model.config), [], 0
    with torch.no_grad():
        while seen < args.tokens:
            size = min(SHORT if seen < SHORT else args.piece, args.tokens - seen)
            ids = torch.randint(5, sizes["vocab_size"], (1, size), device=args.device)
            taken = seconds(lambda: model(ids, past_key_values=cache, logits_to_keep=1), args.device, 1, warmup=0)  # noqa: B023
            seen += size
            row = {"what": "piece", "seen": seen, "ms": round(taken * 1e3, 2), "cache_bytes": cache.nbytes()}
            if seen in (SHORT, args.tokens):
                row |= {"what": "decode", **decode_times(model, cache, args)}
            rows.append(row)
            print(json.dumps(row), flush=True)
        first, last = (row for row in rows if row["what"] == "decode")
        summary = {
            "what": "long", "tokens": seen, "cache_bytes_constant": len({row["cache_bytes"] for row in rows}) == 1,
            **{f"{mode}_ratio": round(last[mode] / first[mode], 3) for mode in first if mode.endswith("ms_per_token")},
            **recall(args),
        }  # fmt: skip
    print(json.dumps(summary), flush=True)
    return [*rows, summary]


def decode_times(model, cache, args):
    """Time of a step on a copy of the cache: a bare forward pass and, on a GPU, replayed as `generate()` does it."""
    token = torch.full((1, 1), 7, device=args.device)

    def milliseconds():
        mine = copy.deepcopy(cache)
        step = lambda: model(token, past_key_values=mine, logits_to_keep=1)  # noqa: E731
        return round(seconds(step, args.device, args.new_tokens, warmup=5) * 1e3, 4)

    times = {"eager_ms_per_token": milliseconds()}
    if args.device == "cuda":
        with model.replaying():
            times["replayed_ms_per_token"] = milliseconds()
    return times


def recall(args):
    """Reads `args.tokens` keys with the operator alone, in pieces. Only the first key has a first component, so a query of
    that component must get the first value back, times its weight and decay; other queries are compared with the formula."""
    T, H, N, P, L = args.tokens, 2, 64, 64, 15
    generator = torch.Generator(args.device).manual_seed(0)

    def random(*shape, scale=1.0):
        return torch.randn(shape, generator=generator, device=args.device, dtype=torch.float32) * scale

    k, v = random(1, T, 1, N, scale=N**-0.5), random(1, T, H, P)
    k[..., 0] = 0
    k[:, 0] = torch.eye(N, device=args.device)[0]
    q = random(1, T, 1, N)
    sampled = torch.linspace(T // 3, T - 1, 9, device=args.device).long()
    q[:, sampled[::2]] = torch.eye(N, device=args.device)[0]
    g = -random(1, T, H).abs() * 2e-6
    weights = random(1, T, H, L).abs()
    state, outputs = None, []
    for start in range(0, T, args.piece):
        tokens = [x[:, start : start + args.piece] for x in (q, k, v, g, weights)]
        output, state = loglinear_attention(*tokens, initial_state=state, return_final_state=True)
        outputs.append(output)
    found = torch.cat(outputs, 1)[0, sampled].double()
    errors = [(found[n] - formula(i, q, k, v, g, weights)).norm() / found[n].norm() for n, i in enumerate(sampled.tolist())]
    errors = torch.stack(errors).tolist()
    return {"first_token_recall_error": max(errors[::2]), "sampled_query_error": max(errors[1::2])}


def formula(i, q, k, v, g, weights):
    """o_i of the definition in float64, [H, P], for one row and one group."""
    k, v, g = (x[0, : i + 1].double() for x in (k, v, g))
    j = torch.arange(i + 1, device=k.device)
    level = torch.frexp((j ^ i).double()).exponent.long().clamp(max=weights.shape[-1] - 1)
    decay = (g.sum(0) - g.cumsum(0)).exp()  # [i + 1, H]
    gate = weights[0, i].double()[:, level].mT * decay * (k[:, 0] @ q[0, i, 0].double())[:, None]
    return torch.einsum("jh,jhp->hp", gate, v)


# ------------------------------------------------------------------------------------------------------------- output


def table(rows):
    """Markdown, one line per row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(key, "")) for key in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def plot(rows, path):
    """Prefill time, time per token and peak memory against the context: a colour per model, dashed where static, a marker per
    batch."""
    rows = [row for row in rows if "error" not in row]
    columns = [name for name in ("prefill_ms", "ms_per_token", "peak_GiB") if any(row[name] for row in rows)]
    figure, axes = plots.pyplot().subplots(1, len(columns), figsize=(5 * len(columns), 4), layout="constrained", squeeze=False)
    axes = axes[0]
    models, batches = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "batch"))
    for axis, column in zip(axes, columns):
        for model, mode, batch in dict.fromkeys((row["model"], row["mode"], row["batch"]) for row in rows):
            line = [row for row in rows if (row["model"], row["mode"], row["batch"]) == (model, mode, batch)]
            points = [(row["context"], row[column] or float("nan")) for row in line]
            style = {"color": f"C{models.index(model)}", "marker": "osD^v*"[batches.index(batch) % 6]}
            label = f"{model}, {mode}, batch {batch}"
            axis.plot(*zip(*points), linestyle="--" if mode == "static" else "-", label=label, **style)
        axis.set(xlabel="context, tokens", ylabel=column, xscale="log", yscale="log")
        axis.grid(True, which="both", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    plots.save(figure, path)


def plot_long(rows, path):
    """Bytes of the cache and time per token of each piece against the tokens seen."""
    figure, axes = plots.pyplot().subplots(1, 2, figsize=(10, 4))
    pieces = [row for row in rows if "seen" in row]
    starts = [0, *(row["seen"] for row in pieces)]
    seen = starts[1:]
    axes[0].plot(seen, [row["cache_bytes"] / 2**20 for row in pieces], marker=".")
    axes[0].set(xlabel="tokens read", ylabel="cache, MiB", ylim=(0, None))
    axes[1].plot(seen, [row["ms"] / (row["seen"] - start) * 1e3 for row, start in zip(pieces, starts)], marker=".")
    axes[1].set(xlabel="tokens read", ylabel="prefill, microseconds per token", yscale="log")
    plots.save(figure, path)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 16000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens that the time per token is taken from")
    parser.add_argument("--runs", type=int, default=3, help="timed repetitions; the median counts")
    parser.add_argument("--long", action="store_true", help="read a long text instead of comparing models")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="with --long: length of the text")
    parser.add_argument("--piece", type=int, default=65536, help="with --long: tokens per forward pass")
    parser.add_argument("--quick", action="store_true", help="tiny sizes on the CPU in float32")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the JSON lines, the table and the plot")
    args = parser.parse_args()
    args.device, args.dtype, args.sizes = "cuda", torch.bfloat16, SIZES
    if args.quick:
        args.device, args.dtype, args.sizes = "cpu", torch.float32, QUICK_SIZES
        args.contexts, args.batches, args.new_tokens, args.runs = [64, 128], [1, 2], 8, 1
        args.tokens, args.piece = 4 * SHORT, SHORT
    elif not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU; --quick runs a tiny one on the CPU")
    if args.tokens <= SHORT:
        parser.error(f"--tokens is {args.tokens}, but must be more than {SHORT}")
    return args


def main():
    args = arguments()
    command = "python -m eval.benchmarks.generation " + " ".join(sys.argv[1:])
    head = {"command": command, **environment(args.device), "dtype": str(args.dtype)}
    print(json.dumps(head), flush=True)
    rows = long_text(args) if args.long else compare(args)
    print("\n" + table(rows))
    if args.out:
        name = "generation-long" if args.long else "generation"
        write(args.out / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in [head, *rows]))
        write(args.out / f"{name}.md", f"`{command}`: {json.dumps(head)}\n\n{table(rows)}")
        (plot_long if args.long else plot)(rows, args.out / f"{name}.png")
    sys.exit(1 if any("error" in row for row in rows) else 0)


if __name__ == "__main__":
    main()
