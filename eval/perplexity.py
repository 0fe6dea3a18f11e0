"""Perplexity of any causal language model, in units that compare models with different tokenizers.

    python -m eval.perplexity --model outputs/quickstart
    python -m eval.perplexity --model PATH --dataset notes.txt --window 2048 --stride 512

With NLL the negative log-likelihood, in nats, of all scored tokens of all texts:

    perplexity       = exp(NLL / scored tokens)      depends on the tokenizer
    word_perplexity  = exp(NLL / words)              words: maximal runs of non-white-space, as `str.split()` finds them
    bits_per_byte    = NLL / ln 2 / bytes            bytes of the texts in UTF-8

Every token of a text is scored once. The first is predicted from the tokenizer's start token (`bos_token`, or else
`eos_token`); without either it is not scored, though its word and bytes count. A text longer than `window` tokens is
read in windows of that length that end `stride` tokens further each time, and each window scores only the tokens that
the one before it did not reach. So every token after the first window has at least `window - stride` tokens of context
before it: a small stride measures the model with a long context and costs more forward passes. Texts never see each
other.
"""

import argparse
import json
import math
import sys
from itertools import groupby, islice
from typing import NamedTuple

import datasets
import evaluate
import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_loglinear  # noqa: F401  (registers the Auto classes)
from eval.corpus import is_missing_path, load_corpus

LONGEST_DEFAULT_WINDOW = 1024


class Window(NamedTuple):
    """`tokens` are read by the model; the last `scored` of them are predicted and counted."""

    tokens: list[int]
    scored: int


def strided_windows(tokens: list[int], window: int, stride: int) -> list[Window]:
    """Windows of at most `window` tokens that together score every token but the first exactly once.

    Raises:
        ValueError: `window` below 2, or `stride` outside 1 to window - 1 (a window's first token is never predicted).
    """
    if window < 2:
        raise ValueError(f"window={window} must be at least 2.")
    if not 1 <= stride < window:
        raise ValueError(f"stride={stride} must lie between 1 and window - 1 = {window - 1}.")
    windows, reached = [], 1
    while reached < len(tokens):
        end = min(len(tokens), max(window, reached + stride))
        windows.append(Window(tokens[max(0, end - window) : end], end - reached))
        reached = end
    return windows


def _batches(windows: list[Window], batch_size: int):
    """Windows of equal length, together: no padding, so nothing depends on how a model treats it."""
    for _, equal in groupby(sorted(windows, key=lambda window: len(window.tokens)), lambda window: len(window.tokens)):
        while batch := list(islice(equal, batch_size)):
            yield batch


@torch.inference_mode()
def negative_log_likelihood(model, windows: list[Window], batch_size: int = 8) -> float:
    """Sum, in nats, over the scored tokens of all windows."""
    total, model = 0.0, model.eval()
    with tqdm(total=len(windows), desc="Windows", unit="window") as progress:
        for batch in _batches(windows, batch_size):
            input_ids = torch.tensor([window.tokens for window in batch], device=model.device)  # [B, T]
            logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1].float()  # [B, T - 1, V]
            losses = F.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none")  # [B, T - 1]
            scored = torch.tensor([window.scored for window in batch], device=model.device)  # [B]
            from_end = torch.arange(losses.shape[1], 0, -1, device=model.device)  # [T - 1], 1 at the last token
            total += losses.double()[from_end <= scored[:, None]].sum().item()
            progress.update(len(batch))
    return total


