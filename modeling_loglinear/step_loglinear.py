"""A decoding step of one block in six kernels, where its modules launch some twenty.

A step needs every weight for a few rows only, so it is as fast as the weights and the state arrive. Each kernel therefore reads
one weight matrix (or two that share their input) or the state, and computes on the way whatever stands before and after:

    norm, in_proj, lambda_proj             `_norm_projections`
    convolution, time step, level weights  `_mixer_inputs` (which also merges the tail's oldest chunk where it is full)
    attention, skip, gate                  `triton_loglinear.attend`
    norm, out_proj, residual               `_norm_linear_add`
    norm, gate_proj, up_proj, activation   `_norm_mlp`
    down_proj, residual                    `_linear_add`

A norm is a factor per row, so it is applied after the product, from squares that were added up meanwhile.
"""

import torch
from torch import nn

try:
    import triton
    import triton.language as tl
except ImportError as error:  # modeling_loglinear.py catches this and does without
    raise ImportError("The kernels of a decoding step need the package `triton`.") from error

from .fused_loglinear import softplus
from .triton_loglinear import DTYPES, MERGE_COLUMNS, are_sizes_supported, attend, merge_oldest_chunk

MAX_ROWS = 64  # of a batch; above, a product is no longer limited by reading its weights
TILE = {"BLOCK_OUT": 16, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4}  # of a weight: small, so that all processors read


# ------------------------------------------------------------------------------------------------------ inside kernels


@triton.jit
def _load_rows(x, k, rows, D: tl.constexpr, ROWS: tl.constexpr):
    """Columns k of x [rows, D], in float32: [ROWS, len(k)]."""
    row = tl.arange(0, ROWS)[:, None]
    return tl.load(x + row * D + k[None, :], (row < rows) & (k < D)[None, :], 0).to(tl.float32)


@triton.jit
def _multiply(weight, x, acc, out, k, OUT: tl.constexpr, D: tl.constexpr):
    """acc [BLOCK_OUT, 16 or ROWS] + the tile (out, k) of weight [OUT, D] times x [ROWS, BLOCK_K]."""
    w = tl.load(weight + out[:, None].to(tl.int64) * D + k[None, :], (out < OUT)[:, None] & (k < D)[None, :], 0)
    if w.dtype == tl.float16:  # x is not normed yet and may exceed float16; tf32 has the same precision and a larger range
        w = w.to(tl.float32)
        precision: tl.constexpr = "tf32"
    else:
        x = x.to(w.dtype)
        precision: tl.constexpr = "ieee"
    if x.shape[0] < acc.shape[1]:  # a single row, many times: the least that a product takes
        x = tl.broadcast_to(x, (acc.shape[1], x.shape[1]))
    return tl.dot(w, tl.trans(x), acc, input_precision=precision)


