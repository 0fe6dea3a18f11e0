"""train.py and eval/corpus.py: presets and their errors, text from every source, packing, a whole run, resuming."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import eval.corpus
import train
from eval.corpus import load_corpus, training_splits
from train import DataArguments, parse_arguments, prepare, read_preset

ROOT = Path(__file__).parent.parent
MODELS = {
    "loglinear": {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16, "state_size": 8,
                  "n_groups": 1, "chunk_size": 16},
    "llama": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
              "intermediate_size": 64},
}  # fmt: skip
SENTENCES = [f"{subject} {verb} {thing} in the {place}.\n" for subject in ("Anna", "The old sailor", "A cat", "Nobody")
             for verb in ("finds", "forgets", "paints") for thing in ("a map", "the lamp", "seven stones")
             for place in ("garden", "harbour", "attic", "rain")]  # fmt: skip


@pytest.fixture(autouse=True)
def no_shared_state(tmp_path, monkeypatch):
    """Data caches and outputs of a test stay in its own folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def preset_file(folder: Path, model_type: str = "loglinear", **training) -> Path:
    """A run of a second or two on `folder`/text."""
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "train.txt").write_text("".join(SENTENCES), encoding="utf-8")
    (folder / "text" / "valid.txt").write_text("".join(SENTENCES[::7]), encoding="utf-8")
    preset = {
        "model": {"model_type": model_type, "vocab_size": 300, "config": MODELS[model_type]},
        "data": {"dataset": str(folder / "text"), "block_size": 32},
        "training": {
            "output_dir": str(folder / "run"), "max_steps": 12, "per_device_train_batch_size": 4, "logging_steps": 1,
            "learning_rate": 1e-2, "save_steps": 4, "disable_tqdm": True, "use_cpu": True, **training,
        },
    }  # fmt: skip
    path = folder / "tiny.json"
    path.write_text(json.dumps(preset), encoding="utf-8")
    return path


def losses(folder: Path) -> dict[int, float]:
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


# ---- Arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(ROOT.glob("configuration/wikitext103-*.json")) + [
    ROOT / "configuration/quickstart.json"], ids=lambda path: path.stem)  # fmt: skip
def test_every_preset_is_complete(path):
    """All fields exist, the model builds, and its lambda MLP is as small as the README says."""
    model_args, data_args, training_args = parse_arguments([str(path), "--bf16", "false"])
    assert training_args.output_dir == f"outputs/{path.stem}"
    fields = {**model_args.config_fields(), "max_position_embeddings": data_args.block_size}
    config = AutoConfig.for_model(model_args.model_type, vocab_size=model_args.vocab_size, **fields)
    with torch.device("meta"):
        parameters, lambda_parameters = train.parameter_counts(AutoModelForCausalLM.from_config(config))
    assert lambda_parameters / parameters < 0.002
    if path.stem == "quickstart":
        assert 2.5e6 < parameters < 3.5e6


def test_the_six_wikitext_runs_differ_in_width_and_lambda_only():
    presets = {path.stem: read_preset(path) for path in ROOT.glob("configuration/wikitext103-*.json")}
    modes = {"softplus": "mlp_softplus", "softmax": "mlp_softmax", "linear": "linear"}
    assert len(presets) == 6
    for width in (256, 512):
        group = [presets[f"wikitext103-h{width}-{name}"] for name in modes]
        assert [preset["config"].pop("lambda_mode") for preset in group] == list(modes.values())
        assert group[0] == group[1] == group[2]
        assert group[0]["config"]["hidden_size"] == width
        assert group[0]["config"]["mlp_intermediate_size"] > width
        assert group[0]["dataset_config"] == "wikitext-103-raw-v1"


