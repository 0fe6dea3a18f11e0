"""What the method costs: parameters added, training time and memory against length, cache bytes against length, with
fitted exponents.

    python -m eval.complexity --output complexity.json                  # on the CPU, minutes
    python -m eval.complexity --device cuda --lengths 2048 8192 32768 --output complexity.json

Measured, each at several lengths T with batch 1 (medians of `--repeats` runs after a warm-up):

- parameters: what the lambda modes add to a model over `fixed` (Mamba-2), counted on the meta device;
- training: seconds of a forward and backward pass (on a CPU the process's CPU time); bytes that the forward pass
  keeps for the backward pass (each tensor once, parameters apart), a number that does not depend on the machine; on a
  GPU also the peak of allocated memory;
- cache: bytes of all tensors in the cache after T tokens.

An exponent e is the slope of log(cost) against log(T) by least squares over the longer half of the lengths: 1 is
linear, 2 quadratic, T log T lies a little above 1, log T near 0.
"""

import argparse
import dataclasses
import json
import math
import statistics
import time

import torch
from tqdm.auto import tqdm

from eval import records
from eval.stacked import LOGLINEAR_MIXERS, Sizes, build_model

# The largest model of the paper's parameter count: 317M parameters, 15 levels.
PAPER_MODEL = {
    "vocab_size": 50280,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_heads": 32,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "expand": 2,
    "max_position_embeddings": 16384,
}
MEASURED = Sizes(vocab_size=1024, hidden_size=256, num_hidden_layers=2, state_size=64, head_dim=64, chunk_size=64)


def added_parameters(fields=PAPER_MODEL):
    """Parameters of the model per lambda mode, those of `lambda_proj` and of `lambda_head`, and the latter's share of
    the model in percent.
    """
    from modeling_loglinear import LogLinearConfig, LogLinearForCausalLM

    table = []
    for mode in LOGLINEAR_MIXERS:
        with torch.device("meta"):
            model = LogLinearForCausalLM(LogLinearConfig(lambda_mode=mode, **fields))
        count = {
            part: sum(p.numel() for n, p in model.named_parameters() if part in n)
            for part in ("", "lambda_proj", "lambda_head")
        }
        table.append(
            {
                "mixer": mode,
                "parameters": count[""],
                "lambda_proj": count["lambda_proj"],
                "lambda_head": count["lambda_head"],
                "percent": 100 * count["lambda_head"] / count[""],
            }
        )
    return table


def kept_bytes(model, ids):
    """Bytes that a forward pass keeps for the backward pass, each storage once, parameters apart."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The output keeps the graph alive, so that no address is used twice.
        output = model(input_ids=ids, labels=ids, use_cache=False)
    total = sum(size for address, size in storages.items() if address not in parameters)
    del output
    return total


def training_cost(model, length, repeats):
    """Seconds of forward and backward, kept bytes and, on a GPU, peak bytes at one length."""
    device = next(model.parameters()).device
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length)).to(device)
    on_gpu = device.type == "cuda"
    # On a CPU the process's own time, which other load does not stretch.
    wait, clock = (torch.cuda.synchronize, time.perf_counter) if on_gpu else (lambda: None, time.process_time)
    cost = {"kept_bytes": kept_bytes(model, ids)}
    seconds = []
    for repeat in range(repeats + 1):
        model.zero_grad(set_to_none=True)
        if on_gpu and repeat == 1:
            torch.cuda.reset_peak_memory_stats()
        wait()
        start = clock()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        wait()
        seconds.append(clock() - start)
    cost["seconds"] = statistics.median(seconds[1:])
    if on_gpu:
        cost["peak_bytes"] = torch.cuda.max_memory_allocated()
    return cost


def cache_bytes(model, length):
    """Bytes of the cache after a prompt of this length."""
    ids = torch.zeros(1, length, dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in _tensors(layer))


def _tensors(layer):
    found = {id(value): value for value in vars(layer).values() if isinstance(value, torch.Tensor)}
    return found.values()


def exponent(lengths, costs):
    """Least-squares slope of log(cost) against log(length) over the longer half of the lengths."""
    half = len(lengths) // 2 if len(lengths) > 3 else 0
    x, y = [math.log(v) for v in lengths[half:]], [math.log(v) for v in costs[half:]]
    middle_x, middle_y = statistics.mean(x), statistics.mean(y)
    rise = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return rise / sum((a - middle_x) ** 2 for a in x)


def measure(mixers, lengths, repeats, device):
    """All costs of all mixers, each model made for its length: a list of dicts with mixer, lengths, one list per cost."""
    table = []
    for mixer in mixers:
        costs = []
        for length in tqdm(lengths, desc=mixer):
            model = build_model(mixer, dataclasses.replace(MEASURED, max_position_embeddings=length)).to(device)
            if mixer == "transformer":
                model.set_attn_implementation("sdpa")
            cost = training_cost(model.train(), length, repeats)
            costs.append({**cost, "cache_bytes": cache_bytes(model.eval(), length)})
        row = {"mixer": mixer, "lengths": lengths, **{key: [c[key] for c in costs] for key in costs[0]}}
        row["exponents"] = {key: round(exponent(lengths, row[key]), 3) for key in costs[0]}
        table.append(row)
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--mixers", nargs="+", default=["mlp_softplus", "linear", "fixed", "transformer"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", default="complexity.json")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if len(arguments.lengths) < 2 or arguments.lengths != sorted(set(arguments.lengths)):
        parser.error(f"--lengths is {arguments.lengths}; allowed are at least two rising numbers")
    result = {
        "added": added_parameters(),
        "measured": measure(arguments.mixers, arguments.lengths, arguments.repeats, arguments.device),
        **records.environment(arguments.device),
    }
    records.write(arguments.output, json.dumps(result, indent=1) + "\n")
    for row in result["measured"]:
        print(row["mixer"], row["exponents"])


if __name__ == "__main__":
    main()
