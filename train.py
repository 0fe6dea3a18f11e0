"""Train a causal language model from a preset.

    python train.py configuration/quickstart.json [--field value ...]

A preset is a JSON file with up to three sections, each the fields of one dataclass: "model" (`ModelArguments`), "data"
(`DataArguments`) and "training" (`transformers.TrainingArguments`). Every field can also be given on the command line,
which wins; `--config_overrides hidden_size=128,lambda_mode=linear` changes single fields of the model's configuration.
Any causal model of Transformers trains with the same command: `"model_type": "llama"`, say, for a baseline.

The run's folder (`--output_dir`, by default `outputs/PRESET`) receives checkpoints, the model, its tokenizer and a
model card. A killed run goes on from its last complete checkpoint when the same command is given again.
"""

import dataclasses
import difflib
import json
import math
import os
import platform
import re
import shlex
import sys
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

import modeling_loglinear  # noqa: F401  (registers the Auto classes)
from eval.corpus import Corpus, is_missing_path, load_corpus, training_splits

END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"
SMALLEST_VOCABULARY = 256 + 2  # every byte, end of text, padding
TOKENIZER_DOCUMENTS = 200_000  # documents of a streamed dataset that a new tokenizer is trained on
SAMPLE_PROMPT, SAMPLE_TOKENS = 32, 96
MODEL_CARD = Path(__file__).parent / "model_cards" / "template.md"


@dataclass
class ModelArguments:
    """The model and its tokenizer."""

    model_type: str = field(default="loglinear", metadata={"help": "Model type, for a model made from scratch."})
    config: dict | str | None = field(
        default=None, metadata={"help": "Fields of the model type's configuration, as a JSON object."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Configuration fields on top of that: hidden_size=128,lambda_mode=linear"}
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Start from this checkpoint and its tokenizer instead of from scratch."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that such a checkpoint carries."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "A pretrained tokenizer. Without one, a byte-level BPE is trained."}
    )
    vocab_size: int = field(default=8192, metadata={"help": "Vocabulary of a tokenizer that is trained here."})

    def __post_init__(self):
        if isinstance(self.config, str):
            self.config = _json_or_text(self.config)
        if not isinstance(self.config, dict | None):
            raise ValueError(f"config={self.config!r} must be a JSON object of configuration fields.")
        if not isinstance(self.vocab_size, int) or self.vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(f"vocab_size={self.vocab_size} must be at least {SMALLEST_VOCABULARY} (all bytes).")

    def config_fields(self) -> dict:
        """`config` with `config_overrides` on top."""
        fields = dict(self.config or {})
        for item in re.split(r",(?=\w+=)", self.config_overrides or ""):
            name, equals, value = item.partition("=")
            if item and not equals:
                raise ValueError(f"config_overrides={self.config_overrides!r} must read name=value,name=value.")
            if item:
                fields[name.strip()] = _json_or_text(value)
        return fields


