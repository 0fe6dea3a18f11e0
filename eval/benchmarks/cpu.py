"""Training step and decoding on a CPU, this model beside `Mamba2ForCausalLM` (its PyTorch path) of the same configuration.

    python -m eval.benchmarks.cpu [--runs 9]

4 layers of width 256, state 128, one group, vocabulary 1024, float32, 2 threads. The training step takes one row of 2048
tokens; decoding is `generate()` from a prompt of 64 tokens, as time per token of 64 new ones. The two models take turns, and
the ratio is that of the medians. Peak memory is the largest resident size of a process that does training steps only.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import Mamba2Config, Mamba2ForCausalLM

from modeling_loglinear import LogLinearConfig, LogLinearForCausalLM

SIZES = dict(
    hidden_size=256, num_heads=8, head_dim=64, state_size=128, n_groups=1, num_hidden_layers=4, vocab_size=1024,
    eos_token_id=None, pad_token_id=0,
)  # fmt: skip
TRAIN_TOKENS, PROMPT, NEW_TOKENS = 2048, 64, 64


def make_model(name):
    torch.manual_seed(0)
    if name == "mamba2":
        return Mamba2ForCausalLM(Mamba2Config(**SIZES, chunk_size=256))
    return LogLinearForCausalLM(LogLinearConfig(**SIZES, chunk_size=64, max_position_embeddings=TRAIN_TOKENS))


def train_step(model, input_ids):
    model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
    model.zero_grad()


def seconds(fn):
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def peak_mib(name):
    """Largest resident size while a fresh process makes three training steps, above its size before them (Linux)."""
    code = (
        "from eval.benchmarks.cpu import *; torch.set_num_threads(2);"
        f"model = make_model({name!r}).train(); ids = torch.randint(5, 1024, (1, TRAIN_TOKENS));"
        "before = resident_mib('VmRSS'); Path('/proc/self/clear_refs').write_text('5');"
        "[train_step(model, ids) for _ in range(3)];"
        "print(resident_mib('VmHWM') - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def resident_mib(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9, help="timed repetitions per model; the median counts")
    runs = parser.parse_args().runs
    torch.set_num_threads(2)
    models = {name: make_model(name) for name in ("loglinear", "mamba2")}
    input_ids = torch.randint(5, SIZES["vocab_size"], (1, TRAIN_TOKENS))
    prompt = input_ids[:, :PROMPT]

    def generate(model, tokens):
        model.eval().generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )

    taken = {(what, name): [] for what in ("train", "decode") for name in models}
    for run in range(runs + 2):  # two to warm up
        for name, model in models.items():
            step = seconds(lambda: train_step(model.train(), input_ids))  # noqa: B023
            one, many = (seconds(lambda: generate(model, n)) for n in (1, 1 + NEW_TOKENS))  # noqa: B023
            if run >= 2:
                taken["train", name].append(step)
                taken["decode", name].append((many - one) / NEW_TOKENS)
    result = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    result |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "threads": 2, "runs": runs}
    for what in ("train", "decode"):
        ours, theirs = (statistics.median(taken[what, name]) * 1e3 for name in models)
        result[what] = {"loglinear_ms": round(ours, 2), "mamba2_ms": round(theirs, 2), "ratio": round(ours / theirs, 3)}
    ours, theirs = (peak_mib(name) for name in models)
    result["train_peak"] = {"loglinear_MiB": round(ours), "mamba2_MiB": round(theirs), "ratio": round(ours / theirs, 3)}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