def test_command_line_wins_over_the_preset(tmp_path):
    overrides = "hidden_size=64,tie_word_embeddings=true,time_step_limit=[0.0,1.5],act=silu"
    arguments = "--learning_rate 0.5 --block_size 64 --vocab_size 999 --output_dir elsewhere --config_overrides"
    model_args, data_args, training_args = parse_arguments([str(preset_file(tmp_path)), *arguments.split(), overrides])
    assert (training_args.learning_rate, training_args.max_steps, training_args.output_dir) == (0.5, 12, "elsewhere")
    assert (data_args.block_size, data_args.dataset, model_args.vocab_size) == (64, str(tmp_path / "text"), 999)
    changed = {"hidden_size": 64, "tie_word_embeddings": True, "time_step_limit": [0.0, 1.5], "act": "silu"}
    assert model_args.config_fields() == {**MODELS["loglinear"], **changed}


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ('{"training": {"learning_rat": 1}}', "unknown field 'learning_rat' in 'training'; did you .*'learning_rate'"),
        ('{"data": {"learning_rate": 1}}', "unknown field 'learning_rate' in 'data'"),
        ('{"trainer": {}}', "'trainer' must be one of the sections model, data, training"),
        ('{"data": 3}', "'data' must be"),
        ("[]", "must be a JSON object"),
        ('{"model": ', "is not a JSON file"),
        ('{"training": {"learning_rate": "fast"}}', "learning_rate"),
        ('{"data": {"block_size": 2.5}}', "block_size=2.5 must be"),
    ],
)  # fmt: skip
def test_wrong_presets_are_named(tmp_path, preset, message, capsys):
    path = tmp_path / "preset.json"
    path.write_text(preset, encoding="utf-8")
    with pytest.raises((ValueError, SystemExit)) as error:
        parse_arguments([str(path)])
    said = str(error.value) + capsys.readouterr().err
    assert re.search(message, said), said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocksize", "3"], "Unknown argument '--blocksize'; did you mean .*--block_size"),
        (["--block_size", "1"], "block_size=1 must be at least 2"),
        (["--vocab_size", "200"], "vocab_size=200 must be at least 258"),
        (["--config", "{hidden_size: 3}"], "config='{hidden_size: 3}' must be a JSON object"),
        (["--config_overrides", "hidden_size"], "config_overrides='hidden_size' must read name=value"),
        (["--config_overrides", "hidden_sise=3"], "'hidden_sise' is no field .* did you mean 'hidden_size'"),
        (["--config_overrides", "num_heads=7", "--dataset", "read/later"], "num_heads"),
        (["--config_overrides", "vocab_size=280"], "vocab_size=280 of the model is below the tokenizer's"),
        (["--config_overrides", "lambda_mode=cubic"], "cubic"),
        (["--model_type", "lama"], "model_type='lama' is no model type of Transformers; did you mean .*'llama'"),
        (["--block_size", "100000"], "fewer than block_size=100000 tokens"),
        (["--streaming", "true"], "streaming=True reads datasets of the Hub"),
        (["--train_file", "a.txt"], "were both given"),
        (["--dataset", "missing/folder/x"], "no such file or folder"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        prepare([str(preset_file(tmp_path)), *arguments])


def test_no_model_is_an_error_and_not_the_largest_default():
    with pytest.raises(ValueError, match="No model: pass a preset"):
        parse_arguments([])


def test_an_error_is_one_line_and_exit_status_1(tmp_path, monkeypatch):
    """Without network and with a Hub dataset: no traceback, and how to go on with local files."""

    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(eval.corpus, "load_dataset", unreachable)
    with pytest.raises(SystemExit) as exit_:
        train.main([str(preset_file(tmp_path)), "--dataset", "Salesforce/wikitext"])
    assert isinstance(exit_.value.code, str)  # Python prints it and exits with status 1
    assert "error: dataset='Salesforce/wikitext' cannot be read from the Hub" in exit_.value.code
    assert "--train_file" in exit_.value.code


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--learning_rate", "-1", "learning_rate=-1.0: must be at least 0"),
        ("--per_device_train_batch_size", "0", "per_device_train_batch_size=0: must be at least 1"),
        ("--model_name_or_path", "./missing", "model_name_or_path='./missing': there is no such folder"),
        ("--resume_from_checkpoint", "./missing", "resume_from_checkpoint='./missing': there is no such checkpoint"),
    ],
)
def test_values_that_the_library_refuses_late_are_refused_first(tmp_path, option, value, message):
    with pytest.raises(SystemExit) as exit_:
        train.main([str(preset_file(tmp_path)), "--output_dir", str(tmp_path / "run"), option, value])
    assert message in exit_.value.code
    assert not (tmp_path / "run").exists()