@dataclass
class DataArguments:
    """The text and how it is cut into blocks."""

    dataset: str | None = field(
        default=None,
        metadata={"help": "Hub dataset, local file or folder. Without one, the reference text inside Python."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    train_file: str | None = field(default=None, metadata={"help": "Local .txt, .jsonl or .parquet file."})
    validation_file: str | None = field(default=None, metadata={"help": "Local file to evaluate on."})
    test_file: str | None = field(default=None, metadata={"help": "Local file to evaluate on at the end only."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    join_rows: bool = field(
        default=False, metadata={"help": "Rows are lines of one text (WikiText), not documents. Text files always are."}
    )
    streaming: bool = field(default=False, metadata={"help": "Stream a Hub dataset's training split."})
    validation_fraction: float = field(
        default=0.05, metadata={"help": "Share held out, from the end, of a dataset with one split."}
    )
    block_size: int = field(default=256, metadata={"help": "Tokens per training sequence."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})

    def __post_init__(self):
        if not isinstance(self.block_size, int) or self.block_size < 2:
            raise ValueError(f"block_size={self.block_size} must be at least 2 (a token and the one it predicts).")


class LanguageModelTrainer(Trainer):
    """`Trainer` switches the model's cache off while it trains; what it saves should generate with one."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        config = self.accelerator.unwrap_model(self.model).config
        config.use_cache = True
        super().save_model(output_dir, _internal_call)
        config.use_cache = self.args.use_cache


# ---- Arguments ------------------------------------------------------------------------------------------------------


def parse_arguments(argv: list[str]) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """Read `[PRESET.json] [--field value ...]`; the command line wins over the preset."""
    parser = HfArgumentParser(
        (ModelArguments, DataArguments, TrainingArguments),
        usage="train.py [PRESET.json] [--field value ...]   (--help lists the fields)",
        allow_abbrev=False,
    )
    preset = Path(argv[0]) if argv and not argv[0].startswith("-") else None
    parser.set_defaults(output_dir=f"outputs/{preset.stem if preset else 'run'}")
    if preset:
        parser.set_defaults(**read_preset(preset))
    *arguments, unknown = parser.parse_args_into_dataclasses(
        argv[1:] if preset else argv, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise ValueError(f"Unknown argument {unknown[0]!r}{_did_you_mean(unknown[0], parser._option_string_actions)}")
    if not any((arguments[0].config, arguments[0].config_overrides, arguments[0].model_name_or_path)):
        raise ValueError("No model: pass a preset (configuration/*.json), --model_name_or_path or --config.")
    return tuple(arguments)


def read_preset(path: Path) -> dict:
    """Fields of all sections of a preset. Raises `ValueError` for a section or field that does not exist."""
    sections = {"model": ModelArguments, "data": DataArguments, "training": TrainingArguments}
    try:
        preset = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"Preset {path} is not a JSON file: {error}") from error
    if not isinstance(preset, dict):
        raise ValueError(f"Preset {path} must be a JSON object of the sections {', '.join(sections)}.")
    fields = {}
    for section, values in preset.items():
        if section not in sections or not isinstance(values, dict):
            raise ValueError(f"Preset {path}: {section!r} must be one of the sections {', '.join(sections)}.")
        known = [entry.name for entry in dataclasses.fields(sections[section]) if entry.init]
        for name in values.keys() - set(known):
            raise ValueError(f"Preset {path}: unknown field {name!r} in {section!r}{_did_you_mean(name, known)}")
        fields |= values
    return fields


def _did_you_mean(name: str, known) -> str:
    close = difflib.get_close_matches(name, known)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else "."


def _json_or_text(value: str):
    try:
        return json.loads(value.lower() if value.lower() in ("true", "false") else value)
    except ValueError:
        return value


# ---- Text to blocks -------------------------------------------------------------------------------------------------


def train_tokenizer(rows, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE on the texts of a (possibly streamed) dataset. A small corpus gives fewer words."""
    if not isinstance(rows, datasets.Dataset):
        rows = islice(rows, TOKENIZER_DOCUMENTS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((row["text"] for row in rows), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(model_args: ModelArguments, training_args: TrainingArguments, checkpoint: str | None, rows):
    """The checkpoint's tokenizer, the pretrained one asked for, or one trained on `rows` and saved beside the model."""
    pretrained = checkpoint or model_args.tokenizer_name or model_args.model_name_or_path
    if pretrained is None and training_args.local_process_index > 0:
        pretrained = training_args.output_dir  # the first process has just saved it there
    if pretrained is not None:
        return AutoTokenizer.from_pretrained(pretrained, trust_remote_code=model_args.trust_remote_code)
    tokenizer = train_tokenizer(rows, model_args.vocab_size)
    tokenizer.save_pretrained(training_args.output_dir)
    return tokenizer


def tokenize_and_pack(batch: dict, tokenizer, block_size: int, joined: bool) -> dict:
    """Rows of text -> rows of `block_size` token ids. Documents end with an end-of-text token; a rest is dropped."""
    rows = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    ends = [] if joined else [tokenizer.eos_token_id]
    stream = np.fromiter((token for row in rows for token in (*row, *ends)), dtype=np.int32)
    blocks = len(stream) // block_size
    return {"input_ids": stream[: blocks * block_size].reshape(blocks, block_size)}


def pack(corpus: Corpus, splits: dict, tokenizer, data_args: DataArguments) -> dict:
    """Every split as blocks of token ids. `datasets` caches the result of local and Hub data on disk."""
    if not corpus.joined and tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no end-of-text token to put between documents; pass --join_rows.")
    options = {"tokenizer": tokenizer, "block_size": data_args.block_size, "joined": corpus.joined}
    packed = {}
    for split, rows in splits.items():
        local = isinstance(rows, datasets.Dataset)
        workers = {"num_proc": data_args.preprocessing_num_workers, "desc": f"Packing {split}"} if local else {}
        packed[split] = rows.map(
            tokenize_and_pack, batched=True, batch_size=10_000, remove_columns=["text"], fn_kwargs=options, **workers
        )
        if local and len(packed[split]) == 0:
            raise ValueError(
                f"The {split} split of {corpus.name!r} has fewer than block_size={data_args.block_size} tokens "
                f"({len(rows)} rows)."
            )
    return packed


def collate(blocks: list[dict]) -> dict[str, torch.Tensor]:
    """Blocks -> {"input_ids", "labels"}, both [B, block_size]; the model shifts the labels itself."""
    input_ids = torch.tensor(np.array([block["input_ids"] for block in blocks], dtype=np.int64))
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def unigram_perplexity(blocks) -> float:
    """exp of the entropy of the blocks' own token frequencies: the best that any model without context could do."""
    counts = np.bincount(np.concatenate(blocks.with_format("numpy")["input_ids"][:]))
    shares = counts[counts > 0] / counts.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


# ---- Model ----------------------------------------------------------------------------------------------------------


def build_model(model_args: ModelArguments, tokenizer, block_size: int):
    """A model from scratch, its context as long as a block, or a checkpoint with changed configuration fields."""
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = build_config(model_args, block_size, vocab_size=len(tokenizer), **special)
    if config.vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size={config.vocab_size} of the model is below the tokenizer's {len(tokenizer)}.")
    if not model_args.model_name_or_path:
        return AutoModelForCausalLM.from_config(config)
    path, trust = model_args.model_name_or_path, model_args.trust_remote_code
    return AutoModelForCausalLM.from_pretrained(path, config=config, trust_remote_code=trust, dtype=torch.float32)


def build_config(model_args: ModelArguments, block_size: int, **from_tokenizer):
    """The checkpoint's configuration, or a new one that follows the block and the tokenizer, with the user's fields on top."""
    fields = model_args.config_fields()
    if model_args.model_name_or_path:
        path, trust = model_args.model_name_or_path, model_args.trust_remote_code
        _check_config_fields(fields, AutoConfig.from_pretrained(path, trust_remote_code=trust))
        return AutoConfig.from_pretrained(path, trust_remote_code=trust, **fields)
    if model_args.model_type not in CONFIG_MAPPING:
        close = _did_you_mean(model_args.model_type, CONFIG_MAPPING)
        raise ValueError(f"model_type={model_args.model_type!r} is no model type of Transformers{close}")
    defaults = CONFIG_MAPPING[model_args.model_type]()
    _check_config_fields(fields, defaults)
    derived = {"max_position_embeddings": block_size, **from_tokenizer}
    derived = {name: value for name, value in derived.items() if hasattr(defaults, name)}
    return AutoConfig.for_model(model_args.model_type, **{**derived, **fields})


def _check_config_fields(fields: dict, config) -> None:
    for name in fields:
        if not hasattr(config, name):
            known = _did_you_mean(name, config.to_dict())
            raise ValueError(f"{name!r} is no field of a {config.model_type!r} configuration{known}")


# ---- Resuming -------------------------------------------------------------------------------------------------------


def run_record(model_args: ModelArguments, data_args: DataArguments) -> dict:
    """What makes two runs the same; kept as `run.json` in the run's folder."""
    return {"model": dataclasses.asdict(model_args), "data": dataclasses.asdict(data_args)}


def checkpoint_to_resume(record: dict, training_args: TrainingArguments) -> str | None:
    """The checkpoint asked for, or the last complete one in the output folder if the same run made it.

    `Trainer` writes a checkpoint's `trainer_state.json` last; a folder without one is what a kill left.
    """
    output = Path(training_args.output_dir)
    if (asked := training_args.resume_from_checkpoint) is not None:
        if not Path(asked, "trainer_state.json").is_file():
            there = ", ".join(sorted(path.name for path in output.glob("checkpoint-*"))) or "none"
            raise ValueError(f"resume_from_checkpoint={asked!r}: there is no such checkpoint; {output} holds: {there}.")
        return asked
    checkpoints = [path.parent for path in output.glob("checkpoint-*/trainer_state.json")]
    if not checkpoints:
        return None
    before = json.loads((output / "run.json").read_text(encoding="utf-8"))
    changed = [
        f"{name}={value!r} (there {before[section].get(name)!r})"
        for section, fields in record.items()
        for name, value in fields.items()
        if value != before[section].get(name)
    ]
    if changed:
        raise ValueError(
            f"output_dir={str(output)!r} holds checkpoints of another run: {'; '.join(changed)}. "
            "Choose another --output_dir, or delete that one."
        )
    return str(max(checkpoints, key=lambda path: int(path.name.split("-")[1])))


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


# ---- The run --------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """What is trained on what. `blocks`: the held-out splits, packed; `checkpoint`: where to go on, or None."""

    training_args: TrainingArguments
    checkpoint: str | None
    corpus: Corpus
    tokenizer: Any
    model: Any
    block_size: int
    train_name: str
    train_blocks: Any
    blocks: dict


def _check_ranges(model_args: ModelArguments, training_args: TrainingArguments) -> None:
    """What the library would only refuse after the data are prepared."""
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(training_args, name) < 1:
            raise ValueError(f"{name}={getattr(training_args, name)}: must be at least 1.")
    if training_args.learning_rate < 0:
        raise ValueError(f"learning_rate={training_args.learning_rate}: must be at least 0.")
    for name in ("model_name_or_path", "tokenizer_name"):
        path = getattr(model_args, name)
        if path is not None and is_missing_path(path):
            raise ValueError(f"{name}={path!r}: there is no such folder.")


def prepare(argv: list[str]) -> Run:
    """Arguments, text, tokenizer, blocks and model. Raises `ValueError` or `OSError` for whatever a user can mend."""
    model_args, data_args, training_args = parse_arguments(argv)
    if data_args.streaming and training_args.max_steps <= 0:
        raise ValueError("streaming needs --max_steps: the length of the dataset is not known beforehand.")
    _check_ranges(model_args, training_args)
    build_config(model_args, data_args.block_size)  # whose errors should not wait for the text
    record = run_record(model_args, data_args)
    checkpoint = checkpoint_to_resume(record, training_args)
    with training_args.main_process_first(desc="preparing the data"):
        corpus = load_corpus(
            data_args.dataset,
            data_args.dataset_config,
            files={split: getattr(data_args, f"{split}_file") for split in ("train", "validation", "test")},
            text_column=data_args.text_column,
            join_rows=data_args.join_rows,
            streaming=data_args.streaming,
        )
        train_name, splits = training_splits(corpus, data_args.validation_fraction)
        tokenizer = load_tokenizer(model_args, training_args, checkpoint, splits[train_name])
        blocks = pack(corpus, splits, tokenizer, data_args)
    set_seed(training_args.seed)
    model = build_model(model_args, tokenizer, data_args.block_size)
    if training_args.process_index == 0:
        write_text(Path(training_args.output_dir, "run.json"), json.dumps(record, indent=2) + "\n")
    train_blocks = blocks.pop(train_name)
    size = data_args.block_size
    return Run(training_args, checkpoint, corpus, tokenizer, model, size, train_name, train_blocks, blocks)


def train(run: Run) -> LanguageModelTrainer:
    """Train, resuming where a checkpoint says so, and save the model with its tokenizer."""
    trainer = LanguageModelTrainer(
        model=run.model,
        args=run.training_args,
        data_collator=collate,
        train_dataset=run.train_blocks,
        eval_dataset=next(iter(run.blocks.values())),
        processing_class=run.tokenizer,
    )
    trainer.train(resume_from_checkpoint=run.checkpoint)
    trainer.save_model()
    trainer.save_state()
    return trainer


def evaluate(trainer: LanguageModelTrainer, blocks: dict) -> dict[str, tuple[float, float]]:
    """(perplexity, unigram perplexity) of every held-out split; each block starts without context."""
    return {
        split: (
            math.exp(trainer.evaluate(heldout, metric_key_prefix=split)[f"{split}_loss"]),
            unigram_perplexity(heldout),
        )
        for split, heldout in blocks.items()
    }


def parameter_counts(model) -> tuple[int, int]:
    """(all parameters, those that make λ from a token's projection)."""
    heads = sum(parameter.numel() for name, parameter in model.named_parameters() if "lambda_head" in name)
    return model.num_parameters(), heads


def announce(run: Run) -> None:
    """Say what is about to be trained on what."""
    parameters, lambda_parameters = parameter_counts(run.model)
    print(f"Text: {run.corpus.name}; training on {run.train_name}, evaluating on {', '.join(run.blocks)}.")
    if isinstance(run.train_blocks, datasets.Dataset):
        print(f"Training blocks: {len(run.train_blocks):,} of {run.block_size} tokens.")
    print(f"Model: {run.model.config.model_type}, {parameters:,} parameters ({lambda_parameters:,} of them make λ).")
    if run.checkpoint:
        print(f"Resuming from {run.checkpoint}.")


@torch.inference_mode()
def generate_sample(run: Run) -> tuple[str, str]:
    """Load the saved model as a user would and let it continue held-out text. Returns (prompt, continuation)."""
    output_dir, device = run.training_args.output_dir, run.training_args.device
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    model = AutoModelForCausalLM.from_pretrained(output_dir).to(device).eval()
    prompt = next(iter(run.blocks.values()))[0]["input_ids"][:SAMPLE_PROMPT]
    input_ids = torch.tensor([prompt], device=device)  # [1, prompt]
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=SAMPLE_TOKENS,
        do_sample=True,
        temperature=0.8,
        top_k=50,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.decode(prompt), tokenizer.decode(output[0, len(prompt) :])


def report(run: Run, argv: list[str], steps: int, perplexities: dict[str, tuple[float, float]], started: float) -> None:
    """Print perplexities and a sample, and write the model card with them."""
    for split, (perplexity, unigram) in perplexities.items():
        ratio = perplexity / unigram
        print(f"{split} perplexity {perplexity:.2f}, unigram perplexity {unigram:.2f}, ratio {ratio:.3f}")
    prompt, sample = generate_sample(run)
    print(f"\nPrompt: {prompt}\n\nSample: {sample}\n")

    output_dir, seconds = Path(run.training_args.output_dir), time.perf_counter() - started
    parameters, lambda_parameters = parameter_counts(run.model)
    world_size, on_gpu = run.training_args.world_size, run.training_args.device.type == "cuda"
    card = Template(MODEL_CARD.read_text(encoding="utf-8")).substitute(
        name=output_dir.name,
        command=shlex.join(["python", "train.py", *argv]),
        model_type=run.model.config.model_type,
        parameters=f"{parameters:,}",
        lambda_parameters=f"{lambda_parameters:,} ({lambda_parameters / parameters:.4%})",
        corpus=run.corpus.name,
        train_name=run.train_name,
        block_size=run.block_size,
        steps=f"{steps:,}",
        minutes=f"{seconds / 60:.1f}",
        processes="1 process" if world_size == 1 else f"{world_size} processes",
        device=torch.cuda.get_device_name() if on_gpu else f"a CPU with {os.cpu_count()} cores",
        versions=f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, datasets {datasets.__version__}",
        results="\n".join(
            f"| {split} | {perplexity:.2f} | {unigram:.2f} |" for split, (perplexity, unigram) in perplexities.items()
        ),
        prompt=prompt,
        sample=sample,
    )
    write_text(output_dir / "README.md", card)
    print(f"Model, tokenizer and card are in {output_dir}. {seconds:.0f} s in all.")


def main(argv: list[str]) -> None:
    """One training run, from arguments to model card."""
    started = time.perf_counter()
    try:
        run = prepare(argv)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    is_main_process = run.training_args.process_index == 0
    if is_main_process:
        announce(run)
    trainer = train(run)
    perplexities = evaluate(trainer, run.blocks)
    if is_main_process:
        report(run, argv, trainer.state.global_step, perplexities, started)


if __name__ == "__main__":
    main(sys.argv[1:])
