"""What the experiments found: reading and writing records, the statistics, and every table and plot made from them.

`python -m eval.report` regenerates all tables (CSV, model cards) and plots from the records in `eval/records/`; no
figure of the README or a card has another source.

A record is one JSON object per line and run, see `eval/experiment.py`. Means over seeds hide that a recall run
either leaves the plateau at chance or does not, so every table gives the share of solved runs (accuracy at least
`SOLVED`) and the range beside mean and standard deviation.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import tempfile

import torch
import transformers

from eval.stacked import Sizes

SOLVED = 0.9
FOLDER = pathlib.Path(__file__).parent / "records"


def _described():
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment(device):
    """Versions and machine, to stand in every record."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU"
    revision = os.environ.get("GIT_REVISION") or _described()  # a copy of the tree may have no history, or another one
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "matmul": torch.get_float32_matmul_precision(),
        "revision": revision,
    }


def write(path, text):
    """Replace a file at once, so that an interruption never leaves half of it."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def read(path):
    """The records of a file; none if there is no file."""
    path = pathlib.Path(path)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def append(path, rows):
    """Add records to a file."""
    write(path, "".join(json.dumps(row) + "\n" for row in [*read(path), *rows]))


def identity(record):
    """What tells records apart, comparable between a record read from a file and one just made."""
    sizes = {**dataclasses.asdict(Sizes()), **record["sizes"]}  # records made before a field existed have its default
    del sizes["chunk_size"]  # how the result is computed, not what it is
    # Through JSON, so that tuples and lists compare equal.
    return json.loads(json.dumps([*(record[k] for k in ("mixer", "learning_rate", "seed", "task", "recipe")), sizes]))


def merge(path, parts):
    """Add to a file the records of other files that it does not have yet."""
    known = {json.dumps(identity(row)) for row in read(path)}
    fresh = {json.dumps(identity(row)): row for part in parts for row in read(part)}
    append(path, [row for key, row in fresh.items() if key not in known])


def paired_test(first, second):
    """Exact two-sided sign-flip permutation test of paired differences: P(|mean| at least as large) if the two were
    exchangeable within pairs.

    With n pairs the smallest possible value is 2 / 2**n. Raises ValueError for unequal or empty samples or more than
    20 pairs.
    """
    if len(first) != len(second) or not 1 <= len(first) <= 20:
        raise ValueError(f"samples have {len(first)} and {len(second)} values; allowed are equal numbers from 1 to 20")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    observed = abs(sum(differences)) - 1e-12
    flips = itertools.product((1, -1), repeat=len(differences))
    return sum(abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= observed for signs in flips) / 2 ** len(
        differences
    )


def tidy(rows):
    """One flat dict per run and test: the columns of the CSV files."""
    for row in rows:
        task, sizes, recipe = row["task"], row["sizes"], row["recipe"]
        for test in row["tests"]:
            yield {
                "name": row["name"],
                "mixer": row["mixer"],
                "num_layers": sizes["num_hidden_layers"],
                "hidden_size": sizes["hidden_size"],
                "max_position_embeddings": sizes["max_position_embeddings"],
                **{f"train_{key}": value for key, value in task.items() if key not in ("curriculum", "tokens")},
                "curriculum": len(task.get("curriculum", ())),
                "test_length": test.get("length", task["length"]),
                "learning_rate": row["learning_rate"],
                "seed": row["seed"],
                "steps": recipe["steps"],
                "batch_size": recipe["batch_size"],
                **{key: test[key] for key in ("split", "accuracy", "loss", "perplexity", "bits_per_byte") if key in test},
                **{key: row[key] for key in ("chance", "train_tokens") if key in row},
                "parameters": row["parameters"],
                "seconds_share": round(row["stack_seconds"] / row["stack_runs"], 2),
                **{key: row[key] for key in ("device", "python", "torch", "transformers", "matmul", "revision")},
            }


def write_csv(rows, path):
    """Write flat dicts as CSV; the columns are those of the first row. Values hold no commas or quotes."""
    rows = list(rows)
    lines = [",".join(rows[0])] + [",".join(str(row[key]) for key in rows[0]) for row in rows]
    write(path, "\n".join(lines) + "\n")


def setting(row):
    """What a table compares mixers within: everything but mixer, learning rate and seed, as a readable string."""
    task, sizes, recipe = row["task"], row["sizes"], row["recipe"]
    parts = [f"k={task['pairs']}"] if "pairs" in task else []
    parts += [
        f"T={task['length']}",
        f"{recipe['steps']} steps of {recipe['batch_size']}",
        f"{sizes['num_hidden_layers']} x {sizes['hidden_size']}",
    ]
    parts += [f"L={(sizes['max_position_embeddings'] - 1).bit_length() + 1}"]
    parts += [f"{name} {sizes[name]}" for name in ("initializer_range", "lambda_bias_init") if sizes.get(name) is not None]
    return ", ".join(parts + (["curriculum"] if task.get("curriculum") else []))


def group(rows, *keys):
    """Rows by a tuple of key functions' values, in order of appearance."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(key(row) for key in keys), []).append(row)
    return groups


