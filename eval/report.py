"""One command makes every table, card and plot of the experiments from the records in `eval/records/`:

    python -m eval.report [--mqar FILE ...] [--selective_copying FILE ...] [--language_modeling FILE ...]

With files, first adds their records (of runs elsewhere) to those it has. Writes `eval/records/*.csv`, `model_cards/*.md` and
`model_cards/plots/*.png`. The best learning rate of a mixer is chosen on the tuning seeds (0 and 1) and reported on the others.
"""

import argparse
import json
import pathlib

from eval import lambda_maps, plots, records
from eval.stacked import MIXERS

CARDS = pathlib.Path(__file__).parent.parent / "model_cards"

MQAR_CLAIMS = """Published (arXiv 2605.06946): with 32 pairs a mean accuracy of 2.9 % for `linear` against 57.9 % for
`mlp_softplus` (best seed 99.6 %), `mlp_softmax` good at moderate load and failing at 32 pairs; trained short and tested
at length 256: 33.2 % against 3.3 %."""
COPYING_CLAIMS = """Published (arXiv 2605.06946): at length 1024 an accuracy of 54.8 % for `mlp_softplus` against 40.6 %
for `linear`, with less variance."""
LANGUAGE_CLAIMS = """Published (arXiv 2605.06946), WikiText-103, hidden size 512: perplexity 218.57 for `mlp_softplus`,
224.71 for `linear`, 226.06 for `mlp_softmax`; hidden size 256: the same order with a smaller margin."""
COMPLEXITY_CLAIMS = """Published: less than 0.007 % more parameters, training in O(T log T) time and O(T) memory,
decoding with a state of O(log T)."""


def environments(rows):
    """Where the runs of a card ran, one line per machine and version."""
    keys = ("device", "torch", "transformers", "python", "matmul", "revision")
    seen = dict.fromkeys(tuple(row[key] for key in keys) for row in rows)
    return "\n".join(
        f"- {device}, torch {torch}, transformers {library}, Python {python}, matrix products {matmul}, revision {revision}"
        for device, torch, library, python, matmul, revision in seen
    )


def missing(rows):
    """A sentence that names the mixers without a single run, so that a gap cannot be read as a result."""
    absent = [mixer for mixer in MIXERS if mixer not in {row["mixer"] for row in rows}]
    return f"\n\nNot run: {', '.join(absent)}." if absent else ""


def setting_sections(rows):
    """Per setting: every mixer at its best learning rate, then at every learning rate, where there are several to
    compare.
    """
    parts = []
    for (name,), part in records.group(rows, records.setting).items():
        tuning = records.tuning_seeds(part)
        rates = sorted({row["learning_rate"] for row in part})
        how = "chosen on seeds 0 and 1, reported on the others" if tuning else "chosen on the seeds it is reported on"
        title = f"Each mixer at its best learning rate ({how})" if len(rates) > 1 else "One learning rate, not tuned"
        best = records.comparison_table(records.compare(part))
        parts.append(f"## {name}\n\n{title}:\n\n{best}{missing(part)}")
        for rate in rates if len({row["mixer"] for row in part}) > 1 and len(rates) > 1 else ():
            table = records.comparison_table(records.compare(part, rate))
            parts.append(f"All seeds at the learning rate {rate:g}:\n\n{table}")
    return "\n\n".join(parts)


def rate_table(rows):
    """Every learning rate of every mixer and setting, all seeds."""
    return f"## Every run\n\n{records.summary(rows)}"


def length_section(rows):
    """Accuracy at longer test lengths, solved and unsolved runs apart, per number of levels."""
    lines = []
    keys = (records.setting, lambda r: r["mixer"], lambda r: records.accuracy(r) >= records.SOLVED)
    for (name, mixer, solved), part in records.group(rows, *keys).items():
        cells = []
        tested = [pair for row in part for pair in records.by_length(row).items()]
        for (length,), pairs in sorted(records.group(tested, lambda pair: pair[0]).items()):
            number = "" if len(pairs) == len(part) else f" (n = {len(pairs)})"
            cells.append(f"{length}: {records.percent(sum(value for _, value in pairs) / len(pairs))}{number}")
        lines.append([name, mixer, "solved" if solved else "not solved", len(part), ", ".join(cells)])
    header = ["setting", "mixer", "runs that are", "number", "mean accuracy % by test length"]
    return f"## Longer than the training\n\n{records.markdown(header, lines)}"


def card(title, claims, command, rows, *sections):
    """A card's text."""
    origin = f"Records: {len(rows)} runs. Made by `{command}`; this card by `python -m eval.report`."
    return "\n\n".join([f"# {title}", claims, origin, *sections, "## Where it ran", environments(rows)]) + "\n"


def picture(path):
    return f"![{path.stem}](plots/{path.name})"


def report_mqar(rows):
    folder = CARDS / "plots"
    sections = [setting_sections(rows)]
    for (name,), part in records.group(rows, lambda r: r["name"]).items():
        hardest = max(r["task"]["pairs"] for r in part)
        hard = [r for r in part if r["task"]["pairs"] == hardest]
        title = f"recall, {name}: k = {hardest}"
        made = [
            plots.rates(hard, folder / f"mqar-{name}-rates.png", title),
            plots.curves(hard, folder / f"mqar-{name}-curves.png", title),
            plots.against(part, lambda r: r["task"]["pairs"], "pairs k", folder / f"mqar-{name}-pairs.png", "recall"),
            plots.lengths(hard, folder / f"mqar-{name}-lengths.png", title),
        ]
        sections.append("\n".join(map(picture, made)))
    sections += [length_section(rows), rate_table(rows)]
    return card(
        "Recall (MQAR)",
        MQAR_CLAIMS,
        "python -m eval.mqar --preset configuration/mqar-{grid,levels,pairs64,drivers,cpu,cpu-levels,cpu-drivers,quick}.json",
        rows,
        *sections,
    )


