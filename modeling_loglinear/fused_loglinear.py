"""Chains of small operations of the mixer as one kernel each, for inference without `torch.compile` on a GPU.

Prefill waits for memory there and decoding for launches; each kernel reads and writes every value once. Training and compiled
code take the plain PyTorch twins in `modeling_loglinear.py`: autograd and the compiler do well with those.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # modeling_loglinear.py catches this and does without
    raise ImportError("The fused kernels need the package `triton`.") from error


@triton.jit
def softplus(x):
    """log(1 + exp(x)); above 20 the difference to x is below float32."""
    return tl.where(x > 20, x, tl.log(1 + tl.exp(x)))


@triton.jit
def _rms_norm(x, added, total, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows,). Reads x [rows, D] and weight [D], writes out [rows, D] = weight * x / rms(x).

    If `added` is given, x + added, which goes to `total`, takes the place of x.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    h = tl.load(x + row * D + d, d < D, 0).to(tl.float32)
    if added is not None:
        h += tl.load(added + row * D + d, d < D, 0).to(tl.float32)
        h = h.to(total.dtype.element_ty)
        tl.store(total + row * D + d, h, d < D)
        h = h.to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h) / D + eps)
    tl.store(out + row * D + d, (tl.load(weight + d, d < D, 0) * h.to(weight.dtype.element_ty)), d < D)


@triton.jit
def _silu_product(gate, up, out, size, BLOCK: tl.constexpr):
    """Grid (size / BLOCK,). Reads gate and up, writes out = silu(gate) * up, all [size]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(gate + at, at < size, 0).to(tl.float32)
    z *= tl.sigmoid(z) * tl.load(up + at, at < size, 0).to(tl.float32)
    tl.store(out + at, z.to(out.dtype.element_ty), at < size)


@triton.jit
def _gated_norm(
    y, values, gate, skip, weight, out, eps, value_stride, gate_stride,
    I: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, groups). out = weight * norm((y + skip * values) * silu(gate)), the norm over the WIDTH channels of a group.

    Reads y [rows, I], values and gate (rows value_stride, gate_stride apart), skip [I / P], weight [I]; writes out [rows, I].
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    valid = lane < WIDTH
    channel = tl.program_id(1) * WIDTH + lane
    h = tl.load(y + row * I + channel, valid, 0).to(tl.float32)
    x = tl.load(values + row * value_stride + channel, valid, 0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + channel, valid, 0).to(tl.float32)
    h += tl.load(skip + channel // P, valid, 0).to(tl.float32) * x
    h *= z * tl.sigmoid(z)
    h = h * tl.rsqrt(tl.sum(h * h) / WIDTH + eps)
    w = tl.load(weight + channel, valid, 0)
    tl.store(out + row * I + channel, w * h.to(weight.dtype.element_ty), valid)


@triton.jit
def _convolution(
    x, ring, lengths, active, weight, bias, out, T, x_row, x_token, R,
    D: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (B, T / BLOCK_T, D / BLOCK_D). out [B, T, D] = silu(causal depthwise convolution of x [B, T, D] + bias).

    Before the first of the T tokens stand the tokens of ring [B, R, D], the newest at position lengths [B] - 1; without a
    ring, zeros. With STEP (T = 1) the token is also written into its slot of the ring, unless its row is not active.
    """
    row = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = d < D
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for tap in tl.static_range(K):
        source = t - (K - 1 - tap)  # token under this tap
        is_new = (source >= 0) & (source < T)
        h = tl.load(x + row * x_row + source[:, None].to(tl.int64) * x_token + d, is_new[:, None] & in_d, 0).to(tl.float32)
        if ring is not None:
            position = tl.load(lengths + row) + source
            is_old = (source < 0) & (position >= 0)
            slot = row * R + tl.where(is_old, position, 0) % R
            h += tl.load(ring + slot[:, None] * D + d, is_old[:, None] & in_d, 0).to(tl.float32)
        acc += h * tl.load(weight + d * K + tap, in_d, 0).to(tl.float32)
    if bias is not None:
        acc += tl.load(bias + d, in_d, 0).to(tl.float32)
    acc *= tl.sigmoid(acc)
    tl.store(out + (row * T + t[:, None]) * D + d, acc.to(out.dtype.element_ty), (t < T)[:, None] & in_d)
    if STEP:
        writes = in_d
        if active is not None:
            writes = in_d & tl.load(active + row)
        slot = row * R + tl.load(lengths + row) % R
        tl.store(ring + slot * D + d, tl.load(x + row * x_row + d, in_d, 0), writes)


@triton.jit
def _time_step(
    dt, dt_bias, a_log, values, log_decay, value, low, high, dt_stride, value_stride,
    H: tl.constexpr, P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). s = clamp(softplus(dt + dt_bias), low, high); log_decay = -exp(a_log) s; value [rows, H, P] = s x.

    Reads dt (rows dt_stride apart), dt_bias [H], a_log [H] and values (rows value_stride apart).
    """
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    step = tl.load(dt + row * dt_stride + h, h < H, 0).to(tl.float32) + tl.load(dt_bias + h, h < H, 0).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(step), low), high)
    decay = -tl.exp(tl.load(a_log + h, h < H, 0).to(tl.float32)) * step
    tl.store(log_decay + row * H + h, decay, h < H)
    lane = tl.arange(0, BLOCK)
    valid = lane < H * P
    head = lane // P
    step = tl.load(dt + row * dt_stride + head, valid, 0).to(tl.float32) + tl.load(dt_bias + head, valid, 0).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(step), low), high)
    x = tl.load(values + row * value_stride + lane, valid, 0).to(tl.float32)
    tl.store(value + row * H * P + lane, (x * step).to(value.dtype.element_ty), valid)