# ---- Text -----------------------------------------------------------------------------------------------------------


def test_python_reference_shares_no_paragraph_between_splits():
    corpus = load_corpus()
    paragraphs = {
        split: [part.strip() for text in rows["text"] for part in text.split("\n\n")] for split, rows in corpus.splits.items()
    }
    everything = paragraphs["train"] + paragraphs["validation"]
    assert len(everything) == len(set(everything))
    assert 0.03 < sum(map(len, paragraphs["validation"])) / sum(map(len, everything)) < 0.2
    assert corpus.name.endswith(".".join(map(str, sys.version_info[:3])))


def test_a_folder_is_read_by_its_file_names(tmp_path):
    (tmp_path / "notes.md").write_text("ignored")
    (tmp_path / "valid.txt").write_text("ä\n\nb", encoding="utf-8")
    (tmp_path / "test.txt").write_text("c\n")
    corpus = load_corpus(str(tmp_path))
    assert corpus.joined
    assert {split: list(rows["text"]) for split, rows in corpus.splits.items()} == {
        "validation": ["ä\n", "\n", "b"],
        "test": ["c\n"],
    }
    name, splits = training_splits(corpus)
    assert (name, sorted(splits)) == ("validation", ["test", "validation"])
    (tmp_path / "train.jsonl").write_text('{"text": "d"}\n')
    assert training_splits(load_corpus(str(tmp_path)))[0] == "train"
    (tmp_path / "train-2.txt").write_text("e")
    with pytest.raises(ValueError, match=r"two train files: train-2.txt, train.jsonl"):
        load_corpus(str(tmp_path))


def test_jsonl_and_parquet_rows_are_documents(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"body": "one\\ntwo", "n": 1}\n{"body": "three", "n": 2}\n')
    datasets.Dataset.from_dict({"body": ["four"]}).to_parquet(tmp_path / "valid.parquet")
    corpus = load_corpus(str(tmp_path), text_column="body")
    assert not corpus.joined
    assert list(corpus.splits["train"]["text"]) == ["one\ntwo", "three"]
    assert list(corpus.splits["validation"]["text"]) == ["four"]
    with pytest.raises(ValueError, match=r"text_column='text' is not in the train split.*body"):
        load_corpus(str(tmp_path))


def test_one_file_is_split_at_its_end(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"{line}\n" for line in range(10)))
    name, splits = training_splits(load_corpus(str(tmp_path / "book.txt")), validation_fraction=0.2)
    assert name == "train"
    assert list(splits["validation"]["text"]) == ["8\n", "9\n"]
    assert list(splits["train"]["text"])[-1] == "7\n"
    with pytest.raises(ValueError, match="validation_fraction=1.0"):
        training_splits(load_corpus(str(tmp_path / "book.txt")), validation_fraction=1.0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "café".encode("latin-1"), r"latin.txt' is not UTF-8 text"),
        ("empty.txt", b"", r"empty.txt' is empty"),
        ("one.txt", b"one line", "1 rows are too few"),
        ("broken.jsonl", b'{"text": ', r"broken.jsonl' cannot be read"),
        ("words.docx", b"x", r"words.docx' is of no known type: allowed are .txt"),
    ],
)
def test_unusable_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        training_splits(load_corpus(files={"train": str(tmp_path / name)}))


# ---- Blocks ---------------------------------------------------------------------------------------------------------