def report_copying(rows):
    path = plots.against(
        rows, lambda r: r["task"]["length"], "length", CARDS / "plots" / "copying-lengths.png", "selective copying"
    )
    command = "python -m eval.selective_copying --preset configuration/selective-copying.json"
    return card("Selective copying", COPYING_CLAIMS, command, rows, setting_sections(rows), picture(path), rate_table(rows))


def report_language(rows):
    lines = []
    for (width, mixer), part in records.group(rows, lambda r: r["sizes"]["hidden_size"], lambda r: r["mixer"]).items():
        cells = []
        for split in ("heldout", "zero_shot"):
            found = [t for r in sorted(part, key=lambda r: r["seed"]) for t in r["tests"] if t["split"] == split]
            perplexity = records.describe([t["perplexity"] for t in found])
            bits = sum(t["bits_per_byte"] for t in found) / len(found)
            every = " ".join(f"{t['perplexity']:.2f}" for t in found)
            cells += [f"{perplexity['mean']:.2f} ± {perplexity['sd']:.2f}", every, f"{bits:.4f}"]
        lines.append([width, mixer, f"{part[0]['parameters']:,}", len(part), f"{part[0]['train_tokens']:,}", *cells])
    header = ["hidden size", "mixer", "parameters", "seeds", "tokens each"]
    header += [
        f"{split} {what}" for split in ("held-out", "zero-shot") for what in ("perplexity", "of every seed", "bits per byte")
    ]
    corpus = rows[0]["corpus"]["text"]
    table = f"Corpus: {corpus}.{missing(rows)}\n\n{records.markdown(header, lines)}"
    command = "python -m eval.language_modeling train --preset configuration/lm-gcide.json --tokens TOKENS"
    return card("Language modelling", LANGUAGE_CLAIMS, command, rows, table)


def report_complexity(result):
    added = [
        [r["mixer"], f"{r['parameters']:,}", f"{r['lambda_proj']:,}", f"{r['lambda_head']:,}", f"{r['percent']:.5f}"]
        for r in result["added"]
    ]
    costs = [key for key in ("seconds", "kept_bytes", "peak_bytes", "cache_bytes") if key in result["measured"][0]]
    measured = [
        [r["mixer"], length, *(f"{r[key][i]:.4g}" if key == "seconds" else f"{r[key][i]:,}" for key in costs)]
        for r in result["measured"]
        for i, length in enumerate(r["lengths"])
    ]
    exponents = [[r["mixer"], *(r["exponents"][key] for key in costs)] for r in result["measured"]]
    path = plots.costs(result["measured"], costs, CARDS / "plots" / "complexity.png")
    sections = [
        "## Parameters (the 317M model)\n\n"
        + records.markdown(["mixer", "model", "lambda_proj", "lambda_head", "lambda_head in % of the model"], added),
        "## Costs against length\n\n" + records.markdown(["mixer", "T", *costs], measured),
        "## Fitted exponents of T\n\n" + records.markdown(["mixer", *costs], exponents),
        picture(path),
    ]
    return card("Complexity", COMPLEXITY_CLAIMS, "python -m eval.complexity", [result], *sections)


def report_maps(maps):
    lines = []
    for path, result in maps:
        made = lambda_maps.plot(result, CARDS / "plots" / f"{path.stem}.png")
        about = [result.get("about", path.stem), result["lambda_mode"], result["mean_entropy"], result["mean_variance"]]
        lines.append([*about, f"[map](plots/{made.name})"])
    header = ["model", "lambda mode", "entropy over levels (1: uniform)", "variance over tokens (0: constant)", "map"]
    return f"# Level weights\n\n{lambda_maps.__doc__.strip()}\n\n{records.markdown(header, lines)}\n"


EXPERIMENTS = {"mqar": report_mqar, "selective_copying": report_copying, "language_modeling": report_language}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in EXPERIMENTS:
        parser.add_argument(f"--{name}", nargs="+", default=[], metavar="FILE", help="record files to add first")
    added = vars(parser.parse_args())
    if absent := [file for files in added.values() for file in files if not pathlib.Path(file).exists()]:
        parser.error(f"there is no file {absent[0]}")
    for name, report in EXPERIMENTS.items():
        path = records.FOLDER / f"{name}.jsonl"
        if added[name]:
            records.merge(path, added[name])
        rows = records.read(path)
        if not rows:
            print(f"no records of {name}: its card is not made")
            continue
        records.write_csv(records.tidy(rows), path.with_suffix(".csv"))
        records.write(CARDS / f"{name}.md", report(rows))
    complexity = records.FOLDER / "complexity.json"
    if complexity.exists():
        records.write(CARDS / "complexity.md", report_complexity(json.loads(complexity.read_text(encoding="utf-8"))))
    maps = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(records.FOLDER.glob("lambda-*.json"))]
    if maps:
        records.write(CARDS / "lambda_maps.md", report_maps(maps))
    print("cards:", ", ".join(path.name for path in sorted(CARDS.glob("*.md"))))


if __name__ == "__main__":
    main()
