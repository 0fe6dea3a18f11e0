"""From a preset to records: which runs an experiment consists of, in which stacks they are trained, and what is
written down about each.

A preset is a JSON file (see `configuration/mqar-*.json`):

    name           string that marks the records of this preset
    sizes          fields of `eval.stacked.Sizes`
    recipe         fields of `eval.stacked.Recipe`
    task           fields of the task class that all runs share
    grid           list of blocks; each is the product of its lists "mixers", "learning_rates", the lists of "task"
                   fields, and seeds 0 .. "seeds" - 1;
                   a block may override fields of "sizes" and "recipe" for itself
    test           list of objects with the task fields that differ in a test, e.g. {"length": 256}; default: only the
                   training task
    test_examples  examples per test (a multiple of 32)
    stack          most runs trained at once

Results are appended stack by stack, so an interrupted experiment keeps what it has, and starting it again does
only what is missing.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import sys

import torch

from eval import plots, records
from eval.stacked import MIXERS, PIECE, STEPS, Recipe, Run, Sizes, Stack, build_model, train_stack

PRESET_FIELDS = {"name", "sizes", "recipe", "task", "grid", "test", "test_examples", "stack"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A run with all that decides which stack it belongs to."""

    run: Run
    sizes: Sizes
    recipe: Recipe


def load_preset(path):
    """Read and check a preset. Raises ValueError for unknown or missing fields."""
    preset = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    unknown = set(preset) - PRESET_FIELDS
    if unknown:
        raise ValueError(f"preset {path} has unknown fields {sorted(unknown)}; allowed are {sorted(PRESET_FIELDS)}")
    missing = {"name", "grid"} - set(preset)
    if missing:
        raise ValueError(f"preset {path} lacks {sorted(missing)}")
    if preset.get("test_examples", PIECE) % PIECE:
        raise ValueError(f"test_examples is {preset['test_examples']}; allowed are multiples of {PIECE}")
    return preset


def only_blocks(preset, blocks):
    """The preset with the blocks of its grid that have these numbers; None: all. Raises ValueError for others."""
    if wrong := [number for number in blocks or () if not 0 <= number < len(preset["grid"])]:
        raise ValueError(f"blocks has {wrong[0]}; allowed is 0 to {len(preset['grid']) - 1}")
    return preset if blocks is None else {**preset, "grid": [preset["grid"][number] for number in blocks]}


def expand(preset, task_class):
    """The preset's cells in order, without repetition."""
    cells = []
    for block in preset["grid"]:
        unknown = set(block) - {"mixers", "learning_rates", "seeds", "task", "sizes", "recipe"}
        if unknown:
            raise ValueError(f"a grid block has unknown fields {sorted(unknown)}")
        sizes = _make(Sizes, {**preset.get("sizes", {}), **block.get("sizes", {})}, "sizes")
        recipe = _make(Recipe, {**preset.get("recipe", {}), **block.get("recipe", {})}, "recipe")
        varied = block.get("task", {})
        for values in itertools.product(*varied.values()):
            fields = {
                **preset.get("task", {}),
                **dict(zip(varied, values, strict=True)),
                "vocab_size": sizes.vocab_size,
            }
            if "curriculum" in fields:
                fields["curriculum"] = tuple(map(tuple, fields["curriculum"]))
            task = _make(task_class, fields, "task")
            for mixer, rate, seed in itertools.product(
                block.get("mixers", MIXERS), block["learning_rates"], range(block["seeds"])
            ):
                cells.append(Cell(Run(mixer, task, rate, seed), sizes, recipe))
    return list(dict.fromkeys(cells))


def _make(kind, fields, name):
    allowed = {field.name for field in dataclasses.fields(kind)}
    if unknown := set(fields) - allowed:
        raise ValueError(f"{name} has unknown fields {sorted(unknown)}; allowed are {sorted(allowed)}")
    return kind(**fields)


def stacks(cells, most):
    """Group cells that can be trained together, and split groups into stacks of equal size (so that a compiled step
    fits all of them).
    """
    groups = {}
    for cell in cells:
        task = cell.run.task
        key = (cell.run.mixer, cell.sizes, cell.recipe, task.length, getattr(task, "curriculum", ()))
        groups.setdefault(key, []).append(cell)
    for group in groups.values():
        size = math.ceil(len(group) / math.ceil(len(group) / most))
        yield from (group[i : i + size] for i in range(0, len(group), size))


