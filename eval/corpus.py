"""Where text comes from: the Hub, local files, or the reference manual inside every Python.

``load_corpus`` answers with named splits of one column, ``text``. ``train.py`` and the evaluations of this folder all
read their text here, so that the same ``--dataset`` means the same text everywhere.
"""

import platform
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub.utils import logging as hub_logging

BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
SPLIT_PREFIXES = {"train": ("train",), "validation": ("valid", "val", "dev"), "test": ("test",)}
LOCAL_FILES_HINT = (
    "Local text needs no network: pass a folder (--dataset FOLDER with train, valid and test files) or single files "
    "(--train_file train.txt --validation_file valid.txt; .txt, .jsonl or .parquet), "
    "or leave --dataset out to use the text that ships inside Python."
)


class Corpus(NamedTuple):
    """Text by split. ``splits`` maps "train", "validation", "test" to datasets of one string column, ``text``.

    ``joined``: the rows are the lines of one running text, line breaks included; otherwise each row is a document.
    """

    name: str
    splits: dict
    joined: bool


def load_corpus(
    dataset: str | None = None,
    config: str | None = None,
    *,
    files: dict[str, str] | None = None,
    text_column: str = "text",
    join_rows: bool = False,
    streaming: bool = False,
) -> Corpus:
    """Load text and name its splits.

    Args:
        dataset: a local file, a local folder with train*/valid*/test* files, a dataset id of the Hub, or None for the
            Python reference (``pydoc_data.topics``).
        config: configuration of a Hub dataset, such as "wikitext-103-raw-v1".
        files: paths by split ("train", "validation", "test"); excludes `dataset`.
        text_column: the column that holds the text (JSONL, parquet, Hub). Default "text".
        join_rows: the rows are lines of one running text, as in WikiText. Text files always are.
        streaming: read a Hub dataset's training split while training, without a download first.

    Raises:
        ValueError: nothing to read, no network, a file that is not UTF-8, an unknown file type, a missing column.
    """
    files = {split: path for split, path in (files or {}).items() if path is not None}
    if dataset is not None and files:
        raise ValueError(f"dataset={dataset!r} and files for {', '.join(files)} were both given: pass one of the two.")
    if streaming and (dataset is None or Path(dataset).exists()):
        raise ValueError("streaming=True reads datasets of the Hub; local files and the built-in text need none.")

    if dataset is None and not files:
        return _python_reference()
    if dataset is not None and not Path(dataset).exists():
        name, splits = dataset, _from_hub(dataset, config, streaming)
    else:
        name = dataset or ", ".join(files.values())
        files = files or _files_of(Path(dataset))
        join_rows = join_rows or BUILDERS.get(Path(next(iter(files.values()))).suffix) == "text"
        splits = {split: _from_file(Path(path)) for split, path in files.items()}

    splits = {split: _only_text(rows, split, text_column) for split, rows in splits.items()}
    return Corpus(name, splits, join_rows)


def training_splits(corpus: Corpus, validation_fraction: float = 0.05) -> tuple[str, dict]:
    """Name the split to train on, and answer with all splits, at least one of them for evaluation.

    A corpus without a training split is trained on its validation split and evaluated on its test split. One with a
    single split is trained on its beginning and evaluated on the last `validation_fraction` of its rows.

    Raises:
        ValueError: `validation_fraction` not between 0 and 1, or a single split too small or streamed.
    """
    train_name = next((name for name in ("train", "validation") if name in corpus.splits), None)
    if train_name is None:
        raise ValueError(f"{corpus.name!r} has no train or validation split, only {', '.join(corpus.splits)}.")
    if len(corpus.splits) > 1:
        return train_name, corpus.splits
    return "train", _hold_out(corpus.splits[train_name], validation_fraction)


def _python_reference() -> Corpus:
    """The language reference behind Python's ``help()``: every tenth topic is held out, repeated paragraphs dropped."""
    seen: set[str] = set()
    documents = []
    for topic in sorted(topics):
        fresh = []
        for paragraph in topics[topic].strip().split("\n\n"):
            if paragraph.strip() not in seen:
                seen.add(paragraph.strip())
                fresh.append(paragraph)
        if fresh:
            documents.append("\n\n".join(fresh))
    train = [text for index, text in enumerate(documents) if index % 10 != 9]
    name = f"pydoc_data.topics of Python {platform.python_version()}"
    return Corpus(name, {"train": _rows(train), "validation": _rows(documents[9::10])}, joined=False)


