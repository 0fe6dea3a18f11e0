"""Language modelling on local text: the paper's comparison of lambda modes at two widths, several seeds at equal
tokens.

Two steps. The first makes a folder of tokens from plain text, with a byte-level BPE trained on its training part;
every `1 / heldout`-th block of 64 KiB is held out:

    python -m eval.language_modeling prepare --text corpus.txt --zero_shot other.txt --output tokens/
    python -m eval.language_modeling train --preset configuration/lm-gcide.json --tokens tokens/

The second trains all runs of a preset (seeds of a model as one stack) and appends a record per run: perplexity per
token and bits per byte on the held-out part and on the zero-shot text, each token predicted once, in windows of
the training length.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from torch.func import vmap
from tqdm.auto import tqdm

from eval import experiment, records
from eval.stacked import MIXERS, STEPS, Stack, build_model, train_stack

PART = 65_536  # bytes of the blocks that the corpus is split by


@dataclasses.dataclass(frozen=True)
class LanguageTask:
    """Windows of a token file, for the stacked trainer.

    Args:
        vocab_size: of the tokenizer.
        length: tokens of a window (default 512).
        corpus: name of the corpus, for the records.
        tokens: folder with `train.npy`.
    """

    vocab_size: int = 8192
    length: int = 512
    corpus: str = ""
    tokens: str = ""

    chance = 0.0

    @property
    def answers(self):
        return self.length

    def stage(self, progress):
        """The task does not change during the training."""
        return self

    def batch(self, count, generator):
        """Random windows: ids [count, T], positions 0 .. T-1 [count, T], next tokens [count, T]."""
        device = generator.device
        text = _load(self.tokens, "train", str(device))
        starts = torch.randint(len(text) - self.length, (count, 1), device=device, generator=generator)
        windows = text[starts + torch.arange(self.length + 1, device=device)]
        positions = torch.arange(self.length, device=device).expand(count, -1)
        return windows[:, :-1], positions, windows[:, 1:]


@functools.lru_cache
def _load(folder, split, device):
    return torch.from_numpy(np.load(pathlib.Path(folder) / f"{split}.npy").astype(np.int64)).to(device)


def prepare(text, zero_shot, output, vocab_size, heldout):
    """Tokenize files; writes train.npy, heldout.npy, zero_shot.npy (uint16), the tokenizer and corpus.json with their
    sizes. Raises ValueError for a vocabulary beyond uint16.
    """
    if not 256 <= vocab_size <= 65_536:
        raise ValueError(f"vocab_size is {vocab_size}; allowed is 256 to 65536")
    whole = pathlib.Path(text).read_text(encoding="utf-8", errors="replace")
    parts = [whole[i : i + PART] for i in range(0, len(whole), PART)]
    splits = {
        "train": "".join(p for i, p in enumerate(parts) if i % heldout != heldout - 1),
        "heldout": "".join(p for i, p in enumerate(parts) if i % heldout == heldout - 1),
        "zero_shot": pathlib.Path(zero_shot).read_text(encoding="utf-8"),
    }
    output = pathlib.Path(output)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator((splits["train"][i : i + PART] for i in range(0, len(splits["train"]), PART)), vocab_size)
    tokenizer.save(str(output / "tokenizer.json"))
    sizes = {}
    for name, content in splits.items():
        pieces = tokenizer.encode_batch([content[i : i + PART] for i in range(0, len(content), PART)])
        tokens = np.concatenate([np.array(piece.ids, dtype=np.uint16) for piece in pieces])
        np.save(output / f"{name}.npy", tokens)
        sizes[name] = {"tokens": len(tokens), "bytes": len(content.encode()), "words": len(content.split())}
    records.write(output / "corpus.json", json.dumps({"text": pathlib.Path(text).name, "splits": sizes}, indent=2) + "\n")
    return sizes


def surprise(stack, weights, tokens, length, windows=16):
    """Mean negative log-likelihood in nats [R] over all tokens but each window's first, `windows` of them at a time."""
    device = weights.device
    count = (len(tokens) - 1) // length
    ids = tokens[: count * length].view(count, length)
    targets = tokens[1 : count * length + 1].view(count, length)
    total = torch.zeros(len(weights), device=device)
    with torch.no_grad():
        for start in range(0, count, windows):
            rows = slice(start, start + windows)
            positions = torch.arange(length, device=device).expand_as(ids[rows])
            loss = vmap(stack.loss, in_dims=(0, None, None, None))(weights, ids[rows], positions, targets[rows])[0]
            total += loss * len(ids[rows])
    return total / count