def run_stack(cells, tests, examples, device, kind="eager", prepared=None):
    """Train and test one stack of cells. Returns records, one per cell, and the trained `Stack` with its weights."""
    runs, sizes, recipe = [cell.run for cell in cells], cells[0].sizes, cells[0].recipe
    stack = Stack([build_model(run.mixer, sizes, run.seed) for run in runs], device)
    label = f"{runs[0].mixer} x{len(runs)}, T={runs[0].task.length}"
    outcome = train_stack(runs, stack, recipe, kind, prepared, label=label)
    scores = {}
    for change in tests:
        tasks = [dataclasses.replace(run.task.stage(1.0), **change) for run in runs]
        scores[json.dumps(change)] = stack.evaluate(outcome.weights, tasks, [run.seed for run in runs], examples)
    rows = []
    for i, cell in enumerate(cells):
        rows.append(
            {
                **describe(cell),
                "parameters": sum(stack.lengths),
                "chance": cell.run.task.chance,
                "stack_runs": len(cells),
                "stack_seconds": round(outcome.seconds, 1),
                "tests": [
                    {**json.loads(change), "accuracy": round(accuracy[i].item(), 5), "loss": round(loss[i].item(), 5)}
                    for change, (loss, accuracy) in scores.items()
                ],
                "accuracy_curve": [round(x, 4) for x in outcome.accuracy[i].tolist()],
                "loss_curve": [round(x, 4) for x in outcome.loss[i].tolist()],
            }
        )
    return rows, stack, outcome.weights


def describe(cell):
    """What identifies a cell in the records."""
    return {
        "mixer": cell.run.mixer,
        "learning_rate": cell.run.learning_rate,
        "seed": cell.run.seed,
        "task": dataclasses.asdict(cell.run.task),
        "sizes": dataclasses.asdict(cell.sizes),
        "recipe": dataclasses.asdict(cell.recipe),
    }


def missing_cells(preset, task_class, output, mixers=MIXERS):
    """The cells of a preset that have no record in `output` yet."""
    done = {json.dumps(records.identity(record)) for record in records.read(output)}
    cells = [c for c in expand(preset, task_class) if c.run.mixer in mixers]
    return [c for c in cells if json.dumps(records.identity(describe(c))) not in done]


def program(cell):
    """What decides the operations of a cell's training step, beside the shapes of its tensors."""
    sizes = dataclasses.replace(cell.sizes, initializer_range=None, lambda_bias_init=None)
    recipe = dataclasses.replace(cell.recipe, steps=0, batch_size=0, warmup=0.0)
    return cell.run.mixer, sizes, recipe


def run_preset(preset, task_class, output, mixers=MIXERS, device="cpu", kind="eager", save=None):
    """Run what is missing of a preset; append the records to `output` (JSON lines). With `save`, keep each stack's
    best model in that folder.
    """
    environment = records.environment(device)
    prepared = {}  # steps by program and shape: they serve every stack that shares both
    for group in stacks(missing_cells(preset, task_class, output, mixers), preset.get("stack", 64)):
        steps = prepared.setdefault(program(group[0]), {})
        rows, stack, weights = run_stack(group, preset.get("test", [{}]), preset.get("test_examples", 256), device, kind, steps)
        records.append(output, [{"name": preset["name"], **row, **environment} for row in rows])
        if save:
            scores = [(row["tests"][0]["accuracy"], cell.run.task.answers) for row, cell in zip(rows, group, strict=True)]
            best = max(range(len(rows)), key=lambda i: (scores[i][0] >= records.SOLVED, scores[i][1], scores[i][0]))
            path = pathlib.Path(save) / f"{preset['name']}-{group[0].run.mixer}-{len(list(pathlib.Path(save).glob('*')))}"
            stack.model(weights[best]).save_pretrained(path)
            (path / "record.json").write_text(json.dumps(rows[best]), encoding="utf-8")


def main(experiment, task_class, description):
    """Command line that the task modules share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", required=True, help="JSON file with the grid of runs")
    parser.add_argument(
        "--output", default=None, help=f"records to append to (default: {experiment}-NAME.jsonl in the current folder)"
    )
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=MIXERS, help="run only these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", nargs="+", type=int, default=None, help="run only these blocks of the grid, from 0")
    parser.add_argument(
        "--step", default="eager", choices=STEPS, help="how training steps run (compiled pays from minutes of training on)"
    )
    parser.add_argument("--save", default=None, help="folder for the best model of each stack")
    arguments = parser.parse_args()
    try:
        preset = only_blocks(load_preset(arguments.preset), arguments.blocks)
        output = pathlib.Path(arguments.output or f"{experiment}-{preset['name']}.jsonl")
        expand(preset, task_class)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    torch.set_float32_matmul_precision("high")
    run_preset(preset, task_class, output, arguments.mixers, arguments.device, arguments.step, arguments.save)
    print(records.summary(records.read(output)))
    picture = plots.overview(records.read(output), output.with_suffix(".png"))
    print(f"records: {output}; plot: {picture}")
