"""Records, statistics, presets and the report: what is written is complete, and the numbers are what they claim."""

import json
import subprocess
import sys

import pytest

from eval import experiment, plots, records, report
from eval.mqar import MqarTask

PRESET = {
    "name": "tiny",
    "sizes": {
        "vocab_size": 32,
        "hidden_size": 16,
        "head_dim": 8,
        "state_size": 8,
        "chunk_size": 16,
        "max_position_embeddings": 16,
    },
    "recipe": {"steps": 3, "batch_size": 2},
    "task": {"length": 16},
    "grid": [{"mixers": ["linear", "transformer"], "task": {"pairs": [2, 4]}, "learning_rates": [0.001], "seeds": 2}],
    "test": [{"length": 16}, {"length": 32}],
    "test_examples": 32,
    "stack": 3,
}


def test_paired_test_is_the_exact_sign_flip_test():
    """By hand: of the 8 sign patterns of (1, 2, 3) only all-plus and all-minus reach |6|; equal samples give 1."""
    assert records.paired_test([1, 2, 3], [0, 0, 0]) == 2 / 8
    assert records.paired_test([1, 2, -3], [0, 0, 0]) == 1
    assert records.paired_test([0.5, 0.5], [0.5, 0.5]) == 1
    # |3 + 2 - 1| = 4: reached by (3, 2, -1), (3, 2, 1) and their mirror images.
    assert records.paired_test([3, 2, -1], [0, 0, 0]) == 4 / 8


@pytest.mark.parametrize(("first", "second"), [([], []), ([1], [1, 2]), ([0] * 21, [0] * 21)])
def test_paired_test_refuses_samples_that_are_no_pairs(first, second):
    with pytest.raises(ValueError, match="samples have"):
        records.paired_test(first, second)


def fake(mixer, rate, seed, value):
    return {
        "mixer": mixer,
        "learning_rate": rate,
        "seed": seed,
        "task": {"length": 16},
        "tests": [{"length": 16, "accuracy": value}, {"length": 32, "accuracy": value / 2}],
    }


def test_learning_rate_is_chosen_on_tuning_seeds_only():
    """Rate 1 wins on seeds 0 and 1 and loses on the others: it is chosen, and only the others are reported."""
    good = [fake("linear", 1.0, seed, 0.9 if seed < 2 else 0.2) for seed in range(4)]
    other = [fake("linear", 2.0, seed, 0.5) for seed in range(4)]
    table = records.compare(good + other)
    assert [(row["learning_rate"], row["n"], row["mean"]) for row in table] == [(1.0, 2, 0.2)]
    assert records.compare(good + other, 2.0)[0]["n"] == 4
    assert records.compare(good, 1.0, length=32)[0]["high"] == 0.45


def test_comparison_pairs_seeds_with_the_baseline():
    rows = [fake("linear", 1.0, s, 0.1 * s) for s in range(3)] + [fake("fixed", 1.0, s, 0.1 * s + 0.5) for s in range(3)]
    by_mixer = {row["mixer"]: row for row in records.compare(rows, 1.0)}
    assert by_mixer["linear"]["p"] is None and by_mixer["fixed"]["p"] == 2 / 8
    assert by_mixer["fixed"]["mean"] == pytest.approx(0.6) and by_mixer["fixed"]["sd"] == pytest.approx(0.1)


def test_experiment_writes_one_complete_record_per_run_and_resumes(tmp_path):
    """8 runs in stacks of at most 3; a second start adds nothing; a mixer that is missing is added."""
    path = tmp_path / "records.jsonl"
    experiment.run_preset(PRESET, MqarTask, path, mixers=["linear"])
    assert len(records.read(path)) == 4
    experiment.run_preset(PRESET, MqarTask, path)
    rows = records.read(path)
    assert len(rows) == 8
    experiment.run_preset(PRESET, MqarTask, path)
    assert records.read(path) == rows
    assert {(r["mixer"], r["task"]["pairs"], r["seed"]) for r in rows} == {
        (m, k, s) for m in ("linear", "transformer") for k in (2, 4) for s in (0, 1)
    }
    for row in rows:
        assert [t["length"] for t in row["tests"]] == [16, 32]
        assert all(0 <= t["accuracy"] <= 1 for t in row["tests"])
        assert {"torch", "transformers", "device", "revision", "parameters", "accuracy_curve"} <= set(row)
    flat = list(records.tidy(rows))
    assert len(flat) == 16
    records.write_csv(flat, tmp_path / "records.csv")
    lines = (tmp_path / "records.csv").read_text().splitlines()
    assert len(lines) == 17 and len({line.count(",") for line in lines}) == 1


