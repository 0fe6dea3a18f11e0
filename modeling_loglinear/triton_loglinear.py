"""Log-linear attention on a GPU: the tree of `attention_loglinear.py` as Triton kernels, forward, backward and decode.

Letters: B rows, T tokens, H value heads, G key groups, N key size, P value size, L levels; C tokens per chunk.

**One node per chunk.** Chunk c of a sequence is the end of exactly one node that anybody reads: the block of 2**z chunks
that ends with c, z the number of trailing ones of c. So the whole tree is one buffer `nodes` with one slot [H, N, P] per
chunk (a Fenwick tree in place), and everything before chunk c is read by a walk over the set bits of c:

    e = c;  while e: read the node in slot e - 1 (level: lowest set bit of e);  e &= e - 1

**Forward**: `_chunk_decays` adds up the log decay, `_chunk_states` fills the slots with chunks and nodes of up to four,
`_merge` makes the others in place, three levels per launch; `_output` does the work inside a chunk and the walk;
`_final_levels` walks for the state that is left.
**Backward**: the first three again (cheaper than keeping them), then `_query_gradient` (what the walk read),
`_node_gradient` and `_sum_segments` (who read a node), `_final_levels_gradient`, `_split` (`_merge` backwards, top down:
each slot then holds the gradient of its own chunk's state) and `_key_gradient`. Nothing walks along T; the longest loop
is that of `_sum_segments`, one addition per 2**SEGMENT chunks of the largest node.

**Decays** are only ever added up along the tree, never taken as differences of long sums, which float32 would lose: inside a
chunk as a running sum `cum`, for nodes in `decay[level, slot]`, the decay over the node of that level that ends in the slot.
The gradient of the log decay is made the same way: sums inside the chunk, plus `span[slot]`, the gradient of a whole chunk's
decay, which flows down the tree beside the node gradients.

**Initial levels** are further nodes behind the chunk slots, already decayed up to the first chunk, whose absolute index is
`first`. A slot is then the chunk's absolute index less `first`; a node that ends before `first` is an initial one.
"""

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError as error:  # attention_loglinear.py catches this and does without
    raise ImportError("The Triton kernels need the package `triton`.") from error


SEGMENT = 4  # log2 of the chunks whose contributions to a node's gradient one program adds up
MERGE_TILE = 2048  # elements of a node that one program of the elementwise kernels holds
INTERPRETED = triton.knobs.runtime.interpret  # read once: torch.compile cannot trace the look-up
MERGE_DEPTH = 3  # levels of the tree that one launch merges
DTYPES = torch.float32, torch.bfloat16, torch.float16
MERGE_COLUMNS = 32  # of a head's values that a program takes which merges a chunk of the tail


class Layout(NamedTuple):
    """Where sequences, tokens and slots stand; the same for all kernels of a call.

    Dense rows: sequence s has the tokens s * T ... and the slots s * chunks ... Packed: `cu` and `starts` say so.
    """

    tokens: int  # T, tokens per dense row
    chunks: int  # chunk slots per dense row
    slots: int  # chunk slots in all; the initial nodes stand behind them
    kept: int  # K, entries of a state's levels
    skip: int  # log2(chunk size of the state / C): level l of the tree is entry l - skip of the state
    cu: Optional[torch.Tensor]  # [S + 1] token borders of packed sequences
    starts: Optional[torch.Tensor]  # [S] first slot of packed sequences
    lengths: Optional[torch.Tensor]  # [S] tokens of ragged dense rows
    first: Optional[torch.Tensor]  # [S] absolute index of the first chunk


class Grouping(NamedTuple):
    """All aligned groups of 2**shift chunks, numbered sequence after sequence."""

    count: int  # groups in all (a bound that needs no look at the device)
    per_row: int  # groups per dense row
    table: Optional[torch.Tensor]  # [count, 2] packed: sequence, number of the group in it
    starts: Optional[torch.Tensor]  # [S] packed: number of the sequence's first group


# ------------------------------------------------------------------------------------------------------ inside kernels


@triton.jit
def hand_over(EARLY: tl.constexpr):
    """Lets the kernel behind start and waits for the one in front: what follows reads and writes as in any other kernel.

    For launches with `early_launch`. Every program must call it, before its first access to what a kernel in front writes.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _find(index, grouping, layout, C: tl.constexpr):
    """Group number -> (sequence, group in it, its first token, its tokens, its first slot, absolute first and end chunk)."""
    if grouping.table is None:
        seq = index // grouping.per_row
        group = index % grouping.per_row
    else:
        seq = tl.load(grouping.table + 2 * index)
        group = tl.load(grouping.table + 2 * index + 1)
    if layout.cu is None:
        token = seq.to(tl.int64) * layout.tokens
        slot = seq * layout.chunks
        if layout.lengths is None:
            count = layout.tokens + 0 * seq
        else:
            count = tl.load(layout.lengths + seq).to(tl.int32)
    else:
        token = tl.load(layout.cu + seq).to(tl.int64)
        count = (tl.load(layout.cu + seq + 1) - token).to(tl.int32)
        slot = tl.load(layout.starts + seq)
    if layout.first is None:
        first = 0 * seq
    else:
        first = tl.load(layout.first + seq)
    return seq, group, token, count, slot, first, first + (count + C - 1) // C


@triton.jit
def _low_bit(x):
    """Index of the lowest set bit of x > 0: the exponent of x & -x as a float."""
    return ((x & -x).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _count_bits(x):
    """Set bits of 0 <= x < 2**31: sums of neighbours 1, 2, 4 bits wide, then of all bytes."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


