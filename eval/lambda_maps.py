"""What the level weights do: heat maps of lambda per level and token, and two numbers that say how uniform and how
content-dependent they are.

    python -m eval.lambda_maps --model CHECKPOINT --text "Some text ..."
    python -m eval.lambda_maps --model CHECKPOINT --pairs 8 --length 128    # a recall example

For every layer and head:

- entropy over levels: of lambda divided by its sum over the levels that the position can use, averaged over tokens,
  divided by the log of their number: 1 is uniform, 0 means one level;
- variance over tokens: of lambda divided by its mean over tokens, averaged over levels: 0 means that the text is
  ignored.

A position t can use level 0 and the levels of the set bits of t; only these count.
"""

import argparse
import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_loglinear  # noqa: F401  registers the model
from eval import plots, records
from eval.mqar import MqarTask


def level_weights(model, ids):
    """lambda of every layer: ids [1, T] -> [layers, T, H, L]. Raises ValueError for a model without level weights."""
    mixers = [m for m in model.modules() if hasattr(m, "lambda_head")]
    if not mixers:
        raise ValueError("the model has no level weights: its lambda_mode is 'fixed', or it is no log-linear model")
    found = []
    hooks = [m.lambda_head.register_forward_hook(lambda _, __, output: found.append(output[0].float())) for m in mixers]
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found).cpu()


def usable(length, levels):
    """Which levels a position reads, [T, L]: level 0 and those of its set bits, the last one for all above."""
    positions = torch.arange(length)[:, None]
    bits = torch.arange(max(levels - 1, length.bit_length()))
    used = (positions >> bits & 1).bool()
    top = used[:, levels - 2 :].any(1, keepdim=True)
    return torch.cat([torch.ones(length, 1, dtype=torch.bool), used[:, : levels - 2], top], 1)[:, :levels]


def numbers(weights):
    """Entropy and variance per layer and head from lambda [layers, T, H, L]: two tensors [layers, H]."""
    _, length, _, levels = weights.shape
    mask = usable(length, levels)[:, None]  # [T, 1, L]
    share = torch.where(mask, weights, 0)
    share = share / share.sum(-1, keepdim=True)
    entropy = -(share * share.clamp(min=1e-12).log()).sum(-1)  # [layers, T, H]
    choices = mask.sum(-1).float()  # [T, 1]
    several = choices[:, 0] > 1
    entropy = (entropy[:, several] / choices[several].log()).mean(1)
    count = mask.sum(0)  # [1, L]
    mean = torch.where(mask, weights, 0).sum(1) / count.clamp(min=1)  # [layers, H, L]
    squares = torch.where(mask, (weights / mean[:, None].clamp(min=1e-12) - 1).square(), 0).sum(1) / count.clamp(min=1)
    return entropy, squares[..., count[0] > 1].mean(-1)


def recall_example(vocab_size, pairs, length, seed=0):
    """One MQAR example and a label per token: ids [1, T], labels [T]."""
    ids, positions, _ = MqarTask(vocab_size, length, pairs).batch(1, torch.Generator().manual_seed(seed))
    labels = ["key", "value"] * pairs + [""] * (length - 2 * pairs)
    for position in positions[0].tolist():
        labels[position] = "question"
    return ids, labels


def plot(result, path):
    """One panel per layer and head: level (rows) against token (columns); levels that a position cannot use are blank."""
    weights = torch.tensor(result["weights"])  # [layers, T, H, L]
    layers, length, heads, levels = weights.shape
    blank = torch.where(usable(length, levels)[:, None], weights, torch.nan)
    figure, axes = plots.pyplot().subplots(
        layers * heads, 1, figsize=(max(8, length / 9), 1.35 * layers * heads + 0.8), squeeze=False, sharex=True
    )
    for row, axis in enumerate(axes[:, 0]):
        layer, head = divmod(row, heads)
        image = axis.imshow(
            blank[layer, :, head].T.numpy(), aspect="auto", origin="lower", interpolation="nearest", cmap="viridis"
        )
        entropy, variance = result["entropy"][layer][head], result["variance"][layer][head]
        axis.set_title(f"layer {layer}, head {head}: entropy {entropy:.3f}, variance {variance:.4f}", fontsize=8)
        axis.set_ylabel("level", fontsize=7)
        figure.colorbar(image, ax=axis, pad=0.01)
    axes[-1, 0].set_xticks(range(length), result["tokens"], rotation=90, fontsize=5)
    return plots.save(figure, path)


def analyse(model, ids, tokens, **about):
    """Everything that the plot and the records need, as plain lists."""
    weights = level_weights(model, ids)
    entropy, variance = numbers(weights)

    def short(x):
        return [round(v, 4) for v in x] if x and not isinstance(x[0], list) else [short(v) for v in x]

    return {
        **about,
        "lambda_mode": model.config.lambda_mode,
        "mean_entropy": round(entropy.mean().item(), 5),
        "mean_variance": round(variance.mean().item(), 5),
        "entropy": short(entropy.tolist()),
        "variance": short(variance.tolist()),
        "tokens": tokens,
        "weights": short(weights.tolist()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub name")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="text to read, with the checkpoint's tokenizer")
    source.add_argument("--pairs", type=int, help="draw a recall example with so many pairs")
    parser.add_argument("--length", type=int, default=128, help="tokens of the recall example, and most tokens of a text")
    parser.add_argument("--about", default="", help="what to call the model in the report")
    parser.add_argument("--output", default="lambda_maps.json", help="numbers and weights; the plot stands beside it")
    a = parser.parse_args()
    try:
        model = AutoModelForCausalLM.from_pretrained(a.model).eval()
        if a.text is None:
            ids, tokens = recall_example(model.config.vocab_size, a.pairs, a.length)
        else:
            tokenizer = AutoTokenizer.from_pretrained(a.model)
            ids = tokenizer(a.text, return_tensors="pt").input_ids[:, : a.length]
            if ids.numel() == 0:
                raise ValueError("text is empty")
            tokens = [tokenizer.decode([i]) for i in ids[0].tolist()]
        result = analyse(model, ids, tokens, about=a.about or pathlib.Path(a.model).name)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    records.write(a.output, json.dumps(result) + "\n")
    picture = plot(result, pathlib.Path(a.output).with_suffix(".png"))
    print(f"entropy over levels {result['mean_entropy']}, variance over tokens {result['mean_variance']}; plot: {picture}")


if __name__ == "__main__":
    main()