def test_trained_tokenizer_returns_every_text_unchanged(tmp_path):
    corpus = load_corpus()
    tokenizer = train.train_tokenizer(corpus.splits["train"], vocab_size=400)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == 400
    for text in ["naïve 数 🙂 \t x", " leading, trailing ", corpus.splits["validation"]["text"][0]]:
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id != loaded.pad_token_id


@pytest.mark.parametrize("joined", [True, False])
def test_blocks_hold_the_texts_in_order(joined):
    texts = ["first text", "second", "", "the third one"]
    rows = datasets.Dataset.from_dict({"text": texts})
    tokenizer = train.train_tokenizer(rows, vocab_size=260)
    corpus = eval.corpus.Corpus("test", {"train": rows}, joined)
    blocks = train.pack(corpus, {"train": rows}, tokenizer, DataArguments(block_size=7))["train"]
    stream = [token for block in blocks["input_ids"] for token in block]
    text = ("" if joined else train.END_OF_TEXT).join([*texts, ""])
    expected = tokenizer(text)["input_ids"]
    assert stream == expected[: len(stream)]
    assert 0 <= len(expected) - len(stream) < 7


def test_packing_is_cached(tmp_path, monkeypatch):
    """A second run reads the blocks of the first from disk, even with a freshly loaded tokenizer."""
    arguments = [str(preset_file(tmp_path))]
    first = prepare(arguments)
    first.tokenizer.save_pretrained(tmp_path / "tokenizer")
    arguments += ["--tokenizer_name", str(tmp_path / "tokenizer")]
    before = prepare(arguments).train_blocks.cache_files
    assert prepare(arguments).train_blocks.cache_files == before != []


def test_unigram_perplexity_is_the_entropy_of_the_counts():
    blocks = datasets.Dataset.from_dict({"input_ids": [[0, 0, 3, 3], [0, 0, 3, 5]]})
    entropy = -(4 / 8 * math.log(4 / 8) + 3 / 8 * math.log(3 / 8) + 1 / 8 * math.log(1 / 8))
    assert train.unigram_perplexity(blocks) == pytest.approx(math.exp(entropy))