@triton.jit
def _bit_length(x):
    """Bits of x >= 0: the exponent of its highest bit as a float (x & ~(x >> 1) keeps that bit and cannot round up)."""
    return tl.maximum(((x & ~(x >> 1)).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def _node(end, level, seq, slot, first, layout):
    """Slot of the node of `level` that ends before the absolute chunk `end`."""
    if layout.first is None:
        node = slot + end - 1
    else:
        node = tl.where(end > first, slot + end - 1 - first, layout.slots + seq * layout.kept + level - layout.skip)
    return node.to(tl.int64)


@triton.jit
def _weight(weights, level, offsets, valid, L):
    """Level weights of some tokens, 0 where `valid` is not; levels from L on share the last weight."""
    return tl.load(weights + offsets + tl.minimum(level, L - 1), mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _store_weight_gradient(d_weights, level, gradient, valid, L):
    """Stores the gradient of a level below the last; returns what is left for the last weight, which many levels share."""
    tl.store(d_weights + level, gradient.to(d_weights.dtype.element_ty), mask=valid & (level < L - 1))
    return tl.where(level < L - 1, 0.0, gradient)


@triton.jit
def _gate(cum, weights, stride, i, j, valid, L, C: tl.constexpr, LOG_C: tl.constexpr):
    """[C, C]: decay from j to i (0 for j > i), and the weight of level(i, j) = bit_length(i ^ j)."""
    decay = tl.exp(tl.where(j <= i, tl.load(cum + i) - tl.load(cum + j), -float("inf")))
    gate = _weight(weights, LOG_C, i * stride, valid, L)
    for step in tl.static_range(LOG_C):
        level = LOG_C - 1 - step
        gate = tl.where((i ^ j) < (1 << level), _weight(weights, level, i * stride, valid, L), gate)
    return decay, gate


# ------------------------------------------------------------------------------------------------------------- forward


@triton.jit
def _chunk_decays(log_decay, cum, to_end, decay, layout, grouping, g_token, g_head, H, C: tl.constexpr, BLOCK_H: tl.constexpr):
    """Running sums of the log decay inside one chunk, for some heads, their total, and the factor that a token is left with.

    Grid (slots, H / BLOCK_H). Reads log_decay [C, BLOCK_H]; writes cum [BLOCK_H, C], to_end [BLOCK_H, C], the decay between a
    token and the end of the chunk as a factor, and decay[0, slot] [BLOCK_H].
    """
    _, chunk, token, count, slot, _, _ = _find(tl.program_id(0), grouping, layout, C)
    if chunk * C >= count:
        return
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, C)[:, None]
    row = token + chunk * C + i
    valid = (chunk * C + i < count) & (head < H)[None, :]
    g = tl.load(log_decay + row * g_token + head[None, :] * g_head, mask=valid, other=0.0)
    here = (slot + chunk).to(tl.int64) * H + head
    sums, total = tl.cumsum(g, 0), tl.sum(g, 0)
    at = here[None, :] * C + i
    tl.store(cum + at, sums, mask=(head < H)[None, :])
    tl.store(to_end + at, tl.exp(tl.minimum(total[None, :] - sums, 0.0)), mask=(head < H)[None, :])
    tl.store(decay + here, total, mask=head < H)


@triton.jit
def _keys(key, chunk, n, token, count, k_token, C: tl.constexpr, dtype: tl.constexpr):
    """[C, BLOCK_N] keys of a chunk, zeros where it has no tokens."""
    position = chunk * C + tl.arange(0, C)
    valid = (position >= 0) & (position < count)
    return tl.load(key + (token + position)[:, None] * k_token + n[None, :], mask=valid[:, None], other=0.0).to(dtype)


@triton.jit
def _chunk_state(k, value, to_end, chunk, p, token, count, v_token, C: tl.constexpr, PRECISION: tl.constexpr):
    """[BLOCK_N, BLOCK_P]: sum_j exp(decay from j to the end of the chunk) k_j v_j^T."""
    position = chunk * C + tl.arange(0, C)
    valid = (position >= 0) & (position < count)
    v = tl.load(value + (token + position)[:, None] * v_token + p[None, :], mask=valid[:, None], other=0.0)
    v = (v.to(tl.float32) * tl.load(to_end + tl.arange(0, C), mask=valid, other=0.0)[:, None]).to(k.dtype)
    return tl.dot(tl.trans(k), v, input_precision=PRECISION)


@triton.jit
def _chunk_states(
    key, value, to_end, decay, nodes, layout, grouping, k_token, k_group, v_token, v_head, H, heads_per_group,
    heads_per_program, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The states of four neighbouring chunks and the nodes of levels 1 and 2, for some heads of a group, which share the keys.

    Grid (groups of four chunks, H / heads_per_program, tiles of [N, P]). Reads key [4C, BLOCK_N], per head value [4C, BLOCK_P],
    to_end [4, C] and the chunks' decays. Writes tiles of nodes[slot, head] in four slots: a state, a node of level 1, a state,
    a node of level 2. The first tile also writes the decays of levels 1 and 2.
    """
    seq, group, token, count, slot, first, last = _find(tl.program_id(0), grouping, layout, C)
    chunk = ((first >> 2) + group) * 4 - first  # the first of the four; negative if an initial state ends among them
    if chunk * C >= count:
        return
    head = tl.program_id(1) * heads_per_program
    tiles_p: tl.constexpr = P // BLOCK_P
    n = tl.program_id(2) // tiles_p * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tl.program_id(2) % tiles_p * BLOCK_P + tl.arange(0, BLOCK_P)
    is_first_tile = tl.program_id(2) == 0
    tile = n[:, None] * P + p[None, :]
    dtype: tl.constexpr = nodes.dtype.element_ty
    # Which of the four exist.
    e0, e1, e2 = chunk >= 0, (chunk >= -1) & ((chunk + 1) * C < count), (chunk >= -2) & ((chunk + 2) * C < count)
    e3 = (chunk + 3) * C < count
    of_group = key + head // heads_per_group * k_group
    k0 = _keys(of_group, chunk, n, token, count, k_token, C, dtype)
    k1 = _keys(of_group, chunk + 1, n, token, count, k_token, C, dtype)
    k2 = _keys(of_group, chunk + 2, n, token, count, k_token, C, dtype)
    k3 = _keys(of_group, chunk + 3, n, token, count, k_token, C, dtype)
    for _ in tl.range(0, heads_per_program, disable_licm=True):
        place = (seq, head, slot, first, last, H)
        v = value + head * v_head
        here = (slot + chunk).to(tl.int64) * H + head
        g0 = tl.load(decay + here, mask=e0, other=0.0)
        g1 = tl.load(decay + here + H, mask=e1, other=0.0)
        g2 = tl.load(decay + here + 2 * H, mask=e2, other=0.0)
        g3 = tl.load(decay + here + 3 * H, mask=e3, other=0.0)
        tl.store(decay + layout.slots * H + here + H, g0 + g1, mask=e1 & is_first_tile)
        tl.store(decay + layout.slots * H + here + 3 * H, g2 + g3, mask=e3 & is_first_tile)
        tl.store(decay + 2 * layout.slots * H + here + 3 * H, g0 + g1 + (g2 + g3), mask=e3 & is_first_tile)

        state = _chunk_state(k0, v, to_end + here * C, chunk, p, token, count, v_token, C, PRECISION)
        tl.store(nodes + here * (N * P) + tile, state.to(dtype), mask=e0)
        if layout.first is not None:
            state += _initial(nodes, tile, first + chunk + 1, 0, place, layout, N * P)
        left = tl.where(e1, tl.exp(g1), 0.0) * state  # a second chunk that does not exist has its own initial node
        left += _chunk_state(k1, v, to_end + (here + H) * C, chunk + 1, p, token, count, v_token, C, PRECISION)
        tl.store(nodes + (here + H) * (N * P) + tile, left.to(dtype), mask=e1)
        if layout.first is not None:
            left += _initial(nodes, tile, first + chunk + 2, 1, place, layout, N * P)
        state = _chunk_state(k2, v, to_end + (here + 2 * H) * C, chunk + 2, p, token, count, v_token, C, PRECISION)
        tl.store(nodes + (here + 2 * H) * (N * P) + tile, state.to(dtype), mask=e2)
        if layout.first is not None:
            state += _initial(nodes, tile, first + chunk + 3, 0, place, layout, N * P)
        state = tl.exp(g3) * state + tl.exp(g2 + g3) * left
        state += _chunk_state(k3, v, to_end + (here + 3 * H) * C, chunk + 3, p, token, count, v_token, C, PRECISION)
        tl.store(nodes + (here + 3 * H) * (N * P) + tile, state.to(dtype), mask=e3)
        head += 1


@triton.jit
def _initial(nodes, tile, end, level, place, layout, NP: tl.constexpr):
    """The initial node of `level`, if there is one and it ends right before the chunk `end`; or 0."""
    seq, head, slot, first, last, H = place
    node = _node(end, level, seq, slot, first, layout) * H + head
    wanted = (end == ((first >> level) << level)) & ((first >> level) & 1 > 0)
    return tl.load(nodes + node * NP + tile, mask=wanted, other=0.0).to(tl.float32)


@triton.jit
def _child(nodes, decay, tile, end, level, place, layout, NP: tl.constexpr):
    """The node of `level` before the chunk `end`, and its decay."""
    seq, head, slot, first, last, H = place
    exists = (end > first) & (end <= last)
    at = (slot + end - 1 - first).to(tl.int64) * H + head
    x = tl.load(nodes + at * NP + tile, mask=exists, other=0.0).to(tl.float32)
    if layout.first is not None:
        x += _initial(nodes, tile, end, level, place, layout, NP)
    return x, tl.load(decay + level.to(tl.int64) * layout.slots * H + at, mask=exists, other=0.0)


@triton.jit
def _parent(
    left, left_decay, right, right_decay, nodes, decay, tile, end, level, place, layout, NP: tl.constexpr, STORE: tl.constexpr
):
    """The parent, of `level`, of two siblings, and its decay. Both are written, the node only if its slot stays its own."""
    seq, head, slot, first, last, H = place
    exists = (end > first) & (end <= last)
    at = (slot + end - 1 - first).to(tl.int64) * H + head
    x = right + tl.where(exists, tl.exp(right_decay), 0.0) * left  # what does not exist has its own initial node
    total = left_decay + right_decay
    tl.store(decay + level.to(tl.int64) * layout.slots * H + at, total, mask=exists & (tl.program_id(2) == 0))
    if STORE:
        tl.store(nodes + at * NP + tile, x.to(nodes.dtype.element_ty), mask=exists)
    if layout.first is not None:
        x += _initial(nodes, tile, end, level, place, layout, NP)
    return x, total


@triton.jit
def _merge(nodes, decay, layout, grouping, level, H, NP: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr):
    """Three levels of sibling merges, in place: parent = exp(decay of the right node) * left + right, in the right one's slot.

    Grid (groups of eight nodes of `level`, H, tiles of N * P). Reads the group's slots in nodes, each program its own tile, and
    their decays; writes the four slots of parents, and the first tile the parents' decays.
    """
    seq, group, _, _, slot, first, last = _find(tl.program_id(0), grouping, layout, C)
    place = (seq, tl.program_id(1), slot, first, last, H)
    tile = tl.program_id(2) * TILE + tl.arange(0, TILE)
    start = (((first >> level) >> 3) + group) << (level + 3)
    size = 1 << level
    x0, d0 = _child(nodes, decay, tile, start + size, level, place, layout, NP)
    x1, d1 = _child(nodes, decay, tile, start + 2 * size, level, place, layout, NP)
    x2, d2 = _child(nodes, decay, tile, start + 3 * size, level, place, layout, NP)
    x3, d3 = _child(nodes, decay, tile, start + 4 * size, level, place, layout, NP)
    x4, d4 = _child(nodes, decay, tile, start + 5 * size, level, place, layout, NP)
    x5, d5 = _child(nodes, decay, tile, start + 6 * size, level, place, layout, NP)
    x6, d6 = _child(nodes, decay, tile, start + 7 * size, level, place, layout, NP)
    x7, d7 = _child(nodes, decay, tile, start + 8 * size, level, place, layout, NP)
    x1, d1 = _parent(x0, d0, x1, d1, nodes, decay, tile, start + 2 * size, level + 1, place, layout, NP, True)
    x3, d3 = _parent(x2, d2, x3, d3, nodes, decay, tile, start + 4 * size, level + 1, place, layout, NP, False)
    x5, d5 = _parent(x4, d4, x5, d5, nodes, decay, tile, start + 6 * size, level + 1, place, layout, NP, True)
    x7, d7 = _parent(x6, d6, x7, d7, nodes, decay, tile, start + 8 * size, level + 1, place, layout, NP, False)
    x3, d3 = _parent(x1, d1, x3, d3, nodes, decay, tile, start + 4 * size, level + 2, place, layout, NP, True)
    x7, d7 = _parent(x5, d5, x7, d7, nodes, decay, tile, start + 8 * size, level + 2, place, layout, NP, False)
    _parent(x3, d3, x7, d7, nodes, decay, tile, start + 8 * size, level + 3, place, layout, NP, True)


@triton.jit
def _output(
    query, key, value, weights, cum, decay, nodes, output, layout, grouping, q_token, q_group, k_token, k_group, v_token,
    v_head, w_token, w_head, H, heads_per_group, heads_per_program, L,
    N: tl.constexpr, P: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output of one chunk, for some heads of a group, which share its scores q k^T.

    Grid (slots, H / heads_per_program). Reads a chunk of query, key [C, N], per head value [C, P], weights [C, L], cum [C] and
    one node [N, P] per set bit of the chunk's index. Writes output [C, P] per head.
    """
    seq, chunk, token, count, slot, first, end = _find(tl.program_id(0), grouping, layout, C)
    if chunk * C >= count:
        return
    head = tl.program_id(1) * heads_per_program
    group = head // heads_per_group
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    n, p = tl.arange(0, N), tl.arange(0, P)
    valid = chunk * C + i < count
    token += chunk * C
    dtype = nodes.dtype.element_ty
    q = tl.load(query + (token + i) * q_token + group * q_group + n[None, :], mask=valid, other=0.0).to(dtype)
    k = tl.load(key + (token + j) * k_token + group * k_group + n[:, None], mask=chunk * C + j < count, other=0.0)
    scores = tl.dot(q, k.to(dtype), input_precision=PRECISION)
    for _ in tl.range(0, heads_per_program, disable_licm=True):
        here = (slot + chunk).to(tl.int64) * H + head
        lam = weights + token * w_token + head * w_head
        v = tl.load(value + (token + i) * v_token + head * v_head + p[None, :], mask=valid, other=0.0).to(dtype)
        within, gate = _gate(cum + here * C, lam, w_token, i, j, valid, L, C, LOG_C)
        out = tl.dot((scores * within * gate).to(dtype), v, input_precision=PRECISION)
        since_start = tl.load(cum + here * C + i)
        gap = tl.zeros((), tl.float32)
        left = first + chunk
        for _ in range(_count_bits(left)):
            level = _low_bit(left)
            node = _node(left, level, seq, slot, first, layout)
            state = tl.load(nodes + (node * H + head) * (N * P) + n[:, None] * P + p[None, :])
            weight = _weight(lam, LOG_C + 1 + level, i * w_token, valid, L)
            out += weight * tl.exp(since_start + gap) * tl.dot(q, state, input_precision=PRECISION)
            gap += tl.load(decay + (level * layout.slots + node) * H + head, mask=left > first, other=0.0)
            left = left & (left - 1)
        tl.store(output + ((token + i) * H + head) * P + p[None, :], out.to(output.dtype.element_ty), mask=valid)
        head += 1


@triton.jit
def _final_levels(nodes, decay, last, levels, layout, H, NP: tl.constexpr, TILE: tl.constexpr):
    """The state's levels: what a chunk with the absolute index last[s] would read, decayed up to its start.

    Grid (S, H, tiles of N * P). Reads one node per set bit of last[s]; writes all K entries of levels[s, :, head], zeros where
    there is no node, everything from the top entry on added up in it.
    """
    seq, head = tl.program_id(0), tl.program_id(1)
    tile = tl.program_id(2) * TILE + tl.arange(0, TILE)
    slot, first = _slot_and_first(seq, layout)
    gap = tl.zeros((), tl.float32)
    left = tl.load(last + seq)
    top = tl.zeros((TILE,), tl.float32)
    for entry in range(layout.kept - 1):
        node = _node(left, entry + layout.skip, seq, slot, first, layout)
        taken = (left >> (entry + layout.skip)) & 1 > 0
        x = tl.load(nodes + (node * H + head) * NP + tile, mask=taken, other=0.0).to(tl.float32)
        tl.store(levels + ((seq.to(tl.int64) * layout.kept + entry) * H + head) * NP + tile, tl.exp(gap) * x)
        at = ((entry + layout.skip) * layout.slots + node) * H + head
        gap += tl.load(decay + at, mask=taken & (left > first), other=0.0)
        left = tl.where(taken, left & (left - 1), left)
    while left > 0:
        level = _low_bit(left)
        node = _node(left, level, seq, slot, first, layout)
        top += tl.exp(gap) * tl.load(nodes + (node * H + head) * NP + tile).to(tl.float32)
        gap += tl.load(decay + (level * layout.slots + node) * H + head, mask=left > first, other=0.0)
        left = left & (left - 1)
    tl.store(levels + ((seq.to(tl.int64) * layout.kept + layout.kept - 1) * H + head) * NP + tile, top)


@triton.jit
def _slot_and_first(seq, layout):
    """First slot and absolute index of the first chunk of a sequence."""
    if layout.cu is None:
        slot = seq * layout.chunks
    else:
        slot = tl.load(layout.starts + seq)
    if layout.first is None:
        first = 0 * seq
    else:
        first = tl.load(layout.first + seq)
    return slot, first


# ------------------------------------------------------------------------------------------------------------ backward


@triton.jit
def _query_gradient(
    query, key, value, weights, d_output, cum, decay, nodes, d_query, d_weights, row_sums, read_sums, layout, grouping,
    q_token, q_group, k_token, k_group, v_token, v_head, w_token, w_head, o_token, o_head, tokens, H, heads_per_group,
    heads_per_program, L, LEVELS, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The query side of one chunk, for some heads of a group: the mirror of `_output`.

    Grid (slots, H / heads_per_program). Reads what `_output` reads and d_output [C, P] per head. Writes d_query [C, N] (one
    partial sum per program), and per head d_weights [C, L], row_sums [C] (d loss / d cum of the query's token) and
    read_sums[slot, head, level], the part of the latter's sum that came through the node of that level.
    """
    seq, chunk, token, count, slot, first, end = _find(tl.program_id(0), grouping, layout, C)
    if chunk * C >= count:
        return
    head = tl.program_id(1) * heads_per_program
    group = head // heads_per_group
    part = head % heads_per_group // heads_per_program
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    n, p = tl.arange(0, N), tl.arange(0, P)
    valid = chunk * C + i < count
    token += chunk * C
    dtype = nodes.dtype.element_ty
    q = tl.load(query + (token + i) * q_token + group * q_group + n[None, :], mask=valid, other=0.0).to(dtype)
    k = tl.load(key + (token + i) * k_token + group * k_group + n[None, :], mask=valid, other=0.0).to(dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dq = tl.zeros((C, N), tl.float32)
    for _ in tl.range(0, heads_per_program, disable_licm=True):
        here = (slot + chunk).to(tl.int64) * H + head
        lam = weights + token * w_token + head * w_head
        v = tl.load(value + (token + i) * v_token + head * v_head + p[None, :], mask=valid, other=0.0).to(dtype)
        do = tl.load(d_output + (token + i) * o_token + head * o_head + p[None, :], mask=valid, other=0.0).to(dtype)
        within, gate = _gate(cum + here * C, lam, w_token, i, j, valid, L, C, LOG_C)
        d_scores = tl.dot(do, tl.trans(v), input_precision=PRECISION) * within
        d_gate = d_scores * scores
        dq = tl.dot((d_scores * gate).to(dtype), k, dq, input_precision=PRECISION)
        d_lam = d_weights + ((token + i) * H + head) * L
        row_sum = tl.zeros((C, 1), tl.float32)
        d_top = tl.zeros((C, 1), tl.float32)
        for inner in tl.static_range(LOG_C + 1):
            of_level = ((i ^ j) < (1 << inner)) & ((i ^ j) >= (1 << inner) // 2)
            d_inner = tl.sum(tl.where(of_level, d_gate, 0.0), 1)[:, None]
            if inner > 0:  # a token's own pair does not depend on any decay
                row_sum += d_inner * _weight(lam, inner, i * w_token, valid, L)
            d_top += _store_weight_gradient(d_lam, inner, d_inner, valid, L)
        since_start = tl.load(cum + here * C + i)
        gap = tl.zeros((), tl.float32)
        left = first + chunk
        for _ in range(_count_bits(left)):
            level = _low_bit(left)
            node = _node(left, level, seq, slot, first, layout)
            state = tl.load(nodes + (node * H + head) * (N * P) + n[:, None] * P + p[None, :])
            weight = _weight(lam, LOG_C + 1 + level, i * w_token, valid, L)
            decayed = tl.exp(since_start + gap)
            read = tl.dot(q, state, input_precision=PRECISION)  # [C, P]
            d_level = decayed * tl.sum(read * do, 1)[:, None]
            d_top += _store_weight_gradient(d_lam, LOG_C + 1 + level, d_level, valid, L)
            row_sum += weight * d_level
            tl.store(read_sums + here * LEVELS + level, tl.sum(weight * d_level))
            weighted = (do.to(tl.float32) * (weight * decayed)).to(dtype)
            dq = tl.dot(weighted, tl.trans(state), dq, input_precision=PRECISION)
            gap += tl.load(decay + (level * layout.slots + node) * H + head, mask=left > first, other=0.0)
            left = left & (left - 1)
        tl.store(d_lam + L - 1, d_top.to(d_weights.dtype.element_ty), mask=valid)
        tl.store(row_sums + here * C + i, row_sum)
        head += 1
    groups = H // heads_per_group
    at = ((part.to(tl.int64) * tokens + token + i) * groups + group) * N + n[None, :]
    tl.store(d_query + at, dq.to(d_query.dtype.element_ty), mask=valid)


@triton.jit
def _node_gradient(
    query, weights, d_output, cum, decay, read_sums, d_nodes, span, parts, part_spans, layout, grouping,
    q_token, q_group, w_token, w_head, o_token, o_head, H, heads_per_group, L, LEVELS,
    N: tl.constexpr, P: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of nodes by the outputs that read them: sums over the chunks of the right sibling.

    Grid (segments of 2**SEGMENT chunks, LEVELS, H * tiles of [N, P]). A program takes the chunks of its segment whose index has
    the bit `level`. Reads of each query [C, BLOCK_N], d_output [C, BLOCK_P], weights [C], cum [C]. Up to level SEGMENT the
    segment holds whole siblings: writes tiles of d_nodes, and span (the gradient of the node's decay, by later gaps). Above,
    the whole segment is one part of a sibling: writes parts[segment, level - SEGMENT - 1, head] and part_spans.
    """
    seq, group, token, count, slot, first, end = _find(tl.program_id(0), grouping, layout, C)
    level = tl.program_id(1)
    tiles_p: tl.constexpr = P // BLOCK_P
    tiles: tl.constexpr = N // BLOCK_N * tiles_p
    head, tile = tl.program_id(2) // tiles, tl.program_id(2) % tiles
    start = ((first >> SEGMENT) + group) << SEGMENT
    small = level < SEGMENT
    if start >= end or (not small and (start >> level) & 1 == 0):
        return
    n = tile // tiles_p * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tile % tiles_p * BLOCK_P + tl.arange(0, BLOCK_P)
    i = tl.arange(0, C)
    dtype = d_nodes.dtype.element_ty
    size = 1 << level
    total = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    later = tl.zeros((), tl.float32)
    gap = tl.zeros((), tl.float32)
    for step in range(tl.where(small, 1 << SEGMENT >> 1, 1 << SEGMENT)):
        # The step-th number with the bit `level` set, where the segment holds both kinds.
        chunk = start + tl.where(small, ((step >> level) << (level + 1)) + size + (step & (size - 1)), step)
        if chunk & (size - 1) == 0:
            total = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
            later = tl.zeros((), tl.float32)
            gap = tl.zeros((), tl.float32)
        if (chunk >= first) & (chunk < end):
            local = (chunk - first) * C
            valid = local + i < count
            row = token + local + i
            here = (slot + chunk - first).to(tl.int64) * H + head
            q = tl.load(
                query + row[:, None] * q_token + head // heads_per_group * q_group + n[None, :],
                mask=valid[:, None],
                other=0.0,
            )
            do = tl.load(d_output + row[:, None] * o_token + head * o_head + p[None, :], mask=valid[:, None], other=0.0)
            weight = _weight(weights, LOG_C + 1 + level, row * w_token + head * w_head, valid, L)
            weight *= tl.exp(tl.load(cum + here * C + i) + gap)
            do = (do.to(tl.float32) * weight[:, None]).to(dtype)
            total = tl.dot(tl.trans(q.to(dtype)), do, total, input_precision=PRECISION)
            above = tl.arange(0, 32)
            above_mask = (above > level) & (above < LEVELS) & ((chunk >> above) & 1 > 0)
            later += tl.sum(tl.load(read_sums + here * LEVELS + above, mask=above_mask, other=0.0))
            gap += tl.load(decay + here)
            is_last = ((chunk + 1) & (size - 1) == 0) | (chunk == end - 1)
            if (level <= SEGMENT) & is_last:
                left = (chunk >> level) << level
                node = _node(left, level, seq, slot, first, layout) * H + head
                tl.store(d_nodes + node * (N * P) + n[:, None] * P + p[None, :], total.to(dtype))
                if tile == 0:
                    tl.store(span + node, later)
    if level > SEGMENT:
        part = (tl.program_id(0).to(tl.int64) * (LEVELS - SEGMENT - 1) + level - SEGMENT - 1) * H + head
        tl.store(parts + part * (N * P) + n[:, None] * P + p[None, :], total)
        if tile == 0:
            tl.store(part_spans + part, later)


@triton.jit
def _sum_segments(
    parts, part_spans, decay, d_nodes, span, layout, grouping, H, LEVELS,
    NP: tl.constexpr, C: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds up the parts that `_node_gradient` left for nodes of more than 2**SEGMENT chunks.

    Grid (segments + S * K, H, tiles of N * P): program e of a sequence serves the node that ends where segment e starts, the
    last S * K the initial nodes. Reads parts and decay of the segments of the right sibling; writes d_nodes and span.
    """
    index = tl.program_id(0)
    initial = index >= grouping.count
    if initial:
        seq = (index - grouping.count) // layout.kept
    else:
        seq, _, _, _, _, _, _ = _find(tl.minimum(index, grouping.count - 1), grouping, layout, C)
    head = tl.program_id(1)
    tile = tl.program_id(2) * TILE + tl.arange(0, TILE)
    slot, first, end, base = _sequence(seq, grouping, layout, C)
    if initial:
        level = (index - grouping.count) % layout.kept + layout.skip
        left = (first >> level) << level
        wanted = (first >> level) & 1 > 0
    else:
        left = ((first >> SEGMENT) + index - base) << SEGMENT
        level = tl.where(left > 0, _low_bit(tl.maximum(left, 1)), 0)
        wanted = left > first
    if (not wanted) | (level <= SEGMENT) | (left >= end):
        return
    total = tl.zeros((TILE,), tl.float32)
    later = tl.zeros((), tl.float32)
    gap = tl.zeros((), tl.float32)
    stop = (tl.minimum(left + (1 << level), end) + (1 << SEGMENT) - 1) >> SEGMENT
    for segment in range(tl.maximum(left, first) >> SEGMENT, stop):
        part = base + segment - (first >> SEGMENT)
        part = (part.to(tl.int64) * (LEVELS - SEGMENT - 1) + level - SEGMENT - 1) * H + head
        total += tl.exp(gap) * tl.load(parts + part * NP + tile)
        later += tl.load(part_spans + part)
        last = ((segment + 1) << SEGMENT) - 1
        at = (SEGMENT * layout.slots + slot + last - first).to(tl.int64) * H + head
        gap += tl.load(decay + at, mask=last < end, other=0.0)
    node = _node(left, level, seq, slot, first, layout) * H + head
    tl.store(d_nodes + node * NP + tile, total.to(d_nodes.dtype.element_ty))
    if tl.program_id(2) == 0:
        tl.store(span + node, later)


@triton.jit
def _sequence(seq, grouping, layout, C: tl.constexpr):
    """(first slot, absolute first and end chunk, number of the first group) of a sequence."""
    slot, first = _slot_and_first(seq, layout)
    if layout.cu is None:
        base = seq * grouping.per_row
        if layout.lengths is None:
            count = layout.tokens + 0 * seq
        else:
            count = tl.load(layout.lengths + seq).to(tl.int32)
    else:
        base = tl.load(grouping.starts + seq)
        count = (tl.load(layout.cu + seq + 1) - tl.load(layout.cu + seq)).to(tl.int32)
    return slot, first, first + (count + C - 1) // C, base


@triton.jit
def _final_levels_gradient(
    nodes, decay, last, d_levels, d_nodes, span, span_stride, layout, H, NP: tl.constexpr, TILE: tl.constexpr
):
    """Adds the gradient of the final levels to that of the nodes they were read from: the mirror of `_final_levels`.

    Grid (S, H, tiles of N * P). Reads one node and one entry of d_levels per set bit of last[s]; adds to d_nodes, and to
    span[tile], the gradient of the decays between a node and the end.
    """
    seq, head = tl.program_id(0), tl.program_id(1)
    tile = tl.program_id(2) * TILE + tl.arange(0, TILE)
    slot, first = _slot_and_first(seq, layout)
    span += tl.program_id(2) * span_stride
    all_reads = tl.zeros((), tl.float32)
    for adding in tl.static_range(2):  # first what all nodes give, then, per node, what the ones after it give
        gap = tl.zeros((), tl.float32)
        reads = tl.zeros((), tl.float32)
        left = tl.load(last + seq)
        while left > 0:
            level = _low_bit(left)
            node = _node(left, level, seq, slot, first, layout)
            entry = tl.minimum(level - layout.skip, layout.kept - 1)
            at = ((seq.to(tl.int64) * layout.kept + entry) * H + head) * NP + tile
            d_read = tl.exp(gap) * tl.load(d_levels + at)
            here = node * H + head
            reads += tl.sum(d_read * tl.load(nodes + here * NP + tile).to(tl.float32))
            if adding == 0:
                d_node = tl.load(d_nodes + here * NP + tile).to(tl.float32) + d_read
                tl.store(d_nodes + here * NP + tile, d_node.to(d_nodes.dtype.element_ty))
            else:
                tl.store(span + here, tl.load(span + here) + all_reads - reads)
            gap += tl.load(decay + (level * layout.slots + node) * H + head, mask=left > first, other=0.0)
            left = left & (left - 1)
        all_reads = reads


@triton.jit
def _split(
    nodes, decay, d_nodes, span, span_stride, layout, grouping, level, H,
    NP: tl.constexpr, C: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """DEPTH levels of `_merge` backwards, in place: a parent's gradient flows to its children, that of its decay as well.

    Grid (groups of 2**DEPTH nodes of `level`, H, tiles of N * P). Reads the left nodes; the gradient of a parent stands in the
    slot of its right child, whose gradient it also is. Adds to d_nodes of the left children and to span[tile] of both.
    """
    seq, group, _, _, slot, first, end = _find(tl.program_id(0), grouping, layout, C)
    head = tl.program_id(1)
    tile = tl.program_id(2) * TILE + tl.arange(0, TILE)
    span += tl.program_id(2) * span_stride
    start = (((first >> level) >> DEPTH) + group) << (level + DEPTH)
    for step in tl.static_range(DEPTH):
        for pair in range(1 << step):
            below = level + DEPTH - 1 - step
            middle = start + ((2 * pair + 1) << below)
            right_end = middle + (1 << below)
            if (right_end > first) & (right_end <= end):
                left = _node(middle, below, seq, slot, first, layout) * H + head
                right = _node(right_end, below, seq, slot, first, layout) * H + head
                kept = tl.exp(tl.load(decay + below.to(tl.int64) * layout.slots * H + right))
                flow = kept * tl.load(d_nodes + right * NP + tile).to(tl.float32)
                d_left = tl.load(d_nodes + left * NP + tile).to(tl.float32) + flow
                tl.store(d_nodes + left * NP + tile, d_left.to(d_nodes.dtype.element_ty))
                through = tl.sum(flow * tl.load(nodes + left * NP + tile).to(tl.float32))
                parent = tl.load(span + right)
                tl.store(span + left, tl.load(span + left) + parent, mask=middle > first)
                tl.store(span + right, parent + through)
        tl.debug_barrier()  # the next step reads what this one wrote


@triton.jit
def _key_gradient(
    query, key, value, weights, d_output, cum, decay, d_nodes, span, row_sums, d_key, d_value, d_log_decay, layout, grouping,
    q_token, q_group, k_token, k_group, v_token, v_head, w_token, w_head, o_token, o_head, tokens, H, heads_per_group,
    heads_per_program, L, spans, span_stride, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The key side of one chunk, for some heads of a group: key, value and log decay.

    Grid (slots, H / heads_per_program). Reads a chunk of query, key [C, N], per head value, d_output [C, P], weights [C, L],
    cum, row_sums [C], the gradient [N, P] of the chunk's state and span. Writes d_key [C, N] (one partial sum per program) and
    per head d_value [C, P], d_log_decay [C].
    """
    seq, chunk, token, count, slot, first, end = _find(tl.program_id(0), grouping, layout, C)
    if chunk * C >= count:
        return
    head = tl.program_id(1) * heads_per_program
    group = head // heads_per_group
    part = head % heads_per_group // heads_per_program
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    n, p = tl.arange(0, N), tl.arange(0, P)
    valid = chunk * C + i < count
    token += chunk * C
    dtype = d_nodes.dtype.element_ty
    q = tl.load(query + (token + i) * q_token + group * q_group + n[None, :], mask=valid, other=0.0).to(dtype)
    k = tl.load(key + (token + i) * k_token + group * k_group + n[None, :], mask=valid, other=0.0).to(dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dk = tl.zeros((C, N), tl.float32)
    for _ in tl.range(0, heads_per_program, disable_licm=True):
        here = (slot + chunk).to(tl.int64) * H + head
        v = tl.load(value + (token + i) * v_token + head * v_head + p[None, :], mask=valid, other=0.0).to(dtype)
        do = tl.load(d_output + (token + i) * o_token + head * o_head + p[None, :], mask=valid, other=0.0).to(dtype)
        state = tl.load(d_nodes + here * (N * P) + n[:, None] * P + p[None, :])
        to_end = tl.exp(tl.minimum(tl.load(decay + here) - tl.load(cum + here * C + i), 0.0))
        dv = to_end * tl.dot(k, state, input_precision=PRECISION)  # [C, P], by later chunks
        passing = tl.sum(dv * v, 1)
        to_state = (v.to(tl.float32) * to_end).to(dtype)
        dk = tl.dot(to_state, tl.trans(state), dk, input_precision=PRECISION)
        lam = weights + token * w_token + head * w_head
        within, gate = _gate(cum + here * C, lam, w_token, i, j, valid, L, C, LOG_C)
        gate *= within
        d_scores = tl.dot(do, tl.trans(v), input_precision=PRECISION) * gate
        column = tl.sum(tl.where(i == j, 0.0, d_scores * scores), 0)  # without a token's own pair, as in row_sums
        dk = tl.dot(tl.trans(d_scores.to(dtype)), q, dk, input_precision=PRECISION)
        dv = tl.dot(tl.trans((scores * gate).to(dtype)), do, dv, input_precision=PRECISION)
        tl.store(d_value + ((token + i) * H + head) * P + p[None, :], dv.to(d_value.dtype.element_ty), mask=valid)
        # The log decay of token s acts between all j < s <= i: pairs inside the chunk, from before it, to after it, across it.
        row = tl.load(row_sums + here * C + tl.arange(0, C)) - column
        dg = tl.sum(row, 0) - tl.cumsum(row, 0) + row + tl.cumsum(passing, 0) - passing
        for one in range(spans):
            dg += tl.load(span + one * span_stride + here)
        at = (token + tl.arange(0, C)) * H + head
        tl.store(d_log_decay + at, dg, mask=chunk * C + tl.arange(0, C) < count)
        head += 1
    groups = H // heads_per_group
    at = ((part.to(tl.int64) * tokens + token + i) * groups + group) * N + n[None, :]
    tl.store(d_key + at, dk.to(d_key.dtype.element_ty), mask=valid)


# -------------------------------------------------------------------------------------------------------------- decode


@triton.jit
def merge_oldest_chunk(
    key, value, log_decay, levels, batch, head, p, chunk, H, heads_per_group, K,
    N: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Turns the oldest chunk of the tail, whose index is `chunk`, into a node, for the columns p of one head.

    Reads the chunk's key [C, N], value [C, len(p)], log_decay [C] and the occupied entries of levels; writes those entries,
    decayed by the chunk, and the node into the first free one (all below it join the node).
    """
    n = tl.arange(0, N)[:, None]
    j = tl.arange(0, C)
    slot = batch.to(tl.int64) * 2 * C + chunk % 2 * C + j
    g = tl.load(log_decay + slot * H + head)
    total = tl.sum(g, 0)
    to_end = tl.exp(tl.minimum(total - tl.cumsum(g, 0), 0.0))
    groups = H // heads_per_group
    k = tl.load(key + (slot[None, :] * groups + head // heads_per_group) * N + n).to(tl.float32)  # [N, C]
    v = tl.load(value + (slot[:, None] * H + head) * P + p[None, :]).to(tl.float32) * to_end[:, None]
    node = tl.dot(k, v, input_precision="tf32x3")
    keep = tl.exp(total)
    carrying = chunk >= 0
    for level in range(K):
        entry = levels + ((batch.to(tl.int64) * K + level) * H + head) * (N * P) + n * P + p[None, :]
        is_top = level == K - 1
        taken = tl.where(is_top, (chunk >> level) > 0, (chunk >> level) & 1 > 0)
        old = tl.load(entry, mask=taken, other=0.0) * keep
        joins = carrying & taken
        node += tl.where(joins, old, 0.0)
        lands = carrying & (is_top | (not taken))
        tl.store(entry, tl.where(lands, node, old), mask=lands | (taken & (not joins)))
        carrying = carrying & taken


@triton.jit
def _merge_tail(
    key, value, log_decay, levels, merged, lengths, active, H, heads_per_group, K,
    N: tl.constexpr, P: tl.constexpr, C: tl.constexpr, BLOCK_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`merge_oldest_chunk` where the tail is full; else returns at once. Grid (B, H, P / BLOCK_P)."""
    hand_over(EARLY)
    batch, head = tl.program_id(0), tl.program_id(1)
    chunk = tl.load(merged + batch)
    full = tl.load(lengths + batch) == (chunk + 2) * C
    if active is not None:
        full = full & (tl.load(active + batch) != 0)
    if full:
        p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
        merge_oldest_chunk(key, value, log_decay, levels, batch, head, p, chunk, H, heads_per_group, K, N, P, C)


@triton.jit
def _decode(
    query, key, value, log_decay, weights, tail_key, tail_value, tail_decay, levels, merged, lengths, active, gate, values,
    skip, output, q_row, q_group, k_row, k_group, v_row, v_head, g_row, g_head, w_row, w_head, gate_row, H, heads_per_group, L,
    K: tl.constexpr, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr, BLOCK_P: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One token per row: attention over the tail and the occupied levels; the token is written into the tail's free slot.

    Grid (B, H, P / BLOCK_P). Reads query, key [N], value [BLOCK_P], weights [L], the tail's key [2C, N], value [2C, BLOCK_P],
    log_decay [2C] and every occupied entry [N, BLOCK_P] of levels. Writes output [BLOCK_P] and the token's slot, which no
    program reads. The counters are those before `_merge_tail`, which this repeats. With a gate [B, H * P in front] the output
    is (output + skip [H] * values [B, H, P]) * silu(gate).
    """
    hand_over(EARLY)
    batch, head = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    out_at = (batch.to(tl.int64) * H + head) * P + p
    if active is not None:
        if tl.load(active + batch) == 0:
            tl.store(output + out_at, tl.zeros((BLOCK_P,), output.dtype.element_ty))
            return
    now = tl.load(lengths + batch)
    chunk = tl.load(merged + batch)
    chunk += tl.where(now == (chunk + 2) * C, 1, 0)
    group, groups = head // heads_per_group, H // heads_per_group
    lam = weights + batch * w_row + head * w_head

    # All that is read, before anything is added up: what waits for memory should wait once.
    n = tl.arange(0, N)
    q = tl.load(query + batch * q_row + group * q_group + n).to(tl.float32)
    k = tl.load(key + batch * k_row + group * k_group + n)
    v = tl.load(value + batch * v_row + head * v_head + p)
    g = tl.load(log_decay + batch * g_row + head * g_head).to(tl.float32)
    own_weight = tl.load(lam).to(tl.float32)
    position = chunk * C + tl.arange(0, 2 * C)  # of the tail; position t stands in slot t % 2C
    valid = position < now
    slot = batch.to(tl.int64) * 2 * C + position % (2 * C)
    decays = tl.load(tail_decay + slot * H + head, mask=valid, other=0.0)
    tail_weight = tl.load(lam + tl.minimum(_bit_length(now ^ position), L - 1), mask=valid, other=0.0).to(tl.float32)
    tail_k = tl.load(tail_key + (slot[:, None] * groups + group) * N + n[None, :], mask=valid[:, None], other=0.0)
    tail_v = tl.load(tail_value + (slot[:, None] * H + head) * P + p[None, :], mask=valid[:, None], other=0.0)
    read = tl.zeros((N, BLOCK_P), tl.float32)  # the levels' weighted sum: one product with the query for all of them
    for entry in tl.static_range(K):
        taken = tl.where(entry == K - 1, (chunk >> entry) > 0, (chunk >> entry) & 1 > 0)
        start = (chunk >> (entry + 1)) << (entry + 1)  # the block's first chunk
        at = tl.where(entry == K - 1, L - 1, tl.minimum(LOG_C + _bit_length((now // C) ^ start), L - 1))
        weight = tl.load(lam + at, mask=taken, other=0.0).to(tl.float32)
        base = levels + ((batch.to(tl.int64) * K + entry) * H + head) * (N * P)
        read += weight * tl.load(base + n[:, None] * P + p[None, :], mask=taken, other=0.0)

    total = tl.sum(decays, 0)
    scores = tl.sum(tail_k.to(tl.float32) * q[None, :], 1) * tail_weight
    scores *= tl.exp(tl.minimum(total - tl.cumsum(decays, 0), 0.0) + g)
    out = tl.sum(tail_v.to(tl.float32) * scores[:, None], 0)
    out += own_weight * tl.sum(q * k.to(tl.float32), 0) * v.to(tl.float32)
    out += tl.exp(total + g) * tl.sum(read * q[:, None], 0)  # the levels are decayed up to the first position of the tail
    if gate is not None:
        z = tl.load(gate + batch.to(tl.int64) * gate_row + head * P + p).to(tl.float32)
        out += tl.load(skip + head).to(tl.float32) * tl.load(values + out_at).to(tl.float32)
        out *= z * tl.sigmoid(z)
    tl.store(output + out_at, out.to(output.dtype.element_ty))

    free = batch.to(tl.int64) * 2 * C + now % (2 * C)
    tl.store(tail_value + (free * H + head) * P + p, v.to(tail_value.dtype.element_ty))
    if tl.program_id(2) == 0:
        tl.store(tail_decay + free * H + head, g)
        if head % heads_per_group == 0:
            tl.store(tail_key + (free * groups + group) * N + n, k.to(tail_key.dtype.element_ty))


# ------------------------------------------------------------------------------------------------------------ the host


class _Call:
    """What the launches of one call share: the inputs, where things stand, block sizes, and the tree that both passes build."""

    def __init__(
        self, query, key, value, log_decay, level_weights, lengths, cu_seqlens, first_chunk, initial_levels, final_chunk,
        chunk_size,
    ):  # fmt: skip
        self.query, self.key, self.value, self.weights = map(_token_rows, (query, key, value, level_weights))
        self.log_decay = _token_rows(log_decay, dense=False)
        self.B, self.T, self.G, self.N = query.shape
        self.H, self.P = value.shape[2:]
        self.L = level_weights.shape[-1]
        self.initial_levels = initial_levels
        has_state = first_chunk is not None or final_chunk is not None
        self.C = _block_size(query.dtype, self.N, self.P, chunk_size if has_state else 64)
        self.num_seqs = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32  # of nodes and of dot operands
        precision = "tf32" if query.dtype == torch.float16 else "tf32x3"
        self.sizes = {"N": self.N, "P": self.P, "C": self.C, "PRECISION": precision, "num_stages": 2}
        self.log_c = self.C.bit_length() - 1
        tile = min(self.N * self.P, MERGE_TILE)
        self.tiles = self.N * self.P // tile
        self.elementwise = {"NP": self.N * self.P, "TILE": tile}
        lengths, cu_seqlens = (None if x is None else x.contiguous() for x in (lengths, cu_seqlens))
        self._place(lengths, cu_seqlens, first_chunk, final_chunk, chunk_size)

    def _place(self, lengths, cu_seqlens, first_chunk, final_chunk, chunk_size):
        """Sets layout, depth (the tree's levels that are read) and last (absolute index of the chunk after the final state)."""
        longest = -(-self.T // self.C)
        skip = (chunk_size // self.C).bit_length() - 1
        kept = max(1, self.L - chunk_size.bit_length())
        first = self.last = starts = None
        end = longest
        if first_chunk is not None:
            # Everything above the state's top level shares one weight: only one bit of the index is needed there.
            size = 1 << (kept - 1)
            first = ((first_chunk % size + torch.where(first_chunk >= size, size, 0)) << skip).int()
            end += 2 * size << skip
        if final_chunk is not None:
            self.last = final_chunk << skip if skip else final_chunk
            if first is not None:
                self.last = first + ((final_chunk - first_chunk) << skip)
        self.depth = (end if final_chunk is not None else end - 1).bit_length()
        slots = self.B * longest
        if cu_seqlens is not None:
            slots = longest + self.num_seqs
            self.chunk_counts = (cu_seqlens.diff() + self.C - 1) // self.C
            starts = (self.chunk_counts.cumsum(0) - self.chunk_counts).int()
        self.all_slots = slots + (0 if first is None else self.num_seqs * kept)
        self.layout = Layout(self.T, longest, slots, kept, skip, cu_seqlens, starts, lengths, first)
        self.groupings = {}

    def grouping(self, shift):
        """The aligned groups of 2**shift chunks. The first of a sequence may begin before its first chunk."""
        if shift in self.groupings:
            return self.groupings[shift]
        first, per_group = self.layout.first, 1 << shift
        straddling = int(first is not None and shift > 0)
        if self.layout.cu is None:
            per_row = -(-self.layout.chunks // per_group) + straddling
            grouping = Grouping(self.B * per_row, per_row, None, None)
        else:
            count = -(-self.layout.slots // per_group) + (1 + straddling) * self.num_seqs
            first = 0 if first is None else first
            groups = ((first + self.chunk_counts + per_group - 1) >> shift) - (first >> shift)
            starts = groups.cumsum(0) - groups
            index = torch.arange(count, device=starts.device)
            sequence = torch.searchsorted(starts, index, right=True) - 1
            grouping = Grouping(count, 0, torch.stack((sequence, index - starts[sequence]), 1).int(), starts.int())
        self.groupings[shift] = grouping
        return grouping

    def heads_per_program(self, programs):
        """How many heads of a group one program takes: the most that still leave so many programs."""
        heads = self.H // self.G
        while heads % 2 == 0 and self.layout.slots * (self.H // heads) < programs:
            heads //= 2
        return heads

    def warps(self, usual):
        """Warps per program of a kernel with products.

        Two are too few for `wgmma`. That is wanted where a tile is narrower than 128 bytes: for some of these, ptxas 12.8 (in
        Triton 3.6) puts an address where a descriptor's stride belongs, and the product reads from somewhere else.
        """
        narrow = min(self.N, self.P) * self.dtype.itemsize < 128 or self.C < 32
        return 2 if narrow else usual

    def registers(self, most):
        """A cap of registers per thread, so that more programs run at a time; tiles of float32 would spill under it."""
        return most if self.dtype == torch.bfloat16 else None

    def build_tree(self):
        """-> nodes [slots, then initial nodes; H, N, P], cum [slots, H, C], decay [levels, slots, H]."""
        slots, H = self.layout.slots, self.H
        nodes = self.query.new_empty(self.all_slots, H, self.N, self.P, dtype=self.dtype)
        cum, to_end = self.log_decay.new_empty(2, slots, H, self.C)
        decay = self.log_decay.new_empty(self.depth + MERGE_DEPTH, slots, H)
        if self.layout.first is not None:
            nodes[slots:] = self.initial_levels.flatten(0, 1)
        _chunk_decays[(self.grouping(0).count, triton.cdiv(H, 32))](
            self.log_decay, cum, to_end, decay, self.layout, self.grouping(0), *_strides(self.log_decay), H,
            C=self.C, BLOCK_H=32,
        )  # fmt: skip
        block_n, block_p = min(self.N, 128), min(self.P, 64)
        heads = self.heads_per_program(2048) if self.dtype == torch.bfloat16 else 1  # four tiles of float32 keys do not fit
        _chunk_states[(self.grouping(2).count, H // heads, self.N // block_n * (self.P // block_p))](
            self.key, self.value, to_end, decay, nodes, self.layout, self.grouping(2), *_strides(self.key),
            *_strides(self.value), H, H // self.G, heads, BLOCK_N=block_n, BLOCK_P=block_p,
            num_warps=self.warps(8), maxnreg=self.registers(128), **self.sizes,
        )  # fmt: skip
        tile = min(self.N * self.P, MERGE_TILE // 2)  # eight of them are held at a time
        for level in range(2, self.depth - 1, MERGE_DEPTH):
            grouping = self.grouping(level + MERGE_DEPTH)
            _merge[(grouping.count, H, self.N * self.P // tile)](
                nodes, decay, self.layout, grouping, level, H, NP=self.N * self.P, C=self.C, TILE=tile
            )
        return nodes, cum, decay

    def empty(self, shape, dtype):
        """An uninitialised tensor, but zeros where some tokens belong to no sequence."""
        ragged = self.layout.lengths is not None or self.layout.cu is not None
        return (torch.zeros if ragged else torch.empty)(shape, dtype=dtype, device=self.query.device)

    def forward(self):
        nodes, cum, decay = self.build_tree()
        output = self.empty(self.value.shape, self.value.dtype)
        heads = self.heads_per_program(4096)
        _output[(self.grouping(0).count, self.H // heads)](
            self.query, self.key, self.value, self.weights, cum, decay, nodes, output, self.layout, self.grouping(0),
            *_strides(self.query), *_strides(self.key), *_strides(self.value), *_strides(self.weights),
            self.H, self.H // self.G, heads, self.L, LOG_C=self.log_c,
            num_warps=self.warps(4), maxnreg=self.registers(168) if self.P <= 64 else None, **self.sizes,
        )  # fmt: skip
        if self.last is None:
            return output, self.log_decay.new_empty(0)
        levels = self.log_decay.new_empty(self.num_seqs, self.layout.kept, self.H, self.N, self.P)
        _final_levels[(self.num_seqs, self.H, self.tiles)](
            nodes, decay, self.last, levels, self.layout, self.H, **self.elementwise
        )
        return output, levels

    def backward(self, d_output, d_levels):
        d_output = _token_rows(d_output)
        nodes, cum, decay = self.build_tree()
        inputs = self.query, self.weights, d_output, cum, decay
        d_query, d_weights, row_sums, read_sums = self._query_gradient(d_output, cum, decay, nodes)
        d_nodes = torch.zeros_like(nodes)
        span = torch.zeros(self.tiles, self.all_slots, self.H, dtype=torch.float32, device=cum.device)
        if self.depth:
            self._node_gradient(*inputs, read_sums, d_nodes, span)
        if d_levels is not None:
            _final_levels_gradient[(self.num_seqs, self.H, self.tiles)](
                nodes,
                decay,
                self.last,
                d_levels.contiguous(),
                d_nodes,
                span,
                span.stride(0),
                self.layout,
                self.H,
                **self.elementwise,
            )
        for level in reversed(range(0, self.depth - 1, MERGE_DEPTH)):
            grouping = self.grouping(level + MERGE_DEPTH)
            _split[(grouping.count, self.H, self.tiles)](
                nodes, decay, d_nodes, span, span.stride(0), self.layout, grouping, level, self.H, C=self.C, DEPTH=MERGE_DEPTH,
                **self.elementwise,
            )  # fmt: skip
        d_key, d_value, d_log_decay = self._key_gradient(d_output, cum, decay, d_nodes, span, row_sums)
        if self.layout.first is None:
            d_initial = cum.new_empty(0)
        else:
            d_initial = d_nodes[self.layout.slots :].float().unflatten(0, (self.num_seqs, self.layout.kept))
        return d_query, d_key, d_value, d_log_decay, d_weights, d_initial

    def _query_gradient(self, d_output, cum, decay, nodes):
        heads = self.heads_per_program(1024)
        parts = self._partial_sums(heads)
        d_weights = torch.zeros(self.weights.shape, dtype=self.weights.dtype, device=cum.device)
        row_sums = torch.empty_like(cum)
        read_sums = cum.new_empty(self.layout.slots, self.H, self.depth)
        _query_gradient[(self.grouping(0).count, self.H // heads)](
            self.query, self.key, self.value, self.weights, d_output, cum, decay, nodes, parts, d_weights, row_sums, read_sums,
            self.layout, self.grouping(0), *_strides(self.query), *_strides(self.key), *_strides(self.value),
            *_strides(self.weights), *_strides(d_output), self.B * self.T, self.H, self.H // self.G, heads, self.L, self.depth,
            LOG_C=self.log_c, num_warps=self.warps(4), **self.sizes,
        )  # fmt: skip
        return self._total(parts), d_weights, row_sums, read_sums

    def _partial_sums(self, heads):
        """Room for the gradient of query or key, [programs that share a group, B, T, G, N]."""
        programs = self.H // self.G // heads
        return self.empty((programs, *self.query.shape), self.query.dtype if programs == 1 else torch.float32)

    def _total(self, parts):
        return parts[0] if len(parts) == 1 else parts.sum(0).to(self.query.dtype)

    def _node_gradient(self, query, weights, d_output, cum, decay, read_sums, d_nodes, span):
        block_n, block_p = min(self.N, 128), min(self.P, 64)
        grouping, above = self.grouping(SEGMENT), max(0, self.depth - SEGMENT - 1)
        parts = cum.new_empty(grouping.count, above, self.H, self.N, self.P)
        part_spans = cum.new_empty(grouping.count, above, self.H)
        _node_gradient[(grouping.count, self.depth, self.H * (self.N // block_n) * (self.P // block_p))](
            query, weights, d_output, cum, decay, read_sums, d_nodes, span, parts, part_spans, self.layout, grouping,
            *_strides(query), *_strides(weights), *_strides(d_output), self.H, self.H // self.G, self.L, self.depth,
            LOG_C=self.log_c, SEGMENT=SEGMENT, BLOCK_N=block_n, BLOCK_P=block_p, num_warps=self.warps(4),
            maxnreg=self.registers(128), **self.sizes,
        )  # fmt: skip
        if above:
            _sum_segments[(grouping.count + self.all_slots - self.layout.slots, self.H, self.tiles)](
                parts, part_spans, decay, d_nodes, span, self.layout, grouping, self.H, self.depth,
                C=self.C, SEGMENT=SEGMENT, **self.elementwise,
            )  # fmt: skip

    def _key_gradient(self, d_output, cum, decay, d_nodes, span, row_sums):
        heads = self.heads_per_program(1024)
        parts = self._partial_sums(heads)
        d_value = self.empty(self.value.shape, self.value.dtype)
        d_log_decay = self.empty(self.log_decay.shape, torch.float32)
        _key_gradient[(self.grouping(0).count, self.H // heads)](
            self.query, self.key, self.value, self.weights, d_output, cum, decay, d_nodes, span, row_sums, parts, d_value,
            d_log_decay, self.layout, self.grouping(0), *_strides(self.query), *_strides(self.key), *_strides(self.value),
            *_strides(self.weights), *_strides(d_output), self.B * self.T, self.H, self.H // self.G, heads, self.L, self.tiles,
            span.stride(0), LOG_C=self.log_c, num_warps=self.warps(4), **self.sizes,
        )  # fmt: skip
        return self._total(parts), d_value, d_log_decay


def _strides(x):
    """Strides of token and head (or group)."""
    return x.stride(1), x.stride(2)


def _token_rows(x, dense=True):
    """x [B, T, H, ...] such that the tokens of all rows are evenly spaced and, if `dense`, the last dimension has no gaps."""
    even = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if even and (not dense or x.stride(-1) == 1) else x.contiguous()


def _block_size(dtype, N, P, limit):
    """Tokens per chunk of the kernels: results do not depend on it, so it follows the shared memory that the tiles need."""
    if dtype == torch.bfloat16:
        return min(64 if N * P <= 16384 else 32, limit)
    area = N * max(P, 64)
    return min(64 if area <= 8192 else 32 if area <= 16384 else 16, limit)


# ------------------------------------------------------------------------------------------------------ the operators

# Two copies of this module may live in one process (the package and remote code): each registers its own operators.
_NAMESPACE = "loglinear_" + hashlib.sha256((__name__ + Path(__file__).read_text()).encode()).hexdigest()[:12]


def is_supported(query, value, level_weights, chunk_size):
    """Whether the kernels serve these inputs: float32, bfloat16 or float16, N 16 ... 256 and P 16 ... 128, powers of two."""
    on_device = query.is_cuda or INTERPRETED and query.dtype != torch.bfloat16  # whose dots the interpreter gets wrong
    dtypes = query.dtype in DTYPES and level_weights.dtype != torch.float64
    return on_device and dtypes and are_sizes_supported(query.shape[-1], value.shape[-1], chunk_size)


def are_sizes_supported(N, P, chunk_size):
    return N in (16, 32, 64, 128, 256) and P in (16, 32, 64, 128) and chunk_size in (32, 64, 128)


def _is_eager():
    """Whether nothing has to see an operator: then its kernels are launched directly, since the detour costs the host more."""
    return not (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack()
    )


def _launch_forward(*inputs):
    """The inputs of `_forward` -> output, final levels (empty if not wanted)."""
    with torch.cuda.device_of(inputs[0]):  # Triton launches on the current device, which need not be the tensors'
        return _Call(*inputs).forward()


def _launch_backward(d_output, d_levels, *inputs):
    """The gradients of the output and of the final levels, the inputs of `_forward` -> gradients of the floating inputs."""
    with torch.cuda.device_of(d_output):
        return _Call(*inputs).backward(d_output, d_levels)


@torch.library.custom_op(f"{_NAMESPACE}::tree_forward", mutates_args=())
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, level_weights: torch.Tensor,
    lengths: Optional[torch.Tensor], cu_seqlens: Optional[torch.Tensor], first_chunk: Optional[torch.Tensor],
    initial_levels: Optional[torch.Tensor], final_chunk: Optional[torch.Tensor], chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _launch_forward(
        query, key, value, log_decay, level_weights, lengths, cu_seqlens, first_chunk, initial_levels, final_chunk, chunk_size
    )  # fmt: skip


@_forward.register_fake
def _(
    query, key, value, log_decay, level_weights, lengths, cu_seqlens, first_chunk, initial_levels, final_chunk, chunk_size
):  # fmt: skip
    if final_chunk is None:
        levels = (0,)
    else:
        kept = max(1, level_weights.shape[-1] - chunk_size.bit_length())
        levels = (final_chunk.shape[0], kept, value.shape[2], query.shape[3], value.shape[3])
    return value.new_empty(value.shape), value.new_empty(levels, dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::tree_backward", mutates_args=())
def _backward(
    d_output: torch.Tensor, d_levels: Optional[torch.Tensor],
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, level_weights: torch.Tensor,
    lengths: Optional[torch.Tensor], cu_seqlens: Optional[torch.Tensor], first_chunk: Optional[torch.Tensor],
    initial_levels: Optional[torch.Tensor], final_chunk: Optional[torch.Tensor], chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _launch_backward(
        d_output, d_levels, query, key, value, log_decay, level_weights, lengths, cu_seqlens, first_chunk, initial_levels,
        final_chunk, chunk_size,
    )  # fmt: skip


@_backward.register_fake
def _(d_output, d_levels, query, key, value, log_decay, level_weights, lengths, cu_seqlens, first_chunk, initial_levels, *_):
    inputs = query, key, value, log_decay, level_weights
    d_initial = log_decay.new_empty(0 if initial_levels is None else initial_levels.shape)
    return *(x.new_empty(x.shape) for x in inputs), d_initial


def _setup_context(ctx, inputs, output):
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_output, d_levels):
    tensors = ctx.saved_tensors
    initial_levels, final_chunk = tensors[-2:]
    if d_output is None:
        d_output = torch.zeros_like(tensors[2])
    backward = _launch_backward if _is_eager() else _backward
    gradients = backward(d_output, None if final_chunk is None else d_levels, *tensors, ctx.chunk_size)
    d_initial = None if initial_levels is None else gradients[-1]
    return *gradients[:-1], None, None, None, d_initial, None, None


def _mapped(function, cu_seqlens):
    """The `torch.func.vmap` of `function`, whose input number `cu_seqlens` says if rows are packed.

    What is mapped over becomes more rows of one call; packed sequences fill the only row of a call, so they get one each.
    """

    def rule(info, in_dims, *inputs):
        n = info.batch_size
        inputs = [_along_first(x, dim, n) if isinstance(x, torch.Tensor) else x for x, dim in zip(inputs, in_dims)]
        if inputs[cu_seqlens] is None:
            outputs = function(*(x.flatten(0, 1) if isinstance(x, torch.Tensor) else x for x in inputs))
            outputs = tuple(x.unflatten(0, (n, -1)) for x in outputs)
        else:
            calls = [function(*(x[i] if isinstance(x, torch.Tensor) else x for x in inputs)) for i in range(n)]
            outputs = tuple(map(torch.stack, zip(*calls)))
        return outputs, (0,) * len(outputs)

    return rule


def _along_first(x, dim, n):
    """x with the mapped dimension in front, repeated there if x is the same for all."""
    return x.expand(n, *x.shape).contiguous() if dim is None else x.movedim(dim, 0)


class _TreeAttention(torch.autograd.Function):
    """`_forward` with its gradient, for eager code and `torch.func`."""

    @staticmethod
    def forward(*inputs):
        return (_launch_forward if _is_eager() else _forward)(*inputs)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(once_differentiable(_gradients))

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(_TreeAttention.apply, cu_seqlens=6)(info, in_dims, *inputs)


_forward.register_autograd(_gradients, setup_context=_setup_context)
_backward.register_vmap(_mapped(_backward, cu_seqlens=8))


def tree_attention(
    query, key, value, log_decay, level_weights, *,
    chunk_size, lengths=None, cu_seqlens=None, first_chunk=None, initial_levels=None, final_chunk=None,
):  # fmt: skip
    """The tree of log-linear attention: the kernels' side of `attention_loglinear._torch_tree_attention`.

    Args:
        query, key (`torch.Tensor` of shape `[B, T, G, N]`), value (`[B, T, H, P]`), log_decay (`[B, T, H]`, float32),
        level_weights (`[B, T, H, L]`): see `loglinear_attention`; `is_supported` says which.
        chunk_size (`int`): tokens per chunk of the states, C.
        lengths (`[B]`), cu_seqlens (`[S + 1]`): see `loglinear_attention`.
        first_chunk (`[S]`, *optional*): the sequence's first token stands at position `first_chunk * C`.
        initial_levels (`[S, K, H, N, P]`, float32, *optional*): what came before, decayed up to there.
        final_chunk (`[S]`, *optional*): also return the levels after so many chunks (of the whole history).

    Returns:
        The output, `[B, T, H, P]` in the dtype of `value`, and the final levels, `[S, K, H, N, P]` float32, or `None`.
    """
    if initial_levels is not None and first_chunk is None:
        raise ValueError("`initial_levels` needs `first_chunk`.")
    inputs = (
        query, key, value, log_decay, level_weights, lengths, cu_seqlens, first_chunk, initial_levels, final_chunk, chunk_size
    )  # fmt: skip
    if torch.compiler.is_compiling():
        function = _forward
    elif not torch.is_grad_enabled() and _is_eager():
        function = _launch_forward
    else:
        function = _TreeAttention.apply
    output, levels = function(*inputs)
    return output, None if final_chunk is None else levels


@functools.cache
def early_launch(device):
    """Options for launching a kernel that calls `hand_over`: the GPU places it while the kernel in front still runs.

    CUDA's programmatic dependent launch, from Hopper on; it hides the time between two kernels.
    """
    able = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able and not INTERPRETED else {"EARLY": False}


def _launch_step(
    query, key, value, log_decay, level_weights, tail_key, tail_value, tail_log_decay, levels, merged_chunks, lengths, active
):  # fmt: skip
    H, (C, N), (K, P) = value.shape[1], (tail_key.shape[1] // 2, tail_key.shape[3]), (levels.shape[1], value.shape[2])
    block_p = min(P, MERGE_COLUMNS)
    with torch.cuda.device_of(query):
        _merge_tail[len(query), H, P // block_p](
            tail_key, tail_value, tail_log_decay, levels, merged_chunks, lengths, active, H, H // query.shape[1], K,
            N=N, P=P, C=C, BLOCK_P=block_p, **early_launch(query.device), num_warps=8,
        )  # fmt: skip
        return attend(
            query, key, value, log_decay, level_weights, tail_key, tail_value, tail_log_decay, levels, merged_chunks, lengths,
            active,
        )  # fmt: skip


def attend(
    query, key, value, log_decay, level_weights, tail_key, tail_value, tail_log_decay, levels, merged_chunks, lengths,
    active=None, gate=None, values=None, skip=None,
):  # fmt: skip
    """A decoding step on a state whose tail has room (a full oldest chunk is merged already): `_decode`.

    gate [B, H * P or more], values [B, H, P] and skip [H] turn the output into (output + skip * values) * silu(gate), float32.
    """
    B, G, N = query.shape
    H, P = value.shape[1:]
    C, K = tail_key.shape[1] // 2, levels.shape[1]
    query, key, value, level_weights = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, level_weights))
    output = torch.empty(value.shape, dtype=value.dtype if gate is None else torch.float32, device=value.device)
    strides = [stride for x in (query, key, value, log_decay, level_weights) for stride in x.stride()[:2]]
    block_p = P  # every program reads the tail's keys, so as few of them as keep the processors busy
    while block_p > 16 and B * H * (P // block_p) < 128:
        block_p //= 2
    _decode[B, H, P // block_p](
        query, key, value, log_decay, level_weights, tail_key, tail_value, tail_log_decay, levels, merged_chunks, lengths,
        active, gate, values, skip, output, *strides, 0 if gate is None else gate.stride(0), H, H // G, level_weights.shape[-1],
        K=K, N=N, P=P, C=C, LOG_C=C.bit_length() - 1, BLOCK_P=block_p, **early_launch(query.device), num_warps=8, maxnreg=168,
    )  # fmt: skip
    return output


@torch.library.custom_op(f"{_NAMESPACE}::decode_step", mutates_args=("tail_key", "tail_value", "tail_log_decay", "levels"))
def _decode_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, level_weights: torch.Tensor,
    tail_key: torch.Tensor, tail_value: torch.Tensor, tail_log_decay: torch.Tensor, levels: torch.Tensor,
    merged_chunks: torch.Tensor, lengths: torch.Tensor, active: Optional[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    return _launch_step(
        query, key, value, log_decay, level_weights, tail_key, tail_value, tail_log_decay, levels, merged_chunks, lengths,
        active,
    )  # fmt: skip


@_decode_step.register_fake
def _(query, key, value, *_):
    return value.new_empty(value.shape)


def decode_step(query, key, value, log_decay, level_weights, state, active=None):
    """One token per row, in place on `state` apart from its counters: see `attention_loglinear.loglinear_attention_step`."""
    return (_launch_step if _is_eager() else _decode_step)(
        query, key, value, log_decay, level_weights, state.key, state.value, state.log_decay, state.levels,
        state.merged_chunks, state.lengths, active,
    )  # fmt: skip