def by_length(row):
    """A run's test accuracies by test length."""
    return {test.get("length", row["task"]["length"]): test["accuracy"] for test in row["tests"]}


def accuracy(row, length=None):
    """A run's test accuracy at a length (default: the training length)."""
    return by_length(row)[length or row["task"]["length"]]


def tuning_seeds(rows):
    """How many seeds, from 0 on, only choose the learning rate: 2 where at least 4 were run and there is a choice; else 0, and
    all both choose and count.
    """
    return 2 if len({row["seed"] for row in rows}) >= 4 and len({row["learning_rate"] for row in rows}) > 1 else 0


def best_rate(rows):
    """The learning rate with the best mean accuracy over the tuning seeds (the smaller one of equals)."""
    tuning = tuning_seeds(rows)
    means = {
        rate: statistics.mean(accuracy(r) for r in part if r["seed"] < tuning or not tuning)
        for (rate,), part in group(rows, lambda r: r["learning_rate"]).items()
    }
    return min(means, key=lambda rate: (-means[rate], rate))


def describe(values):
    """Numbers of a table row: mean, standard deviation, range, share solved."""
    return {
        "n": len(values),
        "mean": statistics.mean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else 0.0,
        "low": min(values),
        "high": max(values),
        "solved": sum(v >= SOLVED for v in values) / len(values),
    }


def compare(rows, rate=None, length=None, baseline="linear"):
    """One table: each mixer's seeds at one learning rate, or, if `rate` is None, its report seeds at its best
    learning rate.

    Returns dicts with mixer, learning_rate, the numbers of `describe`, and `p`, the paired test against `baseline`
    over the
    seeds that both have.
    """
    samples = {}
    for (mixer,), part in group(rows, lambda r: r["mixer"]).items():
        chosen, first = (best_rate(part), tuning_seeds(part)) if rate is None else (rate, 0)
        values = {r["seed"]: accuracy(r, length) for r in part if r["learning_rate"] == chosen and r["seed"] >= first}
        if values:
            samples[mixer] = chosen, values
    table = []
    for mixer, (chosen, values) in samples.items():
        shared = sorted(set(values) & set(samples.get(baseline, (None, {}))[1]))
        other = [samples[baseline][1][s] for s in shared] if shared else []
        p = paired_test([values[s] for s in shared], other) if shared and mixer != baseline else None
        table.append({"mixer": mixer, "learning_rate": chosen, **describe(list(values.values())), "p": p})
    return table


def markdown(header, lines):
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def percent(value):
    return f"{100 * value:.1f}"


def comparison_table(table):
    """Markdown of `compare`."""
    header = ["mixer", "learning rate", "seeds", "mean %", "sd", "lowest to highest", "solved", "p against linear"]
    return markdown(
        header,
        [
            [
                row["mixer"],
                f"{row['learning_rate']:g}",
                row["n"],
                percent(row["mean"]),
                percent(row["sd"]),
                f"{percent(row['low'])} to {percent(row['high'])}",
                f"{round(row['solved'] * row['n'])}/{row['n']}",
                "" if row["p"] is None else f"{row['p']:.3f}",
            ]
            for row in table
        ],
    )


def summary(rows):
    """Accuracy per setting, mixer and learning rate over all seeds, as text."""
    keys = (setting, lambda r: r["mixer"], lambda r: r["learning_rate"])
    lines = []
    for (where, mixer, rate), part in group(rows, *keys).items():
        numbers = describe([accuracy(r) for r in part])
        seeds = " ".join(percent(accuracy(r)) for r in sorted(part, key=lambda r: r["seed"]))
        lines.append([where, mixer, f"{rate:g}", percent(numbers["mean"]), f"{numbers['solved']:.2f}", seeds])
    return markdown(["setting", "mixer", "learning rate", "mean %", "solved", "every seed %"], lines)