# ---- Whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODELS)
def test_a_run_learns_saves_samples_and_writes_its_card(tmp_path, model_type, capsys):
    train.main([str(preset_file(tmp_path, model_type))])
    printed, run = capsys.readouterr().out, tmp_path / "run"
    perplexity = float(printed.split("validation perplexity ")[1].split(",")[0])
    unigram = float(printed.split("unigram perplexity ")[1].split(",")[0])
    assert "Sample: " in printed

    tokenizer, model = AutoTokenizer.from_pretrained(run), AutoModelForCausalLM.from_pretrained(run).eval()
    assert model.config.use_cache and AutoConfig.from_pretrained(run / "checkpoint-12").use_cache
    assert model.config.max_position_embeddings == 32
    assert model.config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer("".join(SENTENCES[::7]), return_tensors="pt")["input_ids"]
    ids = ids[:, : ids.shape[1] // 32 * 32].view(-1, 32)
    with torch.no_grad():
        log_probabilities = model(ids).logits[:, :-1].double().log_softmax(-1)
    nll = -log_probabilities.gather(-1, ids[:, 1:, None]).mean()
    assert perplexity == pytest.approx(math.exp(nll), abs=0.006)
    assert losses(run)[12] < 0.8 * losses(run)[1]

    card = (run / "README.md").read_text(encoding="utf-8")
    assert f"| validation | {perplexity:.2f} | {unigram:.2f} |" in card
    assert f"`{model_type}` with {model.num_parameters():,} parameters" in card
    assert "python train.py" in card and "$" not in card

    train.main([str(tmp_path / "tiny.json")])  # a finished run has nothing left to train and reports the same
    again = capsys.readouterr().out
    assert "Resuming from" in again and f"validation perplexity {perplexity:.2f}, unigram" in again


def test_a_streamed_dataset_trains_like_a_stored_one(tmp_path, monkeypatch):
    """The Hub's answer is played by local rows; only the training split is streamed."""
    rows = {"train": SENTENCES * 3, "validation": SENTENCES[::7], "unsupervised": ["x"]}
    stored = {split: datasets.Dataset.from_dict({"text": texts, "n": [0] * len(texts)}) for split, texts in rows.items()}

    def from_hub(dataset, config, streaming):
        assert (dataset, config) == ("owner/name", "small")
        return {split: rows.to_iterable_dataset() if streaming else rows for split, rows in stored.items()}

    monkeypatch.setattr(eval.corpus, "load_dataset", from_hub)
    arguments = [str(preset_file(tmp_path)), "--dataset", "owner/name", "--dataset_config", "small"]
    whole = prepare([*arguments, "--output_dir", "whole"])
    streamed = prepare([*arguments, "--output_dir", "streamed", "--streaming", "true"])
    assert isinstance(streamed.train_blocks, datasets.IterableDataset)
    assert [row["input_ids"].tolist() for row in streamed.train_blocks] == list(whole.train_blocks["input_ids"])
    assert list(streamed.blocks) == ["validation"]
    assert list(streamed.blocks["validation"]["input_ids"]) == list(whole.blocks["validation"]["input_ids"])
    assert train.train(streamed).state.global_step == 12
    with pytest.raises(ValueError, match="streaming needs --max_steps"):
        prepare([*arguments, "--streaming", "true", "--max_steps", "-1"])


def test_fine_tuning_starts_from_the_checkpoint(tmp_path):
    train.main([str(preset_file(tmp_path))])
    arguments = [
        "--model_name_or_path",
        str(tmp_path / "run"),
        "--output_dir",
        str(tmp_path / "tuned"),
        "--config",
        "null",
    ]
    tuned = prepare([str(tmp_path / "tiny.json"), *arguments])
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    assert all(torch.equal(value, before[name]) for name, value in tuned.model.state_dict().items())
    assert tuned.tokenizer.get_vocab() == AutoTokenizer.from_pretrained(tmp_path / "run").get_vocab()
    with pytest.raises(ValueError, match="'hidden_sise' is no field"):
        prepare([str(tmp_path / "tiny.json"), *arguments, "--config_overrides", "hidden_sise=3"])


def test_a_killed_run_resumes_to_the_same_losses(tmp_path):
    """SIGKILL after a checkpoint, a torn newer one beside it: going on ends with the losses of an unbroken run."""
    preset = preset_file(tmp_path, max_steps=4000, save_total_limit=3, lr_scheduler_type="constant")
    command = [sys.executable, str(ROOT / "train.py"), str(preset), "--output_dir", str(tmp_path / "killed")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            while not list(tmp_path.glob("killed/checkpoint-*/trainer_state.json")):
                assert process.poll() is None, "train.py ended before its first checkpoint"
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL

    reached = max(int(path.parent.name.split("-")[1]) for path in tmp_path.glob("killed/checkpoint-*/trainer_state.json"))
    (tmp_path / "killed" / f"checkpoint-{reached + 100}").mkdir()
    end = ["--max_steps", str(reached + 6)]
    train.main([str(preset), "--output_dir", str(tmp_path / "killed"), *end])
    train.main([str(preset), "--output_dir", str(tmp_path / "whole"), *end])
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert max(losses(tmp_path / "whole")) == reached + 6


def test_a_folder_with_another_runs_checkpoints_is_refused(tmp_path):
    train.main([str(preset_file(tmp_path))])
    with pytest.raises(ValueError, match=r"checkpoints of another run: block_size=16 \(there 32\)"):
        prepare([str(tmp_path / "tiny.json"), "--block_size", "16"])
    explicit = ["--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-4")]
    assert prepare([str(tmp_path / "tiny.json"), *explicit]).checkpoint == explicit[1]
