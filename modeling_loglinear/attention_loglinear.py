"""Log-linear attention: the definition, the tree that computes it in parallel, and the step that decodes one token.

    level(i, j) = bit_length(i XOR j)
    o_i = sum_{j <= i} lambda_i[min(level(i, j), L - 1)] * exp(g_{j+1} + ... + g_i) * (q_i . k_j) * v_j

(Guo et al., arXiv 2506.04761, section 3; lambda is the subject of arXiv 2605.06946.) Seen from position i, the past is a
list of blocks of 1, 2, 4, ... tokens, one per set bit of i: a Fenwick tree. A block carries one weight lambda per level.

Letters, the same in this whole package:

    B batch            T tokens            C chunk size          S chunks of all sequences together
    H value heads      G key groups        N key size            P value size
    L levels           K levels above a chunk that a state keeps

This file knows tensors only; the cache and the model live in their own files.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F

try:
    from .triton_loglinear import decode_step as triton_decode_step
    from .triton_loglinear import is_supported as triton_is_supported
    from .triton_loglinear import tree_attention as triton_tree_attention
except ImportError:  # Triton is not installed: the torch backend serves every device
    triton_decode_step = triton_is_supported = triton_tree_attention = None


CHUNK_SIZES = (16, 32, 64, 128)
BACKENDS = ("auto", "reference", "torch", "triton")


class LogLinearState(NamedTuple):
    """What a sequence leaves behind: enough to go on with it as if it had never been cut.

    The *tail* is a ring: the token at position p stands in slot `p % (2 * chunk_size)`. It holds the positions
    `merged_chunks * chunk_size <= p < lengths`; older tokens live on only as blocks in `levels`.

    Args:
        key (`torch.Tensor` of shape `[B, 2C, G, N]`): keys of the tail.
        value (`torch.Tensor` of shape `[B, 2C, H, P]`): values of the tail.
        log_decay (`torch.Tensor` of shape `[B, 2C, H]`): log decays of the tail.
        levels (`torch.Tensor` of shape `[B, K, H, N, P]`, float32): entry l < K - 1 is the block of `2**l` chunks that
            bit l of `merged_chunks` names (undefined where the bit is 0); entry K - 1 is everything older. All are decayed
            up to the first position of the tail. K = max(1, L - 1 - log2(C)).
        merged_chunks (`torch.Tensor` of shape `[B]`, int64): chunks that moved from the tail into `levels`.
        lengths (`torch.Tensor` of shape `[B]`, int64): tokens seen, per row.
    """

    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    levels: torch.Tensor
    merged_chunks: torch.Tensor
    lengths: torch.Tensor


def state_levels(num_levels: int, chunk_size: int) -> int:
    """K, the levels that a state keeps above a chunk: `max(1, L - 1 - log2(C))`."""
    return max(1, num_levels - chunk_size.bit_length())


def empty_state(batch_size, num_groups, num_heads, state_size, head_dim, num_levels, chunk_size, dtype, device):
    """The state before the first token: a `LogLinearState` of zeros."""
    accumulate = torch.promote_types(dtype, torch.float32)
    tail = (batch_size, 2 * chunk_size)
    levels = (batch_size, state_levels(num_levels, chunk_size), num_heads, state_size, head_dim)
    return LogLinearState(
        key=torch.zeros(*tail, num_groups, state_size, dtype=dtype, device=device),
        value=torch.zeros(*tail, num_heads, head_dim, dtype=dtype, device=device),
        log_decay=torch.zeros(*tail, num_heads, dtype=accumulate, device=device),
        levels=torch.zeros(levels, dtype=accumulate, device=device),
        merged_chunks=torch.zeros(batch_size, dtype=torch.int64, device=device),
        lengths=torch.zeros(batch_size, dtype=torch.int64, device=device),
    )


def advanced(lengths, merged_chunks, new_tokens, chunk_size):
    """(lengths, merged_chunks) after `new_tokens` more: a chunk is merged once two full ones and one token follow it."""
    lengths = lengths + new_tokens
    return lengths, torch.maximum(merged_chunks, (lengths + chunk_size - 1) // chunk_size - 2)


def loglinear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    level_weights: torch.Tensor,
    *,
    chunk_size: int = 64,
    initial_state: LogLinearState | None = None,
    return_final_state: bool = False,
    lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, LogLinearState | None]:
    r"""Log-linear attention (arXiv 2506.04761, equation 4 with the decay of Mamba-2) in O(T log T) time and O(T) memory.

    Args:
        query (`torch.Tensor` of shape `[B, T, G, N]`): head h of the values reads group `h // (H / G)`.
        key (`torch.Tensor` of shape `[B, T, G, N]`).
        value (`torch.Tensor` of shape `[B, T, H, P]`).
        log_decay (`torch.Tensor` of shape `[B, T, H]`): natural logarithm of the decay at each token, <= 0 and finite;
            float32, or float64 with float64 inputs.
        level_weights (`torch.Tensor` of shape `[B, T, H, L]`): the weight lambda of each level, >= 0, any float dtype.
            Levels >= L share the last weight, so any length is allowed.
        chunk_size (`int`, defaults to 64): one of 16, 32, 64, 128. It changes the speed, never the result.
        initial_state (`LogLinearState`, *optional*): state after the preceding tokens. It is not changed. Positions go on
            at its `lengths`. With `cu_seqlens` its batch is the number of sequences.
        return_final_state (`bool`, defaults to `False`): also return the state after the last token.
        lengths (`torch.Tensor` of shape `[B]`, *optional*): real tokens of each row, at its front; `None` means all T.
            Outputs at t >= lengths are 0, and nothing there has an influence or a gradient.
        cu_seqlens (`torch.Tensor` of shape `[num_seqs + 1]`, int32 or int64, *optional*): borders of the sequences packed
            into the one row (B == 1), from 0 to T.
        backend (`str`, defaults to `"auto"`): `"reference"` is the O(T^2) formula, `"torch"` the tree in PyTorch,
            `"triton"` the GPU kernels; `"auto"` takes triton for CUDA tensors that it supports, else torch.

    Returns:
        The output, `[B, T, H, P]` in the dtype of `value`, and the final `LogLinearState` or `None`.

    Raises:
        ValueError: for shapes, dtypes or sizes that do not fit; on the CPU also for a log decay > 0 or not finite and
            for `lengths` or `cu_seqlens` out of range (on a GPU that check would wait for the device).
    """
    _check_arguments(query, key, value, log_decay, level_weights, chunk_size, backend)
    num_seqs = _check_sequences(query, lengths, cu_seqlens)
    _check_values(log_decay, query.shape[1], lengths, cu_seqlens)
    if initial_state is not None:
        _check_state(initial_state, num_seqs, query, value, level_weights, chunk_size)
    if initial_state is None and not return_final_state and backend != "reference":
        tree_attention = _choose_tree(backend, query, value, level_weights, chunk_size)
        return tree_attention(
            query, key, value, log_decay, level_weights, chunk_size=chunk_size, lengths=lengths, cu_seqlens=cu_seqlens
        )
    counters = None if initial_state is None else (initial_state.lengths, initial_state.merged_chunks)
    positions = SpanPositions(query.shape[:2], chunk_size, value.device, counters, lengths, cu_seqlens)
    return loglinear_attention_span(
        query, key, value, log_decay, level_weights, positions,
        state=initial_state, return_final_state=return_final_state, backend=backend,
    )  # fmt: skip


def loglinear_attention_step(query, key, value, log_decay, level_weights, state, *, positions=None, backend="auto"):
    """One token per row: what `loglinear_attention` gives for T = 1, but written into `state` in place.

    The counters `lengths` and `merged_chunks` stay as they are, since all layers of a model share them: the caller sets
    them to `advanced(...)` once. No gradient flows.

    Args:
        query (`torch.Tensor` of shape `[B, G, N]`).
        key (`torch.Tensor` of shape `[B, G, N]`).
        value (`torch.Tensor` of shape `[B, H, P]`).
        log_decay (`torch.Tensor` of shape `[B, H]`).
        level_weights (`torch.Tensor` of shape `[B, H, L]`).
        state (`LogLinearState`): changed in place, apart from its counters.
        positions (`StepPositions`, *optional*): made from the same counters; pass one to all layers of a model.
        backend (`str`, defaults to `"auto"`): as in `loglinear_attention`; `"reference"` steps like `"torch"`.

    Returns:
        The output, `[B, H, P]`; 0 in rows that are not active.
    """
    chunk_size = state.key.shape[1] // 2
    if _use_triton(backend, query, value, level_weights, chunk_size):
        active = None if positions is None else positions.active
        return triton_decode_step(query, key, value, log_decay, level_weights, state, active)
    if positions is None:
        positions = StepPositions(state.lengths, state.merged_chunks, chunk_size)
    return _torch_decode_step(query, key, value, log_decay, level_weights, state, positions)


# --------------------------------------------------------------------------------------------------------------- checks


def _check_arguments(query, key, value, log_decay, level_weights, chunk_size, backend):
    if backend not in BACKENDS:
        raise ValueError(f"`backend` is {backend!r}, but must be one of {', '.join(map(repr, BACKENDS))}.")
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"`chunk_size` is {chunk_size!r}, but must be one of {', '.join(map(str, CHUNK_SIZES))}.")
    if query.dim() != 4 or value.dim() != 4:
        raise ValueError(
            "`query` must be [B, T, G, N] and `value` [B, T, H, P], "
            f"but their shapes are {list(query.shape)} and {list(value.shape)}."
        )
    B, T, G, _ = query.shape
    H = value.shape[2]
    if min(*query.shape, *value.shape) == 0:
        raise ValueError(
            f"`query` and `value` need at least one element in every dimension, "
            f"but their shapes are {list(query.shape)} and {list(value.shape)}."
        )
    for name, tensor, shape in (
        ("key", key, query.shape),
        ("value", value, (B, T, H, value.shape[3])),
        ("log_decay", log_decay, (B, T, H)),
        ("level_weights", level_weights, (B, T, H, level_weights.shape[-1])),
    ):
        if tensor.shape != shape:
            raise ValueError(f"`{name}` must have the shape {list(shape)}, but has {list(tensor.shape)}.")
    if H % G:
        raise ValueError(f"`query` has {G} groups, which must divide the {H} heads of `value`.")
    if level_weights.shape[-1] == 0:
        raise ValueError("`level_weights` has 0 levels, but needs at least 1.")
    for name, tensor in (("query", query), ("key", key), ("value", value), ("level_weights", level_weights)):
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` has the dtype {tensor.dtype}, but must be a floating point type.")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"`query`, `key` and `value` must share one dtype, but have {query.dtype}, {key.dtype} and {value.dtype}."
        )
    expected = torch.float64 if value.dtype == torch.float64 else torch.float32
    if log_decay.dtype != expected:
        raise ValueError(f"`log_decay` has the dtype {log_decay.dtype}, but must be {expected} when `value` is {value.dtype}.")


def _check_sequences(query, lengths, cu_seqlens):
    """Checks how the tokens are split into sequences and returns the number of sequences."""
    B = query.shape[0]
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("`lengths` and `cu_seqlens` exclude each other: pass rows or one packed row.")
    for name, tensor in (("lengths", lengths), ("cu_seqlens", cu_seqlens)):
        if tensor is not None and (tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64)):
            raise ValueError(
                f"`{name}` must be a 1-D int32 or int64 tensor, but has the shape {list(tensor.shape)} and is {tensor.dtype}."
            )
    if lengths is not None and lengths.shape[0] != B:
        raise ValueError(f"`lengths` has {lengths.shape[0]} entries, but must have one for each of the {B} rows.")
    if cu_seqlens is None:
        return B
    if B != 1:
        raise ValueError(f"`cu_seqlens` needs one packed row, but `query` has {B} rows.")
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"`cu_seqlens` has {cu_seqlens.shape[0]} entries, but needs at least 2: 0, ..., T.")
    return cu_seqlens.shape[0] - 1


def _check_values(log_decay, T, lengths, cu_seqlens):
    """Checks that look at values, made only where they neither wait for a device nor break a trace."""
    readable = not (torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None)
    if not readable or log_decay.device.type != "cpu":
        return
    if lengths is not None and not ((lengths >= 0) & (lengths <= T)).all():
        raise ValueError(f"`lengths` is {lengths.tolist()}, but every entry must be from 0 to T = {T}.")
    if lengths is not None:  # behind the lengths anything may stand
        log_decay = log_decay[torch.arange(T) < lengths[:, None]]
    if not ((log_decay <= 0) & (log_decay > -torch.inf)).all():
        raise ValueError(
            f"`log_decay` must be finite and <= 0, but ranges from {log_decay.min().item()} to {log_decay.max().item()}."
        )
    if cu_seqlens is not None:
        borders = cu_seqlens.tolist()
        if borders != sorted(borders) or borders[0] != 0 or borders[-1] != T:
            raise ValueError(f"`cu_seqlens` is {borders}, but must rise from 0 to T = {T}.")


def _check_state(state, num_seqs, query, value, level_weights, chunk_size):
    G, N = query.shape[2:]
    H, P = value.shape[2:]
    L = level_weights.shape[-1]
    for name, shape in (
        ("key", (num_seqs, 2 * chunk_size, G, N)),
        ("value", (num_seqs, 2 * chunk_size, H, P)),
        ("log_decay", (num_seqs, 2 * chunk_size, H)),
        ("levels", (num_seqs, state_levels(L, chunk_size), H, N, P)),
        ("merged_chunks", (num_seqs,)),
        ("lengths", (num_seqs,)),
    ):
        if getattr(state, name).shape != shape:
            raise ValueError(
                f"`initial_state.{name}` has the shape {list(getattr(state, name).shape)}, but must have {list(shape)} here: "
                "the state comes from another batch size, model or chunk size."
            )


def _use_triton(backend, query, value, level_weights, chunk_size):
    if backend not in ("auto", "triton") or (backend == "auto" and not query.is_cuda):
        return False
    supported = triton_is_supported is not None and triton_is_supported(query, value, level_weights, chunk_size)
    if backend == "triton" and not supported:
        raise ValueError(
            "`backend` is 'triton', but the kernels do not support "
            f"query {list(query.shape)} {query.dtype} on {query.device}, value {list(value.shape)}, chunk size {chunk_size}, "
            "or Triton is not installed; use 'auto' or 'torch'."
        )
    return supported


def _choose_tree(backend, query, value, level_weights, chunk_size):
    return triton_tree_attention if _use_triton(backend, query, value, level_weights, chunk_size) else _torch_tree_attention


# ------------------------------------------------------------------------------------------------------- the definition


def full_precision(device: torch.device):
    """Context without autocast; entering one costs more than a small operation, so only where autocast is on."""
    on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def bit_length(number: torch.Tensor) -> torch.Tensor:
    """`int.bit_length` of every element of an integer tensor of values >= 0.

    The exponent of a float that keeps the first bit and none beside it, so that it cannot round up to the next power of two.
    """
    return torch.frexp((number & ~(number >> 1)).float()).exponent.long()


def _reference(query, key, value, log_decay, level_weights, C, initial_state, return_final_state, lengths, cu_seqlens):
    """The formula at the head of this file, one sequence after the other."""
    if cu_seqlens is not None:
        spans = [(0, start, stop) for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())]
    else:
        real = [query.shape[1]] * query.shape[0] if lengths is None else lengths.tolist()
        spans = [(row, 0, length) for row, length in enumerate(real)]
    B, T, G, N = query.shape
    H, P = value.shape[2:]
    if initial_state is None:
        L = level_weights.shape[-1]
        initial_state = empty_state(len(spans), G, H, N, P, L, C, value.dtype, value.device)
    output = torch.zeros_like(value)
    states = []
    for index, (row, start, stop) in enumerate(spans):
        tokens = [x[row, start:stop] for x in (query, key, value, log_decay, level_weights)]
        state = LogLinearState(*(x[index] for x in initial_state))
        output_of_sequence, state = _reference_sequence(*tokens, state, C)
        output = output.index_put(
            (torch.tensor(row, device=value.device), torch.arange(start, stop, device=value.device)),
            output_of_sequence.to(value.dtype),
        )
        states.append(state)
    return output, LogLinearState(*map(torch.stack, zip(*states))) if return_final_state else None


def _reference_sequence(query, key, value, log_decay, level_weights, state, C):
    """One sequence: query [T, G, N], key [T, G, N], value [T, H, P], log_decay [T, H], level_weights [T, H, L]."""
    dtype = log_decay.dtype
    heads_per_group = value.shape[1] // query.shape[1]
    old_length, merged = state.lengths.item(), state.merged_chunks.item()
    slots = torch.arange(merged * C, old_length, device=value.device) % (2 * C)
    key = torch.cat([state.key[slots], key])  # [J, G, N]: every key that is still there by itself
    value = torch.cat([state.value[slots], value])  # [J, H, P]
    log_decay = torch.cat([state.log_decay[slots], log_decay])  # [J, H]
    q, k = (x.to(dtype).repeat_interleave(heads_per_group, dim=1) for x in (query, key))  # [T | J, H, N]
    v, weights = value.to(dtype), level_weights.to(dtype)
    top = level_weights.shape[-1] - 1
    j = torch.arange(merged * C, merged * C + len(k), device=v.device)  # positions of the keys
    i = j[len(k) - len(q) :]  # positions of the queries

    # decay[i, j] = g_{j+1} + ... + g_i
    later = (j[:, None] > j[None, :])[..., None]  # [s, j, 1]
    decay = torch.where(later, log_decay[:, None], 0).cumsum(0)[len(k) - len(q) :]  # [T, J, H]
    level = bit_length(i[:, None] ^ j[None, :]).clamp(max=top)  # [T, J]
    weight = weights.gather(2, level[:, None, :].expand(-1, weights.shape[1], -1))  # [T, H, J]
    causal = (j[None, :] <= i[:, None])[:, None]  # [T, 1, J]
    scores = torch.einsum("ihn,jhn->ihj", q, k) * torch.where(causal, weight * decay.transpose(1, 2).exp(), 0)
    output = torch.einsum("ihj,jhp->ihp", scores, v)

    # Blocks of the state stand for tokens before position merged * C.
    from_tail = log_decay.cumsum(0)[len(k) - len(q) :].exp()  # [T, H]: decay from merged * C to i
    for level_index, (start, _) in _blocks(merged, len(state.levels)).items():
        level = bit_length(i ^ (start * C)).clamp(max=top)
        if level_index == len(state.levels) - 1:
            level = torch.full_like(level, top)
        weight = weights.gather(2, level[:, None, None].expand(-1, weights.shape[1], 1))[..., 0]  # [T, H]
        read = torch.einsum("ihn,hnp->ihp", q, state.levels[level_index].to(dtype))
        output = output + (weight * from_tail)[..., None] * read
    return output, _reference_state(key, value, log_decay, k, v, state, C)


def _reference_state(key, value, log_decay, k, v, state, C):
    """The state after the last key, from the keys that are still there by themselves and the old blocks."""
    dtype = log_decay.dtype
    first = state.merged_chunks.item()  # key 0 stands at position first * C
    length = first * C + len(key)
    merged = max(first, -(-length // C) - 2)
    ring = {}
    for name, tokens in (("key", key), ("value", value), ("log_decay", log_decay)):
        recent = torch.arange(max(first * C, length - 2 * C), length, device=key.device)
        ring[name] = getattr(state, name).index_put((recent % (2 * C),), tokens[recent - first * C])
    border = (merged - first) * C
    to_border = log_decay[:border].flip(0).cumsum(0).flip(0) - log_decay[:border]  # decay from each token to the border
    levels = torch.zeros_like(state.levels)
    old_blocks = _blocks(first, len(levels))
    for level, (start, stop) in _blocks(merged, len(levels)).items():
        tokens = slice(max(0, (start - first) * C), max(0, (stop - first) * C))
        block = torch.einsum("jhn,jhp->hnp", k[tokens] * to_border[tokens].exp()[..., None], v[tokens])
        for old_level, (old_start, old_stop) in old_blocks.items():
            if start <= old_start and old_stop <= stop:
                block = block + log_decay[:border].sum(0).exp()[:, None, None] * state.levels[old_level].to(dtype)
        levels = levels.index_put((torch.tensor(level, device=key.device),), block.to(levels.dtype))
    return LogLinearState(
        **ring,
        levels=levels,
        merged_chunks=torch.full_like(state.merged_chunks, merged),
        lengths=torch.full_like(state.lengths, length),
    )


def _blocks(chunks: int, num_levels: int) -> dict[int, tuple[int, int]]:
    """Fenwick blocks of the first `chunks` chunks: {level: (first chunk, last chunk + 1)}; the last level takes the rest."""
    top = num_levels - 1
    blocks = {level: ((chunks >> level) - 1 << level, chunks >> level << level) for level in range(top) if chunks >> level & 1}
    if chunks >> top:
        blocks[top] = (0, chunks >> top << top)
    return blocks


# -------------------------------------------------------------------------------------------- states around the tree


def _on(positions, here, device, make):
    """`positions` on `device`: themselves if they are there, else what `make` gives for a function that moves tensors."""

    def move(x):
        return tuple(map(move, x)) if isinstance(x, tuple) else None if x is None else x.to(device)

    device = torch.device(device)
    if device == here:
        return positions
    if device not in positions.elsewhere:
        positions.elsewhere[device] = make(move)
    return positions.elsewhere[device]


class SpanPositions:
    """What a call of many tokens derives from counters and lengths alone: the same for all layers of a model, so made once.

    Args:
        shape (`tuple[int, int]`): (B, T) of the new tokens.
        chunk_size (`int`).
        device (`torch.device`).
        counters (`tuple`, *optional*): (lengths, merged_chunks) of the state before, `[num_seqs]`; `None`: no token before.
        lengths, cu_seqlens: as in `loglinear_attention`.
    """

    def __init__(self, shape, chunk_size, device, counters=None, lengths=None, cu_seqlens=None):
        B, T = shape
        self.arguments = shape, chunk_size, device, counters, lengths, cu_seqlens
        self.elsewhere = {}
        self.chunk_size, self.lengths, self.cu_seqlens = chunk_size, lengths, cu_seqlens
        if cu_seqlens is not None:
            self.new_tokens, self.new_starts = cu_seqlens.diff().long(), cu_seqlens[:-1].long()
        else:
            self.new_tokens = torch.full((B,), T, device=device) if lengths is None else lengths.long()
            self.new_starts = torch.arange(B, device=device) * T
        zero = torch.zeros_like(self.new_tokens)
        old = (zero, zero) if counters is None else counters
        self.final_lengths, self.final_chunk = advanced(*old, self.new_tokens, chunk_size)
        self.is_new, self.newest = _newest(old[0], self.new_tokens, self.new_starts, 2 * chunk_size, B * T)
        self.fill_rings = lengths is None and cu_seqlens is None and T >= 2 * chunk_size
        self.extension = None
        if counters is not None:
            self.extension = _Extension(*counters, self.new_tokens, self.new_starts, shape, chunk_size, cu_seqlens is not None)

    def to(self, device, non_blocking=False):
        """The same on another device, made once: by this name accelerate moves what it passes to a layer elsewhere."""
        shape, chunk_size, here, *tensors = self.arguments
        return _on(self, here, device, lambda move: SpanPositions(shape, chunk_size, device, *map(move, tensors)))

    def update(self, ring, tokens):
        """The newest tokens [B, T, ...] of every sequence in its ring [num_seqs, 2C, ...]; None: an empty one."""
        if self.fill_rings:
            return tokens.flatten(0, 1).index_select(0, self.newest).unflatten(0, self.is_new.shape)
        return _with_newest(ring, tokens, self.is_new, self.newest)


def loglinear_attention_span(
    query, key, value, log_decay, level_weights, positions, *, state=None, return_final_state=True, backend="auto"
):
    """`loglinear_attention` with a state, for a caller that has the positions already and knows that all shapes fit.

    Args:
        positions (`SpanPositions`): made from the counters of `state`; pass one to all layers of a model.
        state (`LogLinearState`, *optional*): the state before; `None`: no token before.

    Returns:
        The output and the final state or `None`, as `loglinear_attention`.
    """
    C, lengths, cu_seqlens = positions.chunk_size, positions.lengths, positions.cu_seqlens
    tokens = (query, key, value, log_decay, level_weights)
    if backend == "reference":
        return _reference(*tokens, C, state, return_final_state, lengths, cu_seqlens)
    tree_attention = _choose_tree(backend, query, value, level_weights, C)
    final_chunk = positions.final_chunk if return_final_state else None
    if state is None:
        output, levels = tree_attention(*tokens, chunk_size=C, lengths=lengths, cu_seqlens=cu_seqlens, final_chunk=final_chunk)
        rings = (None, None, None)
    else:
        # The tail of the state stands in front of the new tokens, so that every sequence starts at a chunk border.
        extended = positions.extension
        output, levels = tree_attention(
            extended.new(query), extended.all(key, state.key), extended.all(value, state.value),
            extended.all(log_decay, state.log_decay), extended.new(level_weights),
            chunk_size=C, lengths=extended.lengths, cu_seqlens=extended.cu_seqlens,
            first_chunk=state.merged_chunks, initial_levels=state.levels, final_chunk=final_chunk,
        )  # fmt: skip
        output = extended.outputs(output)
        rings = state[:3]
    if not return_final_state:
        return output, None
    rings = [positions.update(ring, new) for ring, new in zip(rings, (key, value, log_decay))]
    return output, LogLinearState(*rings, levels, positions.final_chunk, positions.final_lengths)


class _Extension:
    """Where the tokens of tail + new stand in rows that begin at a chunk border, and back again."""

    def __init__(self, old_lengths, merged_chunks, new_tokens, new_starts, new_shape, C, packed):
        B, T = new_shape
        self.num_seqs, self.new_shape = len(new_tokens), new_shape
        device = new_tokens.device
        tail_tokens = old_lengths - merged_chunks * C  # [num_seqs], at most 2C
        lengths = tail_tokens + new_tokens
        if packed:
            self.shape = (1, T + 2 * C * self.num_seqs)
            starts = lengths.cumsum(0) - lengths
            token = torch.arange(self.shape[1], device=device)
            sequence = torch.searchsorted(starts, token, right=True) - 1
            local = token - starts[sequence]
            self.lengths, self.cu_seqlens = None, F.pad(lengths.cumsum(0), (1, 0)).int()
        else:
            self.shape = (B, 2 * C + T)
            starts = torch.arange(B, device=device) * self.shape[1]
            sequence = torch.arange(B, device=device)[:, None].expand(self.shape).flatten()
            local = torch.arange(self.shape[1], device=device).repeat(B)
            self.lengths, self.cu_seqlens = lengths, None
        self.old_tokens = self.num_seqs * 2 * C
        self.in_tail = in_tail = local < tail_tokens[sequence]
        slot = sequence * 2 * C + (merged_chunks[sequence] * C + local) % (2 * C)
        self.new_index = (new_starts[sequence] + local - tail_tokens[sequence]).clamp(0, B * T - 1)
        self.index = torch.where(in_tail, slot, self.old_tokens + self.new_index)
        # Back: new token t of its sequence stands behind the tail.
        token = torch.arange(B * T, device=device)
        sequence = torch.searchsorted(new_starts, token, right=True) - 1
        self.back = starts[sequence] + tail_tokens[sequence] + token - new_starts[sequence]

    def all(self, new, ring):
        """Tail and new tokens: [B, T, ...] and [num_seqs, 2C, ...] -> the extended rows."""
        return torch.cat([ring.flatten(0, 1), new.flatten(0, 1)]).index_select(0, self.index).unflatten(0, self.shape)

    def new(self, new):
        """Something only new tokens have, 0 in the tail (whose outputs nobody reads): [B, T, ...] -> the extended rows."""
        new = new.flatten(0, 1).index_select(0, self.new_index)
        return torch.where(self.in_tail.view(-1, *[1] * (new.dim() - 1)), 0, new).unflatten(0, self.shape)

    def outputs(self, output):
        return output.flatten(0, 1).index_select(0, self.back).unflatten(0, self.new_shape)


def _newest(old_lengths, new_tokens, starts, R, num_tokens):
    """Which slots of a ring of R take new tokens [num_seqs, R] bool, and which ones [num_seqs * R].

    Slot s holds the last position p with p % R == s. A sequence's `new_tokens` stand from `starts` on in the list of all.
    """
    last = (old_lengths + new_tokens - 1)[:, None]
    position = last - (last - torch.arange(R, device=last.device)) % R  # [num_seqs, R]
    index = starts[:, None] + position - old_lengths[:, None]
    return position >= old_lengths[:, None], index.clamp(0, num_tokens - 1).flatten()


def _with_newest(ring, tokens, is_new, newest):
    """ring [num_seqs, R, ...] (None: zeros) with the tokens [B, T, ...] that `_newest` chose."""
    newest = tokens.flatten(0, 1).index_select(0, newest).unflatten(0, is_new.shape)
    return torch.where(is_new.view(*is_new.shape, *[1] * (newest.dim() - 2)), newest, 0 if ring is None else ring)


def ring_update(ring, tokens, old_lengths, new_tokens, R):
    """ring [B, R, ...] (None: zeros) with the newest of the tokens [B, T, ...], `new_tokens` [B] at the front of each row."""
    B, T = tokens.shape[:2]
    starts = torch.arange(B, device=tokens.device) * T
    return _with_newest(ring, tokens, *_newest(old_lengths, new_tokens, starts, R, B * T))


# ------------------------------------------------------------------------------------------------------- the tree


class _Level(NamedTuple):
    """One level of the tree: which chunks read which node, and which nodes have which children."""

    readers: torch.Tensor  # [R, r] chunks; the r of a row read the same node
    source: torch.Tensor  # [R] the node that they read
    reads: torch.Tensor | None  # [R, r] False where the chunk has no node to read here; None: all read
    left: torch.Tensor  # [nodes of the next level]
    right: torch.Tensor  # [nodes of the next level]
    final: torch.Tensor | None  # [num_seqs] the node that the final state takes from this level ...
    in_final: torch.Tensor | None  # ... and whether it takes one


def _torch_tree_attention(
    query, key, value, log_decay, level_weights, *,
    chunk_size, lengths=None, cu_seqlens=None, first_chunk=None, initial_levels=None, final_chunk=None,
):  # fmt: skip
    """The tree of design: chunks in parallel, then one level after the other. Nothing is sequential in T.

    1. inside a chunk: (Q K^T * decay * lambda) V
    2. every chunk becomes a node, K^T V decayed to its end
    3. level by level: chunks whose index has bit l set read the left sibling; siblings are merged
    """
    B, T, G, N = query.shape
    H, P = value.shape[2:]
    C, L, dtype = chunk_size, level_weights.shape[-1], log_decay.dtype
    top = state_levels(L, C) - 1
    tree = _Tree(B, T, C, top, lengths, cu_seqlens, first_chunk, final_chunk)
    with full_precision(value.device):
        q, k, v, g, weights = (tree.chunks(x).to(dtype) for x in (query, key, value, log_decay, level_weights))
        decay = g.cumsum(1)  # [S, C, H] from the start of the chunk up to and including the token
        q = q.transpose(1, 2)  # [S, G, C, N]
        k = k.transpose(1, 2)  # [S, G, C, N]
        v = v.unflatten(2, (G, H // G)).transpose(1, 2)  # [S, G, C, H/G, P]
        output = _inside_chunks(q, k, v, decay, weights)  # [S, G, C, H/G, P]

        node_decay = decay[:, -1]  # [S, H]
        to_end = (node_decay[:, None] - decay).exp()  # [S, C, H]
        nodes = k.mT @ (v * _per_group(to_end, G)).flatten(3)  # [S, G, N, H/G * P]
        gap = torch.zeros_like(node_decay)  # [S, H] decay from the end of the node just read to the start of the chunk
        final = []
        if initial_levels is not None:
            initial = (
                initial_levels.to(dtype).unflatten(2, (G, H // G)).transpose(3, 4).flatten(4)
            )  # [num_seqs, K, G, N, H/G * P]
        for level in range(tree.depth):
            if initial_levels is not None and level <= top:
                nodes = torch.cat([nodes, initial[:, level]])
                node_decay = F.pad(node_decay, (0, 0, 0, tree.num_seqs))  # already decayed up to the first token
            at = tree.level(level, node_decay.shape[0], q.device)
            if at.final is not None:
                final.append((at.in_final, nodes.index_select(0, at.final), node_decay.index_select(0, at.final)))
            if at.readers.numel():
                R, r = at.readers.shape
                readers = at.readers.flatten()
                read = q.index_select(0, readers).unflatten(0, (R, r)).transpose(1, 2).flatten(2, 3)  # [R, G, r * C, N]
                read = read @ nodes.index_select(0, at.source)  # [R, G, r * C, H/G * P]
                read = (
                    read.unflatten(2, (r, C)).transpose(1, 2).flatten(0, 1).unflatten(3, (H // G, P))
                )  # [R * r, G, C, H/G, P]
                weight = weights[..., min(C.bit_length() + level, L - 1)] * (decay + gap[:, None]).exp()  # [S, C, H]
                weight = weight.index_select(0, readers)
                passed = node_decay.index_select(0, at.source)[:, None].expand(-1, r, -1).flatten(0, 1)  # [R * r, H]
                if at.reads is not None:
                    weight = torch.where(at.reads.flatten()[:, None, None], weight, 0)
                    passed = torch.where(at.reads.flatten()[:, None], passed, 0)
                output = output.index_add(0, readers, read * _per_group(weight, G))
                gap = gap.index_add(0, readers, passed)
            if at.left.numel() == 0:
                break
            right_decay = node_decay.index_select(0, at.right)
            keep = right_decay.exp().unflatten(1, (G, H // G))[:, :, None, :, None]  # [nodes, G, 1, H/G, 1]
            left = nodes.index_select(0, at.left).unflatten(3, (H // G, P))
            nodes = nodes.index_select(0, at.right) + (keep * left).flatten(3)
            node_decay = node_decay.index_select(0, at.left) + right_decay
        output = tree.tokens(output.transpose(1, 2).flatten(2, 3))  # [B, T, H, P]
    levels = None if final_chunk is None else _final_levels(final, top, (G, H, N, P))
    return output.to(value.dtype), levels


def _inside_chunks(q, k, v, decay, weights):
    """Step 1. q, k [S, G, C, N], v [S, G, C, H/G, P], decay [S, C, H], weights [S, C, H, L] -> [S, G, C, H/G, P]."""
    G, C = q.shape[1:3]
    H, L = weights.shape[2:]
    i, j = torch.arange(C, device=q.device)[:, None], torch.arange(C, device=q.device)
    level = bit_length(i ^ j).clamp(max=L - 1)  # [C, C]
    # [C, C, l]: choosing the weights is a product, since its gradient is one as well
    is_level = (level[..., None] == torch.arange(min(C.bit_length(), L), device=q.device)).to(q.dtype)
    weight = torch.einsum("sihl,ijl->shij", weights[..., : is_level.shape[-1]], is_level)  # [S, H, C, C]
    along_i = decay.transpose(1, 2)  # [S, H, C]
    gate = (along_i[..., :, None] - along_i[..., None, :]).masked_fill(i < j, -torch.inf).exp() * weight
    scores = (q @ k.mT)[:, :, None] * gate.unflatten(1, (G, H // G))  # [S, G, H/G, C, C]
    return (scores @ v.transpose(2, 3)).transpose(2, 3)


def _per_group(x, G):
    """[S, C, H] -> [S, G, C, H/G, 1], to scale rows of [S, G, C, H/G, P]."""
    return x.unflatten(2, (G, -1)).transpose(1, 2)[..., None]


def _final_levels(final, top, sizes):
    """The state's levels from the nodes that each level of the tree offers: [num_seqs, K, H, N, P]."""
    G, H, N, P = sizes
    gap = torch.zeros_like(final[0][2])  # [num_seqs, H] decay from the end of the node to the border of the state
    levels = []
    for level, (taken, node, decay) in enumerate(final):
        node = node.unflatten(3, (H // G, P)).transpose(2, 3).flatten(1, 2)  # [num_seqs, H, N, P]
        node = torch.where(taken[:, None, None, None], gap.exp()[..., None, None] * node, 0)
        gap = gap + torch.where(taken[:, None], decay, 0)
        if level <= top:
            levels.append(node)
        else:
            levels[top] = levels[top] + node
    levels += [torch.zeros_like(levels[0])] * (top + 1 - len(levels))
    return torch.stack(levels, 1)


class _Tree:
    """Where tokens, chunks and nodes of all sequences stand. Every table is made on the device, in shapes known beforehand.

    The chunks of all sequences stand in one list of S. Chunk c of a sequence has the *index* c + the chunks before its first
    token. Chunks above the state's top level share one weight, so of the first index only the bits up to `top` matter.
    Nodes are numbered per level, sequence after sequence; the nodes of an initial state follow behind all others.
    """

    def __init__(self, B, T, C, top, lengths, cu_seqlens, first_chunk, final_chunk):
        device = next((x.device for x in (lengths, cu_seqlens, first_chunk, final_chunk) if x is not None), None)
        self.B, self.T, self.C = B, T, C
        self.packed = cu_seqlens is not None
        self.has_state = first_chunk is not None
        self.aligned = not (self.packed or self.has_state)
        self.valid = None  # [B, T] or [S, C]: True at real tokens; None: all are
        longest = -(-T // C)  # chunks
        if self.packed:
            tokens = cu_seqlens.diff().long()
            chunks = (tokens + C - 1) // C
            self.num_seqs, self.S = len(tokens), longest + len(tokens)
            self.starts = chunks.cumsum(0) - chunks
            chunk = torch.arange(self.S, device=device)
            self.sequence = torch.searchsorted(self.starts, chunk, right=True) - 1
            local = (chunk - self.starts[self.sequence])[:, None] * C + torch.arange(C, device=device)  # [S, C]
            self.valid = local < tokens[self.sequence, None]
            self.index_of_token = (cu_seqlens[self.sequence, None] + local).clamp(max=T - 1).flatten()
            token = torch.arange(T, device=device)
            sequence = torch.searchsorted(cu_seqlens[:-1].contiguous(), token, right=True) - 1
            self.slot_of_token = self.starts[sequence] * C + token - cu_seqlens[sequence]
        else:
            self.num_seqs, self.S = B, B * longest
            self.M = longest
            if lengths is not None:
                self.valid = torch.arange(T, device=device) < lengths[:, None]
            if self.has_state:
                self.starts = torch.arange(B, device=device) * longest
                self.sequence = torch.arange(B, device=device).repeat_interleave(longest, output_size=self.S)
        last = longest if final_chunk is not None else longest - 1
        self.first = self.final = None
        if self.has_state:
            last += 2 << top
            self.first = first_chunk % (1 << top) + torch.where(first_chunk >= 1 << top, 1 << top, 0)
        elif self.packed:
            self.first = torch.zeros_like(self.starts)
        if final_chunk is not None:
            self.final = final_chunk if self.aligned or not self.has_state else self.first + final_chunk - first_chunk
        if not self.aligned:
            self.index = self.first[self.sequence] + torch.arange(self.S, device=device) - self.starts[self.sequence]
        self.depth = last.bit_length()

    def chunks(self, x):
        """[B, T, ...] -> [S, C, ...], with zeros where no token stands."""
        if self.packed:
            x = x[0].index_select(0, self.index_of_token).unflatten(0, (self.S, self.C))
            return torch.where(self.valid.view(self.S, self.C, *[1] * (x.dim() - 2)), x, 0)
        if self.valid is not None:
            x = torch.where(self.valid.view(self.B, self.T, *[1] * (x.dim() - 2)), x, 0)
        if missing := self.M * self.C - self.T:
            x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
        return x.reshape(self.S, self.C, *x.shape[2:])

    def tokens(self, x):
        """[S, C, ...] -> [B, T, ...], with zeros where no token stands."""
        if self.packed:
            return x.flatten(0, 1).index_select(0, self.slot_of_token)[None]
        x = x.reshape(self.B, self.M * self.C, *x.shape[2:])[:, : self.T]
        return x if self.valid is None else torch.where(self.valid.view(self.B, self.T, *[1] * (x.dim() - 2)), x, 0)

    def level(self, level, num_nodes, device):
        return (self._aligned_level if self.aligned else self._offset_level)(level, num_nodes, device)

    def _aligned_level(self, level, num_nodes, device):
        """All rows start at index 0: chunks (2g + 1) * 2**level + (0 ... 2**level - 1) read the node 2g."""
        M, per_row = self.M, self.M >> level
        row = torch.arange(self.B, device=device)[:, None]
        groups = (M + (1 << level) - 1) >> (level + 1)
        size = min(1 << level, M - (1 << level)) if groups == 1 else 1 << level
        group = torch.arange(groups, device=device)
        chunk = ((2 * group + 1) << level)[:, None] + torch.arange(size, device=device)  # [groups, size]
        overhang = groups > 0 and (2 * groups - 1 << level) + size > M
        readers = (row[..., None] * M + chunk.clamp(max=M - 1)).flatten(0, 1)
        pair = torch.arange(per_row // 2, device=device)
        left = (row * per_row + 2 * pair).flatten()
        final = None if self.final is None else row[:, 0] * per_row + ((self.final >> level) - 1).clamp(0, per_row - 1)
        return _Level(
            readers=readers,
            source=(row * per_row + 2 * group).flatten(),
            reads=(chunk < M).expand(self.B, -1, -1).flatten(0, 1) if overhang else None,
            left=left,
            right=left + 1,
            final=final,
            in_final=None if self.final is None else (self.final >> level) & 1 > 0,
        )

    def _offset_level(self, level, num_nodes, device):
        """Sequences start anywhere: node slot s of a sequence is the node (first >> level) + s of its whole history."""
        first, sequence = self.first[self.sequence], self.sequence
        slot = (self.index >> level) - 1 - (first >> level)
        parent = torch.arange(self._nodes(level + 1), device=device)
        borders = self._first_node(level + 1)
        parent_sequence = torch.searchsorted(borders, parent, right=True) - 1
        left = 2 * (parent - borders[parent_sequence]) - ((self.first[parent_sequence] >> level) & 1)
        final = None
        if self.final is not None:
            every = torch.arange(self.num_seqs, device=device)
            final = self._node(level, every, (self.final >> level) - 1 - (self.first >> level), num_nodes)
        return _Level(
            readers=torch.arange(self.S, device=device)[:, None],
            source=self._node(level, sequence, slot, num_nodes),
            reads=((self.index >> level) & 1 > 0)[:, None],
            left=self._node(level, parent_sequence, left, num_nodes),
            right=self._node(level, parent_sequence, left + 1, num_nodes),
            final=final,
            in_final=None if final is None else (self.final >> level) & 1 > 0,
        )

    def _nodes(self, level):
        return (self.S >> level) + (self.num_seqs if self.has_state and level else 0)

    def _first_node(self, level):
        """[num_seqs]: where the nodes of each sequence begin; offset chunks may fill one node more than chunks >> level."""
        first = self.starts >> level
        return first + torch.arange(self.num_seqs, device=first.device) if self.has_state and level else first

    def _node(self, level, sequence, slot, num_nodes):
        """Number of a sequence's node; slot -1 is the one that its initial state brings along."""
        node = torch.where(slot < 0, self._nodes(level) + sequence, self._first_node(level)[sequence] + slot)
        return node.clamp(0, num_nodes - 1)


# --------------------------------------------------------------------------------------------------------- one token


class StepPositions:
    """What a decoding step derives from the counters alone: the same for all layers of a model, so made once.

    Args:
        lengths, merged_chunks (`torch.Tensor` of shape `[B]`): counters of the state before the step.
        chunk_size (`int`).
        active (`torch.Tensor` of shape `[B]`, bool, *optional*): rows that have a token; the others keep their state.
    """

    def __init__(self, lengths, merged_chunks, chunk_size, active=None):
        self.lengths, self.merged_chunks, self.chunk_size, self.active = lengths, merged_chunks, chunk_size, active
        self.row = torch.arange(len(lengths), device=lengths.device) * 2 * chunk_size  # [B] first slot of every ring
        self.slot = self.row + lengths % (2 * chunk_size)  # [B] in the rings of all rows together
        self._window = self._tables = None
        self.elsewhere = {}

    def to(self, device, non_blocking=False):
        """The same on another device, made once: by this name accelerate moves what it passes to a layer elsewhere."""
        return _on(
            self, self.lengths.device, device,
            lambda move: StepPositions(move(self.lengths), move(self.merged_chunks), self.chunk_size, move(self.active)),
        )  # fmt: skip

    def write(self, ring, token):
        """Puts token [B, ...] into the slot of its position in ring [B, 2C, ...], in place."""
        slots = ring.view(-1, *ring.shape[2:])
        if self.active is not None:
            active = self.active.view(-1, *[1] * (token.dim() - 1))
            token = torch.where(active, token, slots.index_select(0, self.slot))
        slots.index_copy_(0, self.slot, in_dtype(token, ring.dtype))

    def window(self, ring, width):
        """The newest `width` entries of ring [B, 2C, D], this token included: [B, width, D]."""
        if self._window is None:
            back = torch.arange(1 - width, 1, device=ring.device)
            self._window = (self.row[:, None] + (self.lengths[:, None] + back) % ring.shape[1]).flatten()
        return ring.view(-1, ring.shape[2]).index_select(0, self._window).view(-1, width, ring.shape[2])

    def tables(self, K, L, dtype):
        """(full, read, later, of_level) for keys that stand in the 2C slots of the tail and in the blocks.

        full [B]: rows whose oldest chunk becomes a block now; None if it is known that there is none
        read: how many of the K blocks have to be read
        later [B, 2C, 2C + read]: 1 where a token's decay comes between a key and this token
        of_level [B, L, 2C + read]: 1 at the level of a key, seen from this token; 0 everywhere where there is no key
        """
        if self._tables is None:
            self._tables = self._make_tables(K, L, dtype)
        return self._tables

    def _make_tables(self, K, L, dtype):
        C, t = self.chunk_size, self.lengths.unsqueeze(1)  # [B, 1]
        full, read, merged = None, K, self.merged_chunks
        readable = _readable(t)
        if not readable or any(t == (m + 2) * C for t, m in zip(self.lengths.tolist(), merged.tolist())):
            full = self.lengths == (merged + 2) * C
            full = full if self.active is None else full & self.active
            merged = merged + full
        if readable:  # a CPU need not read blocks that no row has yet
            read = min(K, max(merged.tolist()).bit_length())
        merged = merged.unsqueeze(1)
        position = t - (t - torch.arange(2 * C, device=t.device)) % (2 * C)  # [B, 2C] of the token in each slot
        present = position >= merged * C
        level = bit_length(t ^ position)  # of no meaning where no token is present
        later = (position.unsqueeze(1) < position.unsqueeze(2)) & present.unsqueeze(2)
        if read:
            blocks = torch.arange(read, device=t.device)
            start = (merged >> blocks + 1) << blocks + 1  # [B, read] first chunk of the block
            block_level = C.bit_length() - 1 + bit_length(t // C ^ start)
            occupied = merged >> blocks & 1 > 0
            if read == K:  # the last block takes everything older
                block_level[:, -1] = L - 1
                occupied[:, -1:] = merged >> K - 1 > 0
            later = torch.cat([later, present[..., None].expand(-1, -1, read)], 2)
            present, level = torch.cat([present, occupied], 1), torch.cat([level, block_level], 1)
        of_level = level.clamp(max=L - 1).unsqueeze(1) == torch.arange(L, device=t.device).unsqueeze(1)
        return full, read, later.to(dtype), (of_level & present.unsqueeze(1)).to(dtype)


def _torch_decode_step(query, key, value, log_decay, level_weights, state, positions):
    """See `loglinear_attention_step`; query, key [B, G, N], value [B, H, P], log_decay [B, H], level_weights [B, H, L]."""
    (B, G, N), H, P = query.shape, *value.shape[1:]
    R, K, dtype = state.key.shape[1], state.levels.shape[1], state.levels.dtype
    full, read, later, of_level = positions.tables(K, level_weights.shape[-1], dtype)
    if full is not None:
        _merge_oldest_chunk(state, full)
    positions.write(state.key, key)
    positions.write(state.value, value)
    positions.write(state.log_decay, log_decay)
    # The blocks are decayed up to the first position of the tail, so all of the tail comes after them.
    decay = torch.bmm(state.log_decay.mT, later).exp_()  # [B, H, 2C + read]
    gate = (torch.bmm(in_dtype(level_weights, dtype), of_level) * decay).view(B * G, H // G, R + read)
    query = in_dtype(query, dtype).reshape(B * G, 1, N)
    keys = in_dtype(state.key, dtype).permute(0, 2, 3, 1).reshape(B * G, N, R)
    values = in_dtype(state.value, dtype).transpose(1, 2).reshape(B * H, R, P)
    scores = torch.bmm(query, keys) * (gate[..., :R] if read else gate)  # [B * G, H/G, 2C]
    output = torch.bmm(scores.view(B * H, 1, R), values).view(B, H, P)
    if read:
        weighted = (query[:, :, None] * gate[..., R:, None]).view(B, H, read, 1, N)
        blocks = weighted @ state.levels[:, :read].transpose(1, 2)  # [B, H, read, 1, P]
        output = output + blocks.sum(2)[:, :, 0]
    if positions.active is not None:
        output = torch.where(positions.active[:, None, None], output, 0)
    return in_dtype(output, value.dtype)


def in_dtype(x, dtype):
    """`x.to(dtype)`; asking first is several times cheaper where nothing is to be done, and a step does this often."""
    return x if x.dtype == dtype else x.to(dtype)


def _readable(tensor):
    """Whether a value may be looked at here: on the CPU, outside of a trace."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _merge_oldest_chunk(state, full):
    """Where `full` [B]: the oldest chunk of the tail becomes a block, the Fenwick carry of `merged_chunks` + 1 (section 1)."""
    B, R, G, N = state.key.shape
    C, K, dtype = R // 2, state.levels.shape[1], state.levels.dtype
    merged = state.merged_chunks
    half = (merged % 2)[:, None] * C + torch.arange(C, device=merged.device)  # [B, C] slots of the chunk
    row = torch.arange(B, device=merged.device)[:, None]
    k, v, g = (ring[row, half].to(dtype) for ring in (state.key, state.value, state.log_decay))
    to_end = g.sum(1, keepdim=True) - g.cumsum(1)  # [B, C, H]
    keep = g.sum(1).exp()[..., None, None]  # [B, H, 1, 1]
    v = (v * to_end.exp()[..., None]).unflatten(2, (G, -1))
    block = torch.einsum("bcgn,bcgrp->bgrnp", k, v).flatten(1, 2)  # [B, H, N, P]
    carrying = full
    for level in range(K):
        old = state.levels[:, level] * keep
        if level < K - 1:
            occupied = merged >> level & 1 > 0
            lands = carrying & ~occupied  # the first free level takes the block
            new = torch.where(lands[:, None, None, None], block, old)
            block = torch.where((carrying & occupied)[:, None, None, None], block + old, block)
            carrying = carrying & occupied
        else:
            has_old = merged >> level > 0
            old = torch.where(has_old[:, None, None, None], old, 0)
            new = torch.where(carrying[:, None, None, None], block + old, old)
        state.levels[:, level] = torch.where(full[:, None, None, None], new, state.levels[:, level])
