"""Small random models and ragged batches that several test modules share."""

import torch

from modeling_loglinear import LogLinearConfig, LogLinearForCausalLM

CHUNK = 16
VOCABULARY = 97


def small_model(seed=0, **fields):
    """Two layers, random lambda (so that every level counts), 16-token chunks, 7 levels: text beyond 64 shares the top one."""
    sizes = dict(
        hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=2, num_hidden_layers=2, vocab_size=VOCABULARY,
        chunk_size=CHUNK, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LogLinearForCausalLM(LogLinearConfig(**sizes | fields)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("lambda_head.down") or name.endswith("lambda_head.scale"):
            torch.nn.init.normal_(parameter, std=1.0)
        elif name.endswith("A_log"):
            torch.nn.init.uniform_(parameter, -3.0, 1.0)  # some heads remember everything
    return model


def random_tokens(*shape, seed=0):
    return torch.randint(5, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded(rows, side):
    """Rows of different lengths -> (input_ids, attention_mask) [B, T]; side "left", "right" or "mixed" (by turns)."""
    T = max(map(len, rows))
    input_ids, mask = torch.zeros(len(rows), T, dtype=torch.long), torch.zeros(len(rows), T, dtype=torch.long)
    for index, row in enumerate(rows):
        left = side == "left" or (side == "mixed" and index % 2)
        place = slice(T - len(row), T) if left else slice(0, len(row))
        input_ids[index, place], mask[index, place] = row, 1
    return input_ids, mask
