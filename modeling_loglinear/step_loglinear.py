"""A decoding step of one block in few kernels.

A step of a single row reads every weight for one vector, so it is as fast as the weights and the state arrive: six kernels do
what the modules launch some twenty for. Each reads one weight matrix (or two that share their input) or the state, and computes
on the way whatever stands before and after:

    norm, in_proj, lambda_proj             `_norm_projections`
    convolution, time step, level weights  `_mixer_inputs` (which also merges the tail's oldest chunk where it is full)
    attention, skip, gate                  `triton_loglinear.attend`
    norm, out_proj, residual               `_norm_linear_add`
    norm, gate_proj, up_proj, activation   `_norm_mlp`
    down_proj, residual                    `_linear_add`

A norm is a single factor, so it is applied after the product, from squares that were added up meanwhile. No kernel of a step
writes weights, so a program loads its first ones before `hand_over`, while the kernel in front still runs; whatever wrote them
earlier has ended, since a step begins with the embedding, an ordinary kernel. For several rows a matrix product is more than
reading its weights, and the libraries do it better: there only `_mixer_inputs`, `attend` and `add_rms_norm` serve.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # modeling_loglinear.py catches this and does without
    raise ImportError("The kernels of a decoding step need the package `triton`.") from error

from .fused_loglinear import add_rms_norm, softplus
from .triton_loglinear import (
    DTYPES,
    MERGE_COLUMNS,
    are_sizes_supported,
    attend,
    early_launch,
    hand_over,
    merge_oldest_chunk,
)

TILE = 4  # outputs of a product that one program computes: few, so that all processors read
MOST_COLUMNS = 512  # of a weight matrix that it reads at a time


# ------------------------------------------------------------------------------------------------------ inside kernels


@triton.jit
def _columns(x, k, D: tl.constexpr):
    """x [D] at k, in float32, zeros beyond its end."""
    return tl.load(x + k, k < D, 0).to(tl.float32)


@triton.jit
def _tile(weight, out, k, OUT: tl.constexpr, D: tl.constexpr):
    """weight [OUT, D] at the rows `out` and the columns k."""
    return tl.load(weight + out[:, None].to(tl.int64) * D + k[None, :], (out < OUT)[:, None] & (k < D)[None, :], 0)


@triton.jit
def _norm_product(
    x, norm, weight, out, eps,
    D: tl.constexpr, GROUPS: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows `out` of weight [OUT, D] times rms_norm(x [D]), the norm over each of GROUPS parts of D: [TILE]."""
    WIDTH: tl.constexpr = D // GROUPS
    total = tl.zeros((TILE,), tl.float32)
    for group in tl.static_range(GROUPS):
        acc = tl.zeros((TILE, BLOCK), tl.float32)
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in tl.static_range(0, WIDTH, BLOCK):
            k = start + tl.arange(0, BLOCK)
            if GROUPS > 1:
                k = tl.where(k < WIDTH, group * WIDTH + k, D)  # D: no column of this group
            w, scale = _tile(weight, out, k, OUT, D), _columns(norm, k, D)
            if group == 0 and start == 0:
                hand_over(EARLY)
            h = _columns(x, k, D)
            squares += h * h
            acc += w * (h * scale)[None, :]
        total += tl.sum(acc, 1) * tl.rsqrt(tl.sum(squares) / WIDTH + eps)
    return total


@triton.jit
def _store(y, values, bias, residual, out, OUT: tl.constexpr):
    """y [OUT] at `out` = values + bias + residual, the last two if they are given."""
    if bias is not None:
        values += _columns(bias, out, OUT)
    if residual is not None:
        values += _columns(residual, out, OUT)
    tl.store(y + out, values.to(y.dtype.element_ty), out < OUT)


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
    x, norm, weight, bias, lambda_weight, projected, levels, eps,
    D: tl.constexpr, OUT: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """rms_norm(x) times in_proj and times lambda_proj.

    Grid (tiles of OUT, then tiles of LEVELS). Reads x, norm [D] and one tile of weight [OUT, D] or of lambda_weight
    [LEVELS, D]; writes a tile of projected [OUT] or levels [LEVELS].
    """
    tiles: tl.constexpr = (OUT + TILE - 1) // TILE
    if tl.program_id(0) < tiles:
        out = tl.program_id(0) * TILE + tl.arange(0, TILE)
        values = _norm_product(x, norm, weight, out, eps, D, 1, OUT, TILE, BLOCK, EARLY)
        _store(projected, values, bias, None, out, OUT)
    elif lambda_weight is not None:
        out = (tl.program_id(0) - tiles) * TILE + tl.arange(0, TILE)
        values = _norm_product(x, norm, lambda_weight, out, eps, D, 1, LEVELS, TILE, BLOCK, EARLY)
        _store(levels, values, None, None, out, LEVELS)