@triton.jit
def _norm_product(
    x, norm, weight, out, rows, eps,
    D: tl.constexpr, GROUPS: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns `out` of rms_norm(x [rows, D]) @ weight.T, the norm over each of GROUPS parts of D: [len(out), 16 or ROWS]."""
    WIDTH: tl.constexpr = D // GROUPS
    total = tl.zeros((out.shape[0], max(ROWS, 16)), tl.float32)
    for group in tl.static_range(GROUPS):
        acc = tl.zeros((out.shape[0], max(ROWS, 16)), tl.float32)
        squares = tl.zeros((ROWS, BLOCK_K), tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            if GROUPS > 1:
                k = tl.where(k < WIDTH, group * WIDTH + k, D)  # D: no column of this group
            h = _load_rows(x, k, rows, D, ROWS)
            squares += h * h
            h *= tl.load(norm + k, k < D, 0).to(tl.float32)[None, :]
            acc = _multiply(weight, h, acc, out, k, OUT, D)
        total += acc * tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)[None, :]
    return total


@triton.jit
def _store_rows(y, acc, bias, residual, out, rows, OUT: tl.constexpr):
    """Columns `out` of y [rows, OUT] = acc [len(out), ...] + bias [OUT] + residual [rows, OUT], the last two if given."""
    row = tl.arange(0, acc.shape[1])
    if bias is not None:
        acc += tl.load(bias + out, out < OUT, 0).to(tl.float32)[:, None]
    at = row[None, :] * OUT + out[:, None]
    valid = (out < OUT)[:, None] & (row < rows)[None, :]
    if residual is not None:
        acc += tl.load(residual + at, valid, 0).to(tl.float32)
    tl.store(y + at, acc.to(y.dtype.element_ty), valid)


@triton.jit
def _convolved(inputs, ring, weight, bias, channel, now, CONV_DIM: tl.constexpr, K: tl.constexpr, R: tl.constexpr):
    """silu(convolution) of some channels, in float32; the new inputs go into their slot of ring [R, CONV_DIM]."""
    new = tl.load(inputs + channel)
    acc = new.to(tl.float32) * tl.load(weight + channel * K + K - 1).to(tl.float32)
    for back in tl.static_range(1, K):
        x = tl.load(ring + (now + R - back) % R * CONV_DIM + channel, mask=now >= back, other=0.0)
        acc += x.to(tl.float32) * tl.load(weight + channel * K + K - 1 - back).to(tl.float32)
    if bias is not None:
        acc += tl.load(bias + channel).to(tl.float32)
    tl.store(ring + now % R * CONV_DIM + channel, new)
    return acc * tl.sigmoid(acc)


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _norm_projections(
    x, norm, weight, bias, lambda_weight, projected, levels, rows, eps,
    D: tl.constexpr, OUT: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """rms_norm(x) times in_proj and times lambda_proj.

    Grid (tiles of OUT, then tiles of LEVELS). Reads x [rows, D], norm [D] and one tile of weight [OUT, D] or of lambda_weight
    [LEVELS, D]; writes a tile of projected [rows, OUT] or levels [rows, LEVELS].
    """
    tiles: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    if tl.program_id(0) < tiles:
        out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        acc = _norm_product(x, norm, weight, out, rows, eps, D, 1, OUT, ROWS, BLOCK_K)
        _store_rows(projected, acc, bias, None, out, rows, OUT)
    elif lambda_weight is not None:
        out = (tl.program_id(0) - tiles) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        acc = _norm_product(x, norm, lambda_weight, out, rows, eps, D, 1, LEVELS, ROWS, BLOCK_K)
        _store_rows(levels, acc, None, None, out, rows, LEVELS)


@triton.jit
def _mixer_inputs(
    projected, levels, ring, conv_weight, conv_bias, dt_bias, a_log, scale, up, down, lambda_bias, tail_key, tail_value,
    tail_log_decay, state_levels, merged, lengths, query, key, values, value, log_decay, weights, low, high, kept,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    KERNEL: tl.constexpr, MODE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_2L: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """What attention reads, from what in_proj and lambda_proj give; merges the tail's oldest chunk where the tail is full.

    Grid (B, H). Reads the head's part of projected [B, z, x, key, query, dt], levels [B, H, L] and ring [B, 2C, conv_dim], for
    the first head of a group also its key and query. Writes the same part of query, key [B, G, N], values, value [B, H, P],
    log_decay [B, H], weights [B, H, L] and the token's slot of ring, which no program reads.
    """
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    now, chunk = tl.load(lengths + batch), tl.load(merged + batch)
    if now == (chunk + 2) * C:
        for start in range(0, P, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            merge_oldest_chunk(
                tail_key, tail_value, tail_log_decay, state_levels, batch, head, p, chunk, H, H // G, kept, N, P, C
            )

    CONV_DIM: tl.constexpr = H * P + 2 * G * N
    row = projected + batch * (H * P + CONV_DIM + H)
    inputs = row + H * P
    own_ring = ring + batch * (2 * C * CONV_DIM)
    p = tl.arange(0, P)
    x = _convolved(inputs, own_ring, conv_weight, conv_bias, head * P + p, now, CONV_DIM, KERNEL, 2 * C)
    dt = tl.load(row + H * P + CONV_DIM + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(dt), low), high)
    at = batch * H + head
    tl.store(values + at * P + p, x.to(values.dtype.element_ty))
    tl.store(value + at * P + p, (x * step).to(value.dtype.element_ty))
    tl.store(log_decay + at, -tl.exp(tl.load(a_log + head).to(tl.float32)) * step)
    if head % (H // G) == 0:
        group = head // (H // G)
        n = tl.arange(0, N)
        k = _convolved(inputs, own_ring, conv_weight, conv_bias, H * P + group * N + n, now, CONV_DIM, KERNEL, 2 * C)
        q = _convolved(inputs, own_ring, conv_weight, conv_bias, H * P + (G + group) * N + n, now, CONV_DIM, KERNEL, 2 * C)
        tl.store(key + (batch * G + group) * N + n, k.to(key.dtype.element_ty))
        tl.store(query + (batch * G + group) * N + n, q.to(query.dtype.element_ty))

    level = tl.arange(0, BLOCK_L)
    if MODE == "fixed":
        lam = tl.full((BLOCK_L,), 1.0, tl.float32)
    else:
        lam = tl.load(levels + at * L + level, level < L, 0).to(tl.float32)
    if MODE == "linear":
        lam = softplus(lam * tl.load(scale + head * L + level, level < L, 0).to(tl.float32))
    elif MODE != "fixed":
        hidden = tl.arange(0, BLOCK_2L)
        inner = (level < L)[:, None] & (hidden < 2 * L)[None, :]
        w1 = tl.load(up + level[:, None] * 2 * L + hidden[None, :], inner, 0).to(tl.float32)
        w2 = tl.load(down + hidden[None, :] * L + level[:, None], inner, 0).to(tl.float32)
        lam = tl.sum(tl.sum(lam[:, None] * w1, 0)[None, :] * w2, 1)
        lam += tl.load(lambda_bias + level, level < L, 0).to(tl.float32)
        if MODE == "mlp_softmax":
            lam = tl.softmax(tl.where(level < L, lam, -float("inf")))
        else:
            lam = softplus(lam)
    tl.store(weights + at * L + level, lam, level < L)


@triton.jit
def _norm_linear_add(
    x, norm, weight, bias, residual, y, rows, eps,
    D: tl.constexpr, GROUPS: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = residual + rms_norm(x) @ weight.T + bias, the norm over each of GROUPS parts of D.

    Grid (tiles of OUT,). Reads x [rows, D], norm [D], a tile of weight [OUT, D] and of residual [rows, OUT]; writes a tile
    of y.
    """
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    acc = _norm_product(x, norm, weight, out, rows, eps, D, GROUPS, OUT, ROWS, BLOCK_K)
    _store_rows(y, acc, bias, residual, out, rows, OUT)


@triton.jit
def _norm_mlp(
    x, norm, gate_weight, up_weight, y, rows, eps,
    D: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = silu(h @ gate_weight.T) * (h @ up_weight.T) with h = rms_norm(x).

    Grid (tiles of OUT,). Reads x [rows, D], norm [D] and a tile of each weight [OUT, D]; writes a tile of y [rows, OUT].
    """
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    gate = tl.zeros((BLOCK_OUT, max(ROWS, 16)), tl.float32)
    up = tl.zeros((BLOCK_OUT, max(ROWS, 16)), tl.float32)
    squares = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for start in range(0, D, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        h = _load_rows(x, k, rows, D, ROWS)
        squares += h * h
        h *= tl.load(norm + k, k < D, 0).to(tl.float32)[None, :]
        gate = _multiply(gate_weight, h, gate, out, k, OUT, D)
        up = _multiply(up_weight, h, up, out, k, OUT, D)
    factor = tl.rsqrt(tl.sum(squares, 1) / D + eps)[None, :]
    gate *= factor
    _store_rows(y, gate * tl.sigmoid(gate) * (up * factor), None, None, out, rows, OUT)


@triton.jit
def _linear_add(
    x, weight, residual, y, rows,
    D: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = residual + x @ weight.T.

    Grid (tiles of OUT,). Reads x [rows, D], a tile of weight [OUT, D] and of residual [rows, OUT]; writes a tile of y.
    """
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    acc = tl.zeros((BLOCK_OUT, max(ROWS, 16)), tl.float32)
    for start in range(0, D, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        acc = _multiply(weight, _load_rows(x, k, rows, D, ROWS), acc, out, k, OUT, D)
    _store_rows(y, acc, None, residual, out, rows, OUT)


# ------------------------------------------------------------------------------------------------------------ the host


def can_fuse(blocks, config) -> bool:
    """Whether these kernels compute what a step of the blocks does: plain modules of one dtype, as they were defined.

    What a library has replaced (adapters, quantised layers) goes its own way, as do other activations and sizes.
    """
    if config.hidden_act != "silu" or not are_sizes_supported(config.state_size, config.head_dim, config.chunk_size):
        return False
    return all(_is_plain(block) for block in blocks)


def _is_plain(block):
    mixer = block.mixer
    linears, norms = [mixer.in_proj, mixer.out_proj], [block.norm, mixer.norm]
    if mixer.lambda_mode != "fixed":
        linears.append(mixer.lambda_proj)
    if block.has_mlp:
        linears += [block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj]
        norms.append(block.mlp_norm)
    weights = [module.weight for module in (*linears, *norms, mixer.conv1d)]
    plain = type(mixer.conv1d) is nn.Conv1d and all(type(linear) is nn.Linear for linear in linears)
    alike = all((w.dtype, w.device) == (weights[0].dtype, weights[0].device) and w.is_contiguous() for w in weights)
    return plain and alike and weights[0].dtype in DTYPES and not torch.is_autocast_enabled(weights[0].device.type)


def block_step(block, hidden_states, cache_layer):
    """One token per row through a `LogLinearBlock`: hidden_states [B, 1, D] -> [B, 1, D]; writes to `cache_layer` in place."""
    x = hidden_states.squeeze(1)
    if block.residual_in_fp32:
        x = x.float()
    with torch.cuda.device_of(x):  # Triton launches on the current device, which need not be the tensors'
        x = _mixer_step(block.mixer, block.norm, x.contiguous(), cache_layer)
        if block.has_mlp:
            x = _mlp_step(block.mlp, block.mlp_norm, x)
    return x.unsqueeze(1)


def _rows(x):
    """The rows of x and the room for them: one, or at least 16."""
    return {"rows": len(x), "ROWS": 1 if len(x) == 1 else max(16, triton.next_power_of_2(len(x)))}


def _tiles(size):
    return triton.cdiv(size, TILE["BLOCK_OUT"])


def _mixer_step(mixer, norm, x, cache_layer):
    """x + mixer(norm(x)): [B, D] -> [B, D]."""
    B, (OUT, D) = len(x), mixer.in_proj.weight.shape
    H, P, G, N, L = mixer.num_heads, mixer.head_dim, mixer.num_groups, mixer.state_size, mixer.num_levels
    projected = x.new_empty(B, OUT, dtype=mixer.in_proj.weight.dtype)
    levels, lambda_weight = projected.new_empty(B, H, L), None
    if mixer.lambda_mode != "fixed":
        lambda_weight = mixer.lambda_proj.weight
    _norm_projections[_tiles(OUT) + (0 if lambda_weight is None else _tiles(H * L)),](
        x, norm.weight, mixer.in_proj.weight, mixer.in_proj.bias, lambda_weight, projected, levels,
        eps=norm.variance_epsilon, D=D, OUT=OUT, LEVELS=H * L, **_rows(x), **TILE,
    )  # fmt: skip
    mixer.begin(cache_layer, projected[:, None].split_with_sizes(mixer.split_sizes, -1)[1])

    query, key = projected.new_empty(2, B, G, N)
    values, value = projected.new_empty(2, B, H, P)
    log_decay, weights = projected.new_empty(B, H, dtype=torch.float32), projected.new_empty(B, H, L, dtype=torch.float32)
    head = getattr(mixer, "lambda_head", None)
    tail = cache_layer.state
    _mixer_inputs[B, H](
        projected, levels, cache_layer.conv_ring, mixer.conv1d.weight, mixer.conv1d.bias, mixer.dt_bias, mixer.A_log,
        *(getattr(head, name, None) for name in ("scale", "up", "down", "bias")), *tail, query, key, values, value, log_decay,
        weights, *mixer.time_step_limit, tail.levels.shape[1],
        H=H, G=G, N=N, P=P, L=L, C=mixer.chunk_size, KERNEL=mixer.conv_kernel, MODE=mixer.lambda_mode,
        BLOCK_L=triton.next_power_of_2(L), BLOCK_2L=triton.next_power_of_2(2 * L), BLOCK_P=min(P, MERGE_COLUMNS),
    )  # fmt: skip
    y = attend(query, key, value, log_decay, weights, *tail, gate=projected, values=values, skip=mixer.D).flatten(1)
    out, width = torch.empty_like(x), y.shape[1]
    _norm_linear_add[_tiles(D),](
        y, mixer.norm.weight, mixer.out_proj.weight, mixer.out_proj.bias, x, out, eps=mixer.norm.variance_epsilon,
        D=width, GROUPS=mixer.norm.num_groups, OUT=D, **_rows(y), **TILE,
    )  # fmt: skip
    return out


def _mlp_step(mlp, norm, x):
    """x + mlp(norm(x)): [B, D] -> [B, D]."""
    hidden_size, D = mlp.gate_proj.weight.shape
    hidden, out = x.new_empty(len(x), hidden_size, dtype=norm.weight.dtype), torch.empty_like(x)
    _norm_mlp[_tiles(hidden_size),](
        x, norm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, hidden, eps=norm.variance_epsilon, D=D, OUT=hidden_size,
        **_rows(x), **TILE,
    )  # fmt: skip
    _linear_add[_tiles(D),](hidden, mlp.down_proj.weight, x, out, D=hidden_size, OUT=D, **_rows(x), **TILE)
    return out
