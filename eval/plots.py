"""Plots made from records; every function takes records, writes one PNG and returns its path. Needs matplotlib (the
extra `plots`).
"""

import os
import pathlib

from eval import records
from eval.stacked import MIXERS

COLORS = {"linear": "C3", "mlp_softplus": "C0", "mlp_softmax": "C2", "fixed": "C7", "transformer": "C1"}


def pyplot():
    """matplotlib.pyplot without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure, path):
    """Write a figure at once, without dates that would change the file."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name("." + path.name)
    figure.savefig(part, dpi=90, format="png", metadata={"Software": None}, bbox_inches="tight")
    pyplot().close(figure)
    os.replace(part, path)
    return path


def by_mixer(rows):
    """Rows by mixer, in the fixed order of `MIXERS`."""
    return [(m, part) for m in MIXERS if (part := [r for r in rows if r["mixer"] == m])]


def spread(axis, x, values, color):
    """Every value as a dot around x, slightly shifted by its rank, and the mean as a dash."""
    width = 0.3 / max(1, len(values))
    for i, value in enumerate(values):
        axis.plot(x + (i - (len(values) - 1) / 2) * width, value, "o", ms=4, color=color, alpha=0.6, mew=0)
    axis.plot([x - 0.3, x + 0.3], [sum(values) / len(values)] * 2, "-", color=color, lw=2)


def overview(rows, path):
    """Learning curves of all runs and their final test accuracy, one row of panels per setting."""
    groups = records.group(rows, records.setting)
    figure, axes = pyplot().subplots(len(groups), 2, figsize=(11, 3.6 * len(groups)), squeeze=False)
    for (curves, finals), ((name,), part) in zip(axes, groups.items(), strict=True):
        for x, (mixer, runs) in enumerate(by_mixer(part)):
            for run in runs:
                curve = run["accuracy_curve"]
                steps = [(i + 0.5) / len(curve) * run["recipe"]["steps"] for i in range(len(curve))]
                curves.plot(steps, curve, color=COLORS[mixer], alpha=0.6, lw=1)
            spread(finals, x, [records.accuracy(run) for run in runs], COLORS[mixer])
        for axis in (curves, finals):
            axis.axhline(part[0]["chance"], color="0.6", ls=":", lw=1)
            axis.set_ylim(-0.03, 1.03)
        finals.set_xticks(range(len(by_mixer(part))), [m for m, _ in by_mixer(part)])
        curves.set(title=name, xlabel="step", ylabel="accuracy on fresh training data")
        finals.set(title="test accuracy: every run, and the mean")
    figure.tight_layout()
    return save(figure, path)


def against(rows, key, label, path, title, length=None):
    """Test accuracy at each mixer's best learning rate against a number of the setting, `key(row)`: report seeds as
    dots, means as lines.
    """
    figure, axis = pyplot().subplots(figsize=(7, 4.2))
    values = sorted({key(r) for r in rows})
    for shift, (mixer, part) in enumerate(by_mixer(rows)):
        means = []
        for x, value in enumerate(values):
            runs = [r for r in part if key(r) == value]
            if not runs:
                continue
            rate, tuning = records.best_rate(runs), records.tuning_seeds(runs)
            finals = [records.accuracy(r, length) for r in runs if r["learning_rate"] == rate and r["seed"] >= tuning]
            at = x + (shift - 2) * 0.12
            axis.plot([at] * len(finals), finals, "o", ms=4, mew=0, alpha=0.5, color=COLORS[mixer])
            means.append((at, sum(finals) / len(finals)))
        axis.plot(*zip(*means, strict=True), "-", color=COLORS[mixer], label=mixer)
    chances = [next(r["chance"] for r in rows if key(r) == v) for v in values]
    axis.plot(range(len(values)), chances, ":", color="0.5", label="chance")
    axis.set_xticks(range(len(values)), values)
    axis.set(xlabel=label, ylabel="test accuracy", title=title, ylim=(-0.03, 1.03))
    axis.legend(fontsize=8)
    return save(figure, path)