@triton.jit
def _mixer_inputs(
    projected, levels, ring, conv_weight, conv_bias, dt_bias, a_log, scale, up, down, lambda_bias, tail_key, tail_value,
    tail_log_decay, state_levels, merged, lengths, query, key, values, value, log_decay, weights, low, high, kept,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    KERNEL: tl.constexpr, MODE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_2L: tl.constexpr, BLOCK_P: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """What attention reads, from what in_proj and lambda_proj give; merges the tail's oldest chunk where the tail is full.

    Grid (B, H). Reads the head's part of projected [B, z, x, key, query, dt], levels [B, H, L] and ring [B, 2C, conv_dim], for
    the first head of a group also its key and query. Writes the same part of query, key [B, G, N], values, value [B, H, P],
    log_decay [B, H], weights [B, H, L] and the token's slot of ring, which no program reads.
    """
    hand_over(EARLY)
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    now, chunk = tl.load(lengths + batch), tl.load(merged + batch)
    if now == (chunk + 2) * C:
        for start in range(0, P, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            merge_oldest_chunk(
                tail_key, tail_value, tail_log_decay, state_levels, batch, head, p, chunk, H, H // G, kept, N, P, C
            )

    CONV_DIM: tl.constexpr = H * P + 2 * G * N
    inputs = projected + batch * (H * P + CONV_DIM + H) + H * P
    ring += batch * (2 * C * CONV_DIM)
    at = batch * H + head
    p = tl.arange(0, P)
    x = _convolved(inputs, ring, conv_weight, conv_bias, head * P + p, now, CONV_DIM, KERNEL, 2 * C)
    dt = tl.load(inputs + CONV_DIM + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(dt), low), high)
    tl.store(values + at * P + p, x.to(values.dtype.element_ty))
    tl.store(value + at * P + p, (x * step).to(value.dtype.element_ty))
    tl.store(log_decay + at, -tl.exp(tl.load(a_log + head).to(tl.float32)) * step)
    if head % (H // G) == 0:
        group = head // (H // G)
        n = tl.arange(0, N)
        k = _convolved(inputs, ring, conv_weight, conv_bias, H * P + group * N + n, now, CONV_DIM, KERNEL, 2 * C)
        q = _convolved(inputs, ring, conv_weight, conv_bias, H * P + (G + group) * N + n, now, CONV_DIM, KERNEL, 2 * C)
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
    x, norm, weight, bias, residual, y, eps,
    D: tl.constexpr, GROUPS: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = residual + weight @ rms_norm(x) + bias, the norm over each of GROUPS parts of D.

    Grid (tiles of OUT,). Reads x, norm [D], a tile of weight [OUT, D], of bias and of residual [OUT]; writes a tile of y [OUT].
    """
    out = tl.program_id(0) * TILE + tl.arange(0, TILE)
    _store(y, _norm_product(x, norm, weight, out, eps, D, GROUPS, OUT, TILE, BLOCK, EARLY), bias, residual, out, OUT)


@triton.jit
def _norm_mlp(
    x, norm, gate_weight, up_weight, y, eps,
    D: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = silu(gate_weight @ h) * (up_weight @ h) with h = rms_norm(x).

    Grid (tiles of OUT,). Reads x, norm [D] and a tile of each weight [OUT, D]; writes a tile of y [OUT].
    """
    out = tl.program_id(0) * TILE + tl.arange(0, TILE)
    gates, ups = tl.zeros((TILE, BLOCK), tl.float32), tl.zeros((TILE, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, D, BLOCK):
        k = start + tl.arange(0, BLOCK)
        gate_w, up_w, scale = _tile(gate_weight, out, k, OUT, D), _tile(up_weight, out, k, OUT, D), _columns(norm, k, D)
        if start == 0:
            hand_over(EARLY)
        h = _columns(x, k, D)
        squares += h * h
        gates += gate_w * (h * scale)[None, :]
        ups += up_w * (h * scale)[None, :]
    factor = tl.rsqrt(tl.sum(squares) / D + eps)
    gate = tl.sum(gates, 1) * factor
    _store(y, gate * tl.sigmoid(gate) * tl.sum(ups, 1) * factor, None, None, out, OUT)


@triton.jit
def _linear_add(
    x, weight, residual, y,
    D: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = residual + weight @ x.

    Grid (tiles of OUT,). Reads x [D], a tile of weight [OUT, D] and of residual [OUT]; writes a tile of y [OUT].
    """
    out = tl.program_id(0) * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE, BLOCK), tl.float32)
    for start in tl.static_range(0, D, BLOCK):
        k = start + tl.arange(0, BLOCK)
        w = _tile(weight, out, k, OUT, D)
        if start == 0:
            hand_over(EARLY)
        acc += w * _columns(x, k, D)[None, :]
    _store(y, tl.sum(acc, 1), None, residual, out, OUT)


# ------------------------------------------------------------------------------------------------------------ the host


def can_fuse(blocks, config, parts) -> bool:
    """Whether these kernels compute what a step of the blocks does: modules of the classes `parts` alone, of one dtype.

    What a library or a user has replaced (adapters, quantised layers) goes its own way, as do other activations and sizes.
    """
    if config.hidden_act != "silu" or not are_sizes_supported(config.state_size, config.head_dim, config.chunk_size):
        return False
    modules = [module for block in blocks for module in block.modules()]
    as_defined = all(type(module) in parts and "forward" not in vars(module) for module in modules)
    return as_defined and all(map(_is_plain, blocks))


def _is_plain(block):
    weights = [module.weight for module in block.modules() if hasattr(module, "weight")]
    alike = all((w.dtype, w.device) == (weights[0].dtype, weights[0].device) and w.is_contiguous() for w in weights)
    return alike and weights[0].dtype in DTYPES and not torch.is_autocast_enabled(weights[0].device.type)


def step_through(blocks, hidden_states, cache_layers):
    """One token per row through some `LogLinearBlock`s, [B, 1, D] -> [B, 1, D]; writes to the layers of the cache in place."""
    x = hidden_states.float() if blocks[0].residual_in_fp32 else hidden_states
    with torch.cuda.device_of(x):  # Triton launches on the current device, which need not be the tensors'
        return (_row_through if len(x) == 1 else _rows_through)(blocks, x.contiguous(), cache_layers)


def _row_through(blocks, x, cache_layers):
    for block, cache_layer in zip(blocks, cache_layers):
        x = _mixer_of_row(block.mixer, block.norm, x, cache_layer)
        if block.has_mlp:
            x = _mlp_of_row(block.mlp, block.mlp_norm, x)
    return x


def _rows_through(blocks, x, cache_layers):
    """What a block adds waits for the next norm, which reads it anyway."""
    added = None
    for block, cache_layer in zip(blocks, cache_layers):
        x, normed = add_rms_norm(x, added, block.norm.weight, block.norm.variance_epsilon)
        added = _mixer_of_rows(block.mixer, normed, cache_layer)
        if block.has_mlp:
            x, normed = add_rms_norm(x, added, block.mlp_norm.weight, block.mlp_norm.variance_epsilon)
            added = block.mlp(normed)
    return x + added


def _mixer_of_rows(mixer, x, cache_layer):
    """mixer(x): [B, 1, D] -> [B, 1, D]."""
    projected = mixer.in_proj(x)
    levels = None if mixer.lambda_mode == "fixed" else mixer.lambda_proj(x)
    values, *tokens = _inputs(mixer, projected, levels, cache_layer)
    y = attend(*tokens, *cache_layer.state)
    gate = projected.split_with_sizes(mixer.split_sizes, -1)[0]
    return mixer.out_proj(mixer.norm(y.unsqueeze(1), values.unsqueeze(1), mixer.D, gate))


def _inputs(mixer, projected, levels, cache_layer):
    """values [B, H, P], then what a step of attention takes: query, key, value, log_decay, level_weights."""
    B, H, P = len(projected), mixer.num_heads, mixer.head_dim
    G, N, L = mixer.num_groups, mixer.state_size, mixer.num_levels
    mixer.begin(cache_layer, projected.split_with_sizes(mixer.split_sizes, -1)[1])
    query, key = projected.new_empty(2, B, G, N)
    values, value = projected.new_empty(2, B, H, P)
    log_decay, weights = projected.new_empty(B, H, dtype=torch.float32), projected.new_empty(B, H, L, dtype=torch.float32)
    head, state = getattr(mixer, "lambda_head", None), cache_layer.state
    _mixer_inputs[B, H](
        projected, levels, cache_layer.conv_ring, mixer.conv1d.weight, mixer.conv1d.bias, mixer.dt_bias, mixer.A_log,
        *(getattr(head, name, None) for name in ("scale", "up", "down", "bias")), *state, query, key, values, value, log_decay,
        weights, *mixer.time_step_limit, state.levels.shape[1],
        H=H, G=G, N=N, P=P, L=L, C=mixer.chunk_size, KERNEL=mixer.conv_kernel, MODE=mixer.lambda_mode,
        BLOCK_L=triton.next_power_of_2(L), BLOCK_2L=triton.next_power_of_2(2 * L), BLOCK_P=min(P, MERGE_COLUMNS),
        **early_launch(projected.device),
    )  # fmt: skip
    return values, query, key, value, log_decay, weights


def _sizes(weight):
    """OUT and D of a weight matrix, and what one program takes of it."""
    OUT, D = weight.shape
    block = min(MOST_COLUMNS, triton.next_power_of_2(D))
    return {"OUT": OUT, "D": D, "TILE": TILE, "BLOCK": block, **early_launch(weight.device)}


def _tiles(size):
    return triton.cdiv(size, TILE)


def _mixer_of_row(mixer, norm, x, cache_layer):
    """x + mixer(norm(x)) for one row."""
    OUT, num_levels = len(mixer.in_proj.weight), mixer.num_heads * mixer.num_levels
    projected = x.new_empty(1, 1, OUT, dtype=mixer.in_proj.weight.dtype)
    levels, lambda_weight, tiles = None, None, _tiles(OUT)
    if mixer.lambda_mode != "fixed":
        levels, lambda_weight, tiles = projected.new_empty(num_levels), mixer.lambda_proj.weight, tiles + _tiles(num_levels)
    _norm_projections[tiles,](
        x, norm.weight, mixer.in_proj.weight, mixer.in_proj.bias, lambda_weight, projected, levels, norm.variance_epsilon,
        LEVELS=num_levels, **_sizes(mixer.in_proj.weight),
    )  # fmt: skip
    values, *tokens = _inputs(mixer, projected, levels, cache_layer)
    y = attend(*tokens, *cache_layer.state, gate=projected[0], values=values, skip=mixer.D)
    out = torch.empty_like(x)
    _norm_linear_add[_tiles(out.shape[-1]),](
        y, mixer.norm.weight, mixer.out_proj.weight, mixer.out_proj.bias, x, out, mixer.norm.variance_epsilon,
        GROUPS=mixer.norm.num_groups, **_sizes(mixer.out_proj.weight),
    )  # fmt: skip
    return out


def _mlp_of_row(mlp, norm, x):
    """x + mlp(norm(x)) for one row."""
    hidden, out = x.new_empty(len(mlp.up_proj.weight), dtype=norm.weight.dtype), torch.empty_like(x)
    _norm_mlp[_tiles(len(hidden)),](
        x, norm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, hidden, norm.variance_epsilon, **_sizes(mlp.up_proj.weight)
    )
    _linear_add[_tiles(out.shape[-1]),](hidden, mlp.down_proj.weight, x, out, **_sizes(mlp.down_proj.weight))
    return out