def _rows(texts: list[str]) -> Dataset:
    return Dataset.from_dict({"text": texts})


def is_missing_path(name: str) -> bool:
    """Whether `name` can only be meant as a path, not as a name on the Hub, and nothing is there."""
    return (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).exists()


def _from_hub(dataset: str, config: str | None, streaming: bool) -> dict:
    if is_missing_path(dataset) or Path(dataset).suffix in BUILDERS:
        raise ValueError(f"dataset={dataset!r}: there is no such file or folder.")
    print(f"Reading {dataset} from the Hub ...", file=sys.stderr)
    hub_logging.set_verbosity_error()  # its reports of every retry would bury the one message that counts
    try:
        loaded = load_dataset(dataset, config, streaming=streaming)
    except (ConnectionError, DatasetNotFoundError) as error:
        raise ValueError(f"dataset={dataset!r} cannot be read from the Hub: {error}\n{LOCAL_FILES_HINT}") from error
    splits = {split: rows for split, rows in loaded.items() if split in SPLIT_PREFIXES}
    if streaming:  # the held-out splits are read again and again
        splits |= {split: Dataset.from_list(list(rows)) for split, rows in splits.items() if split != "train"}
    return splits


def _files_of(path: Path) -> dict[str, Path]:
    """Files by split: `path` itself, or what its names say where it is a folder."""
    if path.is_file():
        return {"train": path}
    files: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        for split, prefixes in SPLIT_PREFIXES.items():
            if file.suffix in BUILDERS and file.stem.lower().startswith(prefixes):
                if split in files:
                    raise ValueError(f"dataset={str(path)!r} has two {split} files: {files[split].name}, {file.name}.")
                files[split] = file
    if not {"train", "validation"} & set(files):
        raise ValueError(
            f"dataset={str(path)!r} holds no text to train on: name the files train, valid and test, "
            f"ending in {', '.join(BUILDERS)}."
        )
    return files


def _from_file(path: Path) -> Dataset:
    if path.suffix not in BUILDERS:
        raise ValueError(f"{str(path)!r} is of no known type: allowed are {', '.join(BUILDERS)}.")
    if not path.is_file():
        raise ValueError(f"{str(path)!r}: there is no such file.")
    if path.stat().st_size == 0:
        raise ValueError(f"{str(path)!r} is empty.")
    options = {"keep_linebreaks": True} if BUILDERS[path.suffix] == "text" else {}
    try:
        return load_dataset(BUILDERS[path.suffix], data_files=str(path), split="train", **options)
    except (DatasetGenerationError, UnicodeDecodeError) as error:
        cause = error.__cause__ or error
        reason = "is not UTF-8 text" if isinstance(cause, UnicodeDecodeError) else "cannot be read"
        raise ValueError(f"{str(path)!r} {reason}: {cause}") from error


def _only_text(rows, split: str, text_column: str):
    """Drop every column but the text and call it "text"."""
    columns = rows.column_names
    if columns is not None and text_column not in columns:  # None: a stream that does not say
        raise ValueError(f"text_column={text_column!r} is not in the {split} split; its columns are {columns}.")
    rows = rows.select_columns([text_column])
    return rows if text_column == "text" else rows.rename_column(text_column, "text")


def _hold_out(rows, fraction: float) -> dict:
    if not isinstance(rows, Dataset):
        raise ValueError("A streamed dataset needs a validation or test split of its own.")
    if not 0 < fraction < 1:
        raise ValueError(f"validation_fraction={fraction} must lie between 0 and 1.")
    heldout = max(1, round(len(rows) * fraction))
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows are too few to hold some out for validation; pass a validation file.")
    return {
        "train": rows.select(range(len(rows) - heldout)),
        "validation": rows.select(range(len(rows) - heldout, len(rows))),
    }