class Perplexity(evaluate.Metric):
    """`Perplexity().compute(predictions=texts, model=path_or_model)`; needs no network for a local model.

    Args of `compute`:
        predictions: texts, each scored by itself.
        model: path or name of a causal language model, or a loaded one.
        tokenizer: a loaded tokenizer; default: the one beside the model.
        window: longest input in tokens. Default: the model's `max_position_embeddings`, at most 1024.
        stride: tokens that a window newly scores. Default: half a window.
        batch_size: windows in one forward pass. Default 8.

    Returns:
        dict: `perplexity`, `word_perplexity`, `bits_per_byte` (see the module's text) and the counts `tokens` (scored),
        `words`, `bytes` that they are taken over.

    Raises:
        ValueError: no token to score, or a `window` or `stride` out of range.
    """

    def _info(self):
        return evaluate.MetricInfo(
            description="Token-level and word-level perplexity and bits per byte, with strided windows.",
            citation="",
            inputs_description="predictions: texts; model: path or model; window, stride, batch_size: see the class",
            features=datasets.Features({"predictions": datasets.Value("string")}),
        )

    def _compute(self, predictions, model, tokenizer=None, window=None, stride=None, batch_size=8):
        if isinstance(model, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
            model = AutoModelForCausalLM.from_pretrained(model)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(model.config.name_or_path)
        if window is None:
            window = min(getattr(model.config, "max_position_embeddings", math.inf), LONGEST_DEFAULT_WINDOW)
        stride = window // 2 if stride is None else stride

        start = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
        rows = tokenizer(predictions, add_special_tokens=False, verbose=False)["input_ids"]
        windows = [piece for row in rows for piece in strided_windows(start + row, window, stride)]
        tokens = sum(piece.scored for piece in windows)
        if tokens == 0:
            raise ValueError(f"predictions: {len(predictions)} texts without a token to score.")
        nll = negative_log_likelihood(model, windows, batch_size)
        words = sum(len(text.split()) for text in predictions)
        size = sum(len(text.encode()) for text in predictions)
        return {
            "perplexity": math.exp(nll / tokens),
            "word_perplexity": math.exp(nll / words) if words else math.inf,
            "bits_per_byte": nll / math.log(2) / size,
            "tokens": tokens,
            "words": words,
            "bytes": size,
        }


def main(argv: list[str] | None = None) -> dict:
    """Command line: print the figures of one model on one split as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="path or name of a causal language model")
    parser.add_argument("--tokenizer", help="path or name of its tokenizer (default: the model's)")
    parser.add_argument("--dataset", help="Hub dataset, local file or folder (default: the text inside Python)")
    parser.add_argument("--dataset_config", help="configuration of a Hub dataset")
    parser.add_argument("--split", help="train, validation or test (default: test, or else validation, or else train)")
    parser.add_argument("--text_column", default="text", help="column that holds the text")
    parser.add_argument("--join_rows", action="store_true", help="rows are lines of one text (text files always are)")
    parser.add_argument("--window", type=int, help="longest input (default: max_position_embeddings, at most 1024)")
    parser.add_argument("--stride", type=int, help="tokens that a window newly scores (default: half a window)")
    parser.add_argument("--batch_size", type=int, default=8, help="windows in one forward pass")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that the checkpoint carries")
    args = parser.parse_args(argv)

    try:
        result = score(args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps(result, indent=2))
    return result


def score(args: argparse.Namespace) -> dict:
    """What `main` prints. Raises `ValueError` or `OSError` for whatever a user can mend."""
    for option in ("model", "tokenizer"):
        path = getattr(args, option)
        if path is not None and is_missing_path(path):
            raise ValueError(f"{option}={path!r}: there is no such folder.")
    corpus = load_corpus(args.dataset, args.dataset_config, text_column=args.text_column, join_rows=args.join_rows)
    split = args.split or next(name for name in ("test", "validation", "train") if name in corpus.splits)
    if split not in corpus.splits:
        raise ValueError(f"split={split!r}: {corpus.name} has {', '.join(corpus.splits)}.")
    texts = corpus.splits[split]["text"][:]
    trust = args.trust_remote_code
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype, trust_remote_code=trust).to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model, trust_remote_code=trust)
    result = Perplexity().compute(
        predictions=["".join(texts)] if corpus.joined else texts,
        model=model,
        tokenizer=tokenizer,
        window=args.window,
        stride=args.stride,
        batch_size=args.batch_size,
    )
    return {"model": args.model, "text": f"{corpus.name}, {split}", **result}


if __name__ == "__main__":
    main()