def rates(rows, path, title):
    """Test accuracy of every seed against the learning rate, one panel per mixer."""
    parts = by_mixer(rows)
    figure, axes = pyplot().subplots(1, len(parts), figsize=(2.7 * len(parts), 3.4), sharey=True, squeeze=False)
    for axis, (mixer, part) in zip(axes[0], parts, strict=True):
        choices = sorted({r["learning_rate"] for r in part})
        for x, rate in enumerate(choices):
            spread(axis, x, [records.accuracy(r) for r in part if r["learning_rate"] == rate], COLORS[mixer])
        axis.set_xticks(range(len(choices)), [f"{c:g}" for c in choices], fontsize=8)
        axis.set(title=mixer, xlabel="learning rate", ylim=(-0.03, 1.03))
    axes[0][0].set_ylabel("test accuracy")
    figure.suptitle(title)
    figure.tight_layout()
    return save(figure, path)


def curves(rows, path, title):
    """Learning curves of the report seeds at each mixer's best learning rate, one panel per mixer."""
    parts = by_mixer(rows)
    figure, axes = pyplot().subplots(1, len(parts), figsize=(2.7 * len(parts), 3.2), sharey=True, squeeze=False)
    for axis, (mixer, part) in zip(axes[0], parts, strict=True):
        rate, tuning = records.best_rate(part), records.tuning_seeds(part)
        for run in part:
            if run["learning_rate"] == rate and run["seed"] >= tuning:
                points = run["accuracy_curve"]
                axis.plot(
                    [(i + 0.5) / len(points) * run["recipe"]["steps"] for i in range(len(points))],
                    points,
                    color=COLORS[mixer],
                    lw=1,
                )
        axis.axhline(part[0]["chance"], color="0.6", ls=":", lw=1)
        axis.set(title=f"{mixer}, {rate:g}", xlabel="step", ylim=(-0.03, 1.03))
    axes[0][0].set_ylabel("accuracy on fresh data")
    figure.suptitle(title)
    figure.tight_layout()
    return save(figure, path)


def lengths(rows, path, title):
    """Test accuracy of solved runs against test length, one panel per number of levels."""
    groups = records.group(rows, lambda r: r["sizes"]["max_position_embeddings"])
    figure, axes = pyplot().subplots(1, len(groups), figsize=(5 * len(groups), 3.8), sharey=True, squeeze=False)
    for axis, ((reach,), part) in zip(axes[0], groups.items(), strict=True):
        for mixer, runs in by_mixer(part):
            for i, run in enumerate(runs):
                axis.plot(
                    *zip(*sorted(records.by_length(run).items()), strict=True),
                    ".-",
                    lw=1,
                    alpha=0.7,
                    color=COLORS[mixer],
                    label=None if i else mixer,
                )
        axis.set_xscale("log", base=2)
        axis.set(
            title=f"levels for {reach} positions: L = {(reach - 1).bit_length() + 1}",
            xlabel="test length",
            ylim=(-0.03, 1.03),
        )
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("test accuracy")
    figure.suptitle(title)
    figure.tight_layout()
    return save(figure, path)


def costs(table, keys, path):
    """Every cost against length, one panel each, both axes logarithmic."""
    figure, axes = pyplot().subplots(1, len(keys), figsize=(4.2 * len(keys), 3.6), squeeze=False)
    for axis, key in zip(axes[0], keys, strict=True):
        for row in table:
            label = f"{row['mixer']}: T^{row['exponents'][key]}"
            axis.plot(row["lengths"], row[key], ".-", color=COLORS[row["mixer"]], label=label)
        axis.set(xlabel="T", title=key.replace("_", " "), xscale="log", yscale="log")
        axis.legend(fontsize=7)
    figure.tight_layout()
    return save(figure, path)