@triton.jit
def _level_weights(
    levels, up, down, bias, out, rows,
    L: tl.constexpr, SOFTMAX: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_2L: tl.constexpr,
):  # fmt: skip
    """Grid (rows / ROWS,). out [rows, L] = softplus or softmax of levels [rows, L] @ up [L, 2L] @ down [2L, L] + bias [L]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    level, hidden = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_2L)
    valid = (row < rows)[:, None] & (level < L)
    x = tl.load(levels + row[:, None] * L + level, valid, 0).to(tl.float32)
    in_up = (level < L)[:, None] & (hidden < 2 * L)
    w1 = tl.load(up + level[:, None] * 2 * L + hidden, in_up, 0).to(tl.float32)
    in_down = (hidden < 2 * L)[:, None] & (level < L)
    w2 = tl.load(down + hidden[:, None] * L + level, in_down, 0).to(tl.float32)
    both = tl.dot(w1, w2, input_precision="ieee")
    x = tl.dot(x, both, input_precision="ieee") + tl.load(bias + level, level < L, 0).to(tl.float32)
    if SOFTMAX:
        x = tl.where(level < L, x, -float("inf"))
        x = tl.exp(x - tl.max(x, 1)[:, None])
        x = x / tl.sum(x, 1)[:, None]
    else:
        x = softplus(x)
    tl.store(out + row[:, None] * L + level, x, valid)


def _launch(kernel, grid, *arguments, num_warps=4):
    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device, which need not be the tensor's
        kernel[grid](*arguments, num_warps=num_warps)


def _rows(x):
    """(x, distance of its rows) with the last dimension contiguous and all others one list of rows."""
    flat = x.flatten(0, -2) if x.dim() > 2 else x
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    return flat, flat.stride(0)


def rms_norm(x, weight, eps):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, in the dtype of `weight`."""
    return add_rms_norm(x, None, weight, eps)[1]


def add_rms_norm(x, added, weight, eps):
    """(x + added in the dtype of x, its `rms_norm`); `added` may be None."""
    x = total = x.contiguous()
    if added is not None:
        added, total = added.contiguous(), torch.empty_like(x)
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    D = x.shape[-1]
    _launch(_rms_norm, (x.numel() // D,), x, added, total, weight, out, eps, D, triton.next_power_of_2(D))
    return total, out


def silu_product(gate, up):
    """`silu(gate) * up` of two tensors of one shape."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(up)
    _launch(_silu_product, (triton.cdiv(out.numel(), 1024),), gate, up, out, out.numel(), 1024)
    return out


def gated_norm(y, values, gate, skip, weight, num_groups, eps):
    """`LogLinearGatedRMSNorm` of `y + skip * values`: y, values, gate [B, T, I], skip [H], weight [I]."""
    y = y.contiguous()
    I = y.shape[-1]
    values, value_stride = _rows(values)
    gate, gate_stride = _rows(gate)
    out = torch.empty(y.shape, dtype=weight.dtype, device=y.device)
    width = I // num_groups
    _launch(
        _gated_norm, (y.numel() // I, num_groups), y, values, gate, skip, weight, out, eps, value_stride, gate_stride,
        I, I // len(skip), width, triton.next_power_of_2(width), num_warps=4 if width <= 4096 else 8,
    )  # fmt: skip
    return out


def convolution(x, weight, bias, ring=None, lengths=None, active=None, step=False):
    """silu(depthwise causal convolution): x [B, T, D], weight [D, 1, K], bias [D] or None -> [B, T, D].

    ring [B, R, D] holds the tokens before, the newest at position `lengths` - 1; with `step` (T = 1) it also takes the new one.
    """
    B, T, D = x.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(B, T, D, dtype=x.dtype, device=x.device)
    block_t, block_d = (1, 256) if T == 1 else (32, 64)
    grid = (B, triton.cdiv(T, block_t), triton.cdiv(D, block_d))
    _launch(
        _convolution, grid, x, ring, lengths, active, weight, bias, out, T, *x.stride()[:2],
        1 if ring is None else ring.shape[1], D, weight.shape[-1], step, block_t, block_d,
    )  # fmt: skip
    return out


def time_step(dt, dt_bias, a_log, values, limits):
    """(log_decay [B, T, H] float32, value [B, T, H, P]) from dt [B, T, H], dt_bias, a_log [H] and values [B, T, H, P]."""
    B, T, H, P = values.shape
    values, value_stride = _rows(values.flatten(-2))
    dt, dt_stride = _rows(dt)
    log_decay = torch.empty(B, T, H, dtype=torch.float32, device=values.device)
    value = torch.empty(B, T, H, P, dtype=values.dtype, device=values.device)
    _launch(
        _time_step, (B * T,), dt, dt_bias, a_log, values, log_decay, value, *limits, dt_stride, value_stride,
        H, P, triton.next_power_of_2(H), triton.next_power_of_2(H * P),
    )  # fmt: skip
    return log_decay, value


def level_weights(levels, up, down, bias, softmax):
    """The MLP modes of `LogLinearLambdaHead`: levels [B, T, H, L] -> [B, T, H, L] float32."""
    levels = levels.contiguous()
    L = levels.shape[-1]
    out = torch.empty(levels.shape, dtype=torch.float32, device=levels.device)
    rows = levels.numel() // L
    block = max(16, triton.next_power_of_2(L))
    _launch(
        _level_weights, (triton.cdiv(rows, 64),), levels, up, down, bias, out, rows,
        L, softmax, 64, block, max(16, triton.next_power_of_2(2 * L)),
    )  # fmt: skip
    return out