def test_stacks_are_of_equal_size_and_keep_architectures_apart():
    sizes = [len(group) for group in experiment.stacks(experiment.expand(PRESET, MqarTask), 3)]
    assert sizes == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 3}, "speed"),
        ({"test_examples": 33}, "test_examples"),
        ({"grid": [{"learning_rates": [1], "seeds": 1, "colour": 2}]}, "colour"),
        ({"sizes": {"width": 3}}, "width"),
        ({"recipe": {"epochs": 3}}, "epochs"),
        ({"task": {"noise": 3}}, "noise"),
    ],
)
def test_wrong_presets_are_refused_by_name(tmp_path, change, message):
    path = tmp_path / "preset.json"
    path.write_text(json.dumps({**PRESET, **change}))
    with pytest.raises(ValueError, match=message):
        experiment.expand(experiment.load_preset(path), MqarTask)


def test_command_line_says_what_is_wrong_in_one_line(tmp_path):
    path = tmp_path / "preset.json"
    path.write_text(json.dumps({**PRESET, "task": {"length": 8}}))
    command = [sys.executable, "-m", "eval.mqar", "--preset", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=records.FOLDER.parents[1])
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "error: length is 8; allowed is at least 4 * pairs = 16"


def test_blocks_of_a_grid_are_chosen_by_number():
    preset = {"grid": ["a", "b", "c"]}
    assert experiment.only_blocks(preset, [2, 0])["grid"] == ["c", "a"] and experiment.only_blocks(preset, None) == preset
    with pytest.raises(ValueError, match="blocks has 3; allowed is 0 to 2"):
        experiment.only_blocks(preset, [3])


@pytest.mark.parametrize(
    "name",
    [
        "mqar-quick",
        "mqar-cpu",
        "mqar-cpu-levels",
        "mqar-cpu-drivers",
        "mqar-grid",
        "mqar-levels",
        "mqar-pairs64",
        "mqar-drivers",
    ],
)
def test_shipped_presets_are_valid(name):
    preset = experiment.load_preset(records.FOLDER.parents[1] / "configuration" / f"{name}.json")
    assert experiment.expand(preset, MqarTask)


def test_records_of_several_files_merge_without_repetition(tmp_path):
    """Parts that overlap, also in a run that differs only by its chunk size, which decides no result."""
    sizes = {"hidden_size": 16, "chunk_size": 32}
    rows = [{**fake("linear", 1.0, seed, 0.5), "sizes": sizes, "recipe": {"steps": 1}} for seed in range(4)]
    records.append(tmp_path / "all.jsonl", rows[:2])
    records.append(tmp_path / "a.jsonl", rows[1:3])
    records.append(tmp_path / "b.jsonl", [{**rows[2], "sizes": {**sizes, "chunk_size": 64}}, rows[3]])
    records.merge(tmp_path / "all.jsonl", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [row["seed"] for row in records.read(tmp_path / "all.jsonl")] == [0, 1, 2, 3]


@pytest.fixture
def run_report(tmp_path, monkeypatch):
    """`python -m eval.report` with arguments, on the records in `tmp_path`: cards and CSV files go there, no pictures."""

    def run(*arguments):
        monkeypatch.setattr(plots, "save", lambda figure, path: (plots.pyplot().close(figure), path)[1])
        monkeypatch.setattr(report, "CARDS", tmp_path)
        monkeypatch.setattr(records, "FOLDER", tmp_path)
        monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
        report.main()

    return run


def test_cards_are_what_the_records_say(tmp_path, run_report):
    """`python -m eval.report` writes the committed cards and CSV files again, letter by letter."""
    for path in records.FOLDER.glob("*.json*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    committed = [*records.FOLDER.glob("*.csv"), *(path for path in report.CARDS.glob("*.md") if path.name != "template.md")]
    run_report()
    assert len(committed) >= 6
    for path in committed:
        assert (tmp_path / path.name).read_text() == path.read_text(), path.name


def test_report_adds_records_of_other_files_and_names_a_missing_one(tmp_path, run_report, capsys):
    rows = [json.loads(line) for line in (records.FOLDER / "selective_copying.jsonl").read_text().splitlines()]
    records.append(tmp_path / "selective_copying.jsonl", rows[:2])
    records.append(tmp_path / "part.jsonl", rows[1:4])
    run_report("--selective_copying", tmp_path / "part.jsonl")
    assert records.read(tmp_path / "selective_copying.jsonl") == rows[:4]
    assert "Records: 4 runs" in (tmp_path / "selective_copying.md").read_text()
    with pytest.raises(SystemExit):
        run_report("--mqar", "nowhere.jsonl")
    assert "there is no file nowhere.jsonl" in capsys.readouterr().err