def run_preset(preset, tokens, output, mixers=MIXERS, device="cpu", kind="eager"):
    """Train and test what is missing of a preset, one stack per mixer and width."""
    corpus = json.loads((pathlib.Path(tokens) / "corpus.json").read_text(encoding="utf-8"))
    environment = records.environment(device)
    preset = {**preset, "task": {**preset.get("task", {}), "corpus": corpus["text"]}}
    cells = experiment.missing_cells(preset, LanguageTask, output, mixers)
    for group in experiment.stacks(cells, preset.get("stack", 8)):
        runs = [dataclasses.replace(c.run, task=dataclasses.replace(c.run.task, tokens=str(tokens))) for c in group]
        sizes, recipe = group[0].sizes, group[0].recipe
        stack = Stack([build_model(run.mixer, sizes, run.seed) for run in runs], device)
        label = f"{runs[0].mixer} x{len(runs)}, width {sizes.hidden_size}"
        outcome = train_stack(runs, stack, recipe, kind, label=label)
        tests = {}
        for split in ("heldout", "zero_shot"):
            text = _load(str(tokens), split, str(torch.device(device)))
            nats = surprise(stack, outcome.weights, text, runs[0].task.length)
            per_byte = corpus["splits"][split]["tokens"] / corpus["splits"][split]["bytes"] / math.log(2)
            tests[split] = [
                {
                    "split": split,
                    "loss": round(x, 5),
                    "perplexity": round(math.exp(x), 3),
                    "bits_per_byte": round(x * per_byte, 5),
                }
                for x in nats.tolist()
            ]
        rows = [
            {
                "name": preset["name"],
                **experiment.describe(cell),
                "parameters": sum(stack.lengths),
                "train_tokens": recipe.steps * recipe.batch_size * runs[0].task.length,
                "corpus": corpus,
                "stack_runs": len(runs),
                "stack_seconds": round(outcome.seconds, 1),
                "tests": [tests[split][i] for split in tests],
                "loss_curve": [round(x, 4) for x in outcome.loss[i].tolist()],
                **environment,
            }
            for i, cell in enumerate(group)
        ]
        records.append(output, rows)
        tqdm.write("\n".join(f"{r['mixer']} seed {r['seed']}: {r['tests'][0]['perplexity']}" for r in rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("prepare")
    verb.add_argument("--text", required=True)
    verb.add_argument("--zero_shot", required=True)
    verb.add_argument("--output", required=True)
    verb.add_argument("--vocab_size", type=int, default=8192)
    verb.add_argument("--heldout", type=int, default=100, help="hold out one block in this many")
    verb = verbs.add_parser("train")
    verb.add_argument("--preset", required=True)
    verb.add_argument("--tokens", required=True)
    verb.add_argument("--output", default="language_modeling.jsonl")
    verb.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=MIXERS)
    verb.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    verb.add_argument("--blocks", nargs="+", type=int, default=None, help="run only these blocks of the grid, from 0")
    verb.add_argument("--step", default="eager", choices=STEPS, help="how training steps run")
    a = parser.parse_args()
    try:
        if a.verb == "prepare":
            print(json.dumps(prepare(a.text, a.zero_shot, a.output, a.vocab_size, a.heldout), indent=2))
            return
        torch.set_float32_matmul_precision("high")
        preset = experiment.only_blocks(experiment.load_preset(a.preset), a.blocks)
        run_preset(preset, a.tokens, pathlib.Path(a.output), a.mixers, a.device, a.step)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
