"""Bytes of a cache against the text it is made for, beside the keys and values of a Llama of the same width and depth.

    python -m eval.benchmarks.cache

24 layers of width 1024 (32 heads of 64, state 128, one group), bfloat16, one row. `max_position_embeddings` is the length of
the text; within one model the bytes do not change with the text at all. Counted on the meta device, so nothing is allocated.
"""

import torch
import transformers
from transformers import LlamaConfig

from modeling_loglinear import FenwickCache, LogLinearConfig, LogLinearForCausalLM

LENGTHS = (1_000, 4_000, 16_000, 64_000, 1_000_000)
LAYERS = 24


def cache_bytes(length):
    """Bytes of the cache of a model for texts of `length` tokens, and those of one level of its state in all layers."""
    config = LogLinearConfig(
        hidden_size=1024, num_heads=32, head_dim=64, state_size=128, n_groups=1, num_hidden_layers=LAYERS, vocab_size=64,
        max_position_embeddings=length, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = LogLinearForCausalLM(config).to(torch.bfloat16).eval()
    cache = FenwickCache(config)
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.int64, device="meta"), cache=cache)
    return cache.nbytes(), LAYERS * cache.layers[0].levels[:, 0].nbytes


def llama_bytes(length):
    config = LlamaConfig(hidden_size=1024, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=LAYERS)
    return 2 * 2 * LAYERS * length * config.num_key_value_heads * config.head_dim


def main():
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print("| tokens | cache, MiB | Llama's keys and values, MiB |\n|---|---|---|")
    for length in LENGTHS:
        print(f"| {length:,} | {cache_bytes(length)[0] / 2**20:.1f} | {llama_bytes(length) / 2**20:,.1f} |")


if __name__ == "__main__":
    main()
