"""loglinear_attention: the definition against a triple loop and Mamba-2, the tree in PyTorch against the definition.

Everything is compared in float64 to 1e-10 of the largest entry unless a test says otherwise.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from modeling_loglinear import LogLinearState, loglinear_attention
from modeling_loglinear.attention_loglinear import StepPositions, advanced, empty_state, loglinear_attention_step

NAMES = ("query", "key", "value", "log_decay", "level_weights")
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 513, 1000)
CHUNKS = (16, 32, 64, 128)

torch.set_num_threads(1)
deterministic = settings(derandomize=True, deadline=None, database=None)


def draw(B=1, T=40, G=1, H=2, N=4, P=3, L=6, seed=0, dtype=torch.float64, decay=0.3):
    """Random inputs of the operator in the order of its arguments; log decays from -decay to 0."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    query, key, value = (uniform(B, T, *size) * 2 - 1 for size in ((G, N), (G, N), (H, P)))
    accumulate = torch.promote_types(dtype, torch.float32)
    return (
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        (-decay * uniform(B, T, H)).to(accumulate),
        uniform(B, T, H, L).to(accumulate),
    )


def assert_close(actual, wanted, tolerance=1e-10, what="", floor=1e-30):
    """Largest difference, relative to the largest entry of `wanted` (or to `floor`, if that is larger)."""
    assert actual.shape == wanted.shape, what
    assert torch.isfinite(actual).all(), f"{what} is not finite"
    if wanted.numel():
        error = (actual.double() - wanted.double()).abs().max().item()
        scale = max(wanted.double().abs().max().item(), floor)
        assert error <= tolerance * scale, f"{what}: {error / scale:.2e}"


def gradients(tensors, *outputs, seed=9):
    """Gradients of a random linear function of all outputs with respect to all tensors."""
    generator = torch.Generator().manual_seed(seed)
    total = sum((x * torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum() for x in outputs)
    found = torch.autograd.grad(total, tensors, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(tensors, found)]


def with_gradients(inputs, backend, **arguments):
    """(output, gradients of the inputs)."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output, _ = loglinear_attention(*leaves, backend=backend, **arguments)
    return output.detach(), gradients(leaves, output)


def assert_same_with_gradients(inputs, tolerance=1e-10, chunk_sizes=CHUNKS, floor=1e-30, **arguments):
    wanted, wanted_grads = with_gradients(inputs, "reference", **arguments)
    for chunk_size in chunk_sizes:
        output, grads = with_gradients(inputs, "torch", chunk_size=chunk_size, **arguments)
        assert_close(output, wanted, tolerance, f"output, chunk {chunk_size}")
        for name, grad, wanted_grad in zip(NAMES, grads, wanted_grads):
            assert_close(grad, wanted_grad, tolerance, f"gradient of {name}, chunk {chunk_size}", floor)


# ------------------------------------------------------------------------------------------------------- the definition


def triple_loop(query, key, value, log_decay, level_weights):
    """The formula in Python numbers, one output number after the other: [T, G, N] ... -> [T, H, P]."""
    q, k, v, g, weights = (x.tolist() for x in (query, key, value, log_decay, level_weights))
    T, H, P = len(v), len(v[0]), len(v[0][0])
    heads_per_group = H // len(q[0])
    out = [[[0.0] * P for _ in range(H)] for _ in range(T)]
    for i, h, j in itertools.product(range(T), range(H), range(T)):
        if j > i:
            continue
        # The level of j: walking from i down, the blocks of i's set bits; the block that contains j names it.
        level, end = 0, i
        while j < end:
            size = end & -end
            level, end = size.bit_length(), end - size
        group = h // heads_per_group
        score = sum(a * b for a, b in zip(q[i][group], k[j][group]))
        decay = math.exp(sum(g[s][h] for s in range(j + 1, i + 1)))
        weight = weights[i][h][min(level, len(weights[i][h]) - 1)]
        for p in range(P):
            out[i][h][p] += weight * decay * score * v[j][h][p]
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize(("T", "G", "L"), [(1, 1, 1), (13, 1, 3), (18, 2, 6), (21, 4, 2), (33, 2, 5)])
def test_reference_is_the_formula(T, G, L):
    """`reference` and `torch` equal a loop over i, h, j in Python numbers that finds levels as Fenwick blocks."""
    inputs = draw(T=T, G=G, H=4, N=2, P=2, L=L)
    wanted = triple_loop(*(x[0] for x in inputs))[None]
    for backend in ("reference", "torch"):
        assert_close(loglinear_attention(*inputs, backend=backend, chunk_size=16)[0], wanted, 1e-12, backend)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_levels_are_the_fenwick_blocks(backend):
    """Without decay and with one level switched on, an output counts that level's tokens: 1 in level 0, 2^(l-1) in
    level l if bit l - 1 of the position is set, all the rest in the last level.
    """
    T, L = 300, 6
    position = torch.arange(T)
    one = torch.ones(1, T, 1, 1, dtype=torch.float64)
    no_decay = torch.zeros(1, T, 1, dtype=torch.float64)
    for level in range(L):
        weights = torch.zeros(1, T, 1, L, dtype=torch.float64)
        weights[..., level] = 1
        counts = loglinear_attention(one, one, one, no_decay, weights, backend=backend, chunk_size=16)[0].flatten()
        if level == 0:
            wanted = torch.ones(T)
        elif level < L - 1:
            wanted = position & (1 << level - 1)
        else:
            wanted = position >> level - 1 << level - 1
        assert torch.equal(counts, wanted.double())


@pytest.mark.parametrize(("T", "G"), [(1, 1), (63, 2), (200, 4)])
def test_weights_of_one_are_mamba2(T, G):
    """lambda = 1 is the chunk scan of transformers' Mamba-2, which is float32: 1e-5."""
    generator = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(2, T, *size, generator=generator) for size in ((4, 8), (G, 16), (G, 16)))
    dt = torch.rand(2, T, 4, generator=generator) * 0.2
    A = -torch.arange(1.0, 5.0)
    wanted = mamba2_chunk_scan(x, dt, A, B, C, chunk_size=32)
    for backend in ("reference", "torch"):
        output, _ = loglinear_attention(C, B, x * dt[..., None], A * dt, torch.ones(2, T, 4, 7), chunk_size=16, backend=backend)
        assert_close(output, wanted, 1e-5, backend)


# ------------------------------------------------------------------------------------------------ the tree, one call


@pytest.mark.parametrize("T", LENGTHS)
def test_torch_equals_reference(T):
    """Outputs and all five gradients, for one group, two and one per head, every chunk size, and hierarchies with fewer
    levels than a chunk has, just as many as the length needs, and more.
    """
    for G, L in ((1, 3), (2, T.bit_length() + 1), (4, 13)):
        assert_same_with_gradients(draw(B=1, T=T, G=G, H=4, N=2, P=2, L=L, seed=T), chunk_sizes=CHUNKS)


@pytest.mark.parametrize("L", [1, 2, 4, 5, 7, 8, 10, 20])
def test_any_number_of_levels(L):
    """At a length with several nodes per level, any L from one single weight to far more than needed."""
    assert_same_with_gradients(draw(B=2, T=331, G=1, H=2, L=L, N=2, P=2), chunk_sizes=(16, 64))


@given(data=st.data())
@settings(deterministic, max_examples=40)
def test_drawn_shapes(data):
    """Any shape, ragged rows or packed sequences (also empty ones), any chunk size: outputs and gradients."""
    size = st.integers(1, 3)
    G, per_group, N, P = (data.draw(size) for _ in range(4))
    T, L = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 12))
    chunk_size, seed = data.draw(st.sampled_from(CHUNKS)), data.draw(st.integers(0, 99))
    if data.draw(st.booleans()):
        borders = sorted(data.draw(st.lists(st.integers(0, T), max_size=6)))
        B, arguments = 1, {"cu_seqlens": torch.tensor([0, *borders, T], dtype=torch.int32)}
    else:
        B = data.draw(size)
        lengths = data.draw(st.none() | st.lists(st.integers(0, T), min_size=B, max_size=B))
        arguments = {"lengths": None if lengths is None else torch.tensor(lengths)}
    inputs = draw(B, T, G, G * per_group, N, P, L, seed)
    assert_same_with_gradients(inputs, chunk_sizes=(chunk_size,), **arguments)


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_ragged_and_packed_rows_are_separate_sequences(chunk_size):
    """Every row or packed piece equals the definition on that piece alone; outputs behind the lengths are exactly 0."""
    real = [0, 1, 40, 129, 64, 200]
    rows = draw(B=6, T=200, G=2, H=4)
    alone = [loglinear_attention(*(x[r : r + 1, :n] for x in rows), backend="reference")[0] if n else None
             for r, n in enumerate(real)]  # fmt: skip
    ragged, _ = loglinear_attention(*rows, lengths=torch.tensor(real), backend="torch", chunk_size=chunk_size)
    packed_inputs = [torch.cat([x[r, :n] for r, n in enumerate(real)])[None] for x in rows]
    borders = torch.tensor([0, *itertools.accumulate(real)], dtype=torch.int32)
    packed, _ = loglinear_attention(*packed_inputs, cu_seqlens=borders, backend="torch", chunk_size=chunk_size)
    for r, n in enumerate(real):
        assert not ragged[r, n:].any()
        if n:
            assert_close(ragged[r : r + 1, :n], alone[r], what=f"row of {n}")
            assert_close(packed[:, borders[r] : borders[r + 1]], alone[r], what=f"piece of {n}")


# ---------------------------------------------------------------------------------------------------- states and calls


def split_calls(data, B, max_calls=4, longest=90):
    """New tokens of every row in every call, [calls, B]; some call brings a token."""
    calls = data.draw(st.integers(1, max_calls))
    return [data.draw(st.lists(st.integers(0, longest), min_size=B, max_size=B)) for _ in range(calls)] + [[1] * B]


@given(data=st.data())
@settings(deterministic, max_examples=30)
def test_any_split_into_calls(data):
    """Rows that get their tokens in several calls, ragged or packed, of any size and at different positions, passing
    the state on, equal each row at once: outputs, and gradients, which flow back through every state.
    """
    B, G = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    chunk_size, L = data.draw(st.sampled_from((16, 32))), data.draw(st.integers(1, 9))
    backend = data.draw(st.sampled_from(("torch", "torch", "reference")))
    calls = split_calls(data, B)
    totals = [sum(call[row] for call in calls) for row in range(B)]
    inputs = draw(B, max(totals), G, 2 * G, 2, 2, L, data.draw(st.integers(0, 99)))
    wanted, wanted_grads = with_gradients(inputs, "reference", lengths=torch.tensor(totals))

    leaves = [x.clone().requires_grad_() for x in inputs]
    state, pieces, seen = None, [[] for _ in range(B)], [0] * B
    for call in calls:
        if sum(call) == 0:
            continue
        new = [[x[row, start : start + n] for row, (start, n) in enumerate(zip(seen, call))] for x in leaves]
        arguments = {"initial_state": state, "return_final_state": True, "chunk_size": chunk_size, "backend": backend}
        if data.draw(st.booleans()):
            borders = torch.tensor([0, *itertools.accumulate(call)], dtype=torch.int32)
            output, state = loglinear_attention(*(torch.cat(x)[None] for x in new), cu_seqlens=borders, **arguments)
            outputs = output[0].split(call)
        else:
            padded = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=-1) for x in new]
            output, state = loglinear_attention(*padded, lengths=torch.tensor(call), **arguments)
            outputs = [row[:n] for row, n in zip(output, call)]
        for row, piece in enumerate(outputs):
            pieces[row].append(piece)
            seen[row] += call[row]
    assert state.lengths.tolist() == totals
    output = torch.nn.utils.rnn.pad_sequence([torch.cat(row) for row in pieces], batch_first=True)
    assert_close(output, wanted, what="output")
    for name, grad, wanted_grad in zip(NAMES, gradients(leaves, output), wanted_grads):
        assert_close(grad, wanted_grad, what=f"gradient of {name}")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("chunk_size", "L"), [(16, 3), (16, 8), (32, 10)])
def test_state_and_its_gradient(chunk_size, L, packed):
    """`torch` and `reference` agree on the final state, and on the gradients that output and final state together send
    to the inputs and to the initial state, for rows that start at different positions.
    """
    before, new = torch.tensor([0, 7, 95, 130]), torch.tensor([50, 0, 64, 33])
    _, start = loglinear_attention(
        *draw(B=4, T=130, G=2, H=4, L=L), lengths=before, return_final_state=True, chunk_size=chunk_size
    )
    inputs = draw(B=4, T=64, G=2, H=4, L=L, seed=1)
    arguments = {"lengths": new}
    if packed:
        inputs = [torch.cat([x[r, :n] for r, n in enumerate(new)])[None] for x in inputs]
        arguments = {"cu_seqlens": torch.tensor([0, *new.cumsum(0).tolist()])}
    results = {}
    for backend in ("torch", "reference"):
        leaves = [x.clone().requires_grad_() for x in (*inputs, *start[:4])]
        state = LogLinearState(*leaves[5:], *start[4:])
        output, final = loglinear_attention(
            *leaves[:5],
            initial_state=state,
            return_final_state=True,
            chunk_size=chunk_size,
            backend=backend,
            **arguments,
        )
        assert output.requires_grad and final.levels.dtype == torch.float64
        results[backend] = output, *final, *gradients(leaves, output, *final[:4])
    names = ("output", *LogLinearState._fields, *NAMES, *(f"initial {name}" for name in LogLinearState._fields[:4]))
    for name, actual, wanted in zip(names, results["torch"], results["reference"]):
        assert_close(actual, wanted, what=name)
    torch.testing.assert_close(results["torch"][6], before + new)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_state_is_unchanged_and_may_be_used_twice(backend):
    """Two different continuations of one state are right, and the state is bit for bit what it was."""
    inputs = draw(B=2, T=150, L=9)
    _, state = loglinear_attention(*(x[:, :90] for x in inputs), return_final_state=True, chunk_size=16, backend=backend)
    copy = [x.clone() for x in state]
    wanted, _ = loglinear_attention(*inputs, backend="reference")
    for stop in (150, 91, 150):
        output, _ = loglinear_attention(
            *(x[:, 90:stop] for x in inputs),
            initial_state=state,
            return_final_state=True,
            chunk_size=16,
            backend=backend,
        )
        assert_close(output, wanted[:, 90:stop])
        assert all(torch.equal(a, b) for a, b in zip(copy, state))


def test_state_levels_stay_small():
    """A state has 2C raw tokens and max(1, L - 1 - log2 C) blocks, whatever the length."""
    for T in (10, 100, 1000):
        _, state = loglinear_attention(*draw(T=T, L=8), return_final_state=True, chunk_size=16)
        assert state.key.shape == (1, 32, 1, 4) and state.levels.shape == (1, 3, 2, 4, 3)
    _, state = loglinear_attention(*draw(T=100, L=3), return_final_state=True, chunk_size=64)
    assert state.levels.shape[1] == 1


# ----------------------------------------------------------------------------------------------------- decode steps


@pytest.mark.parametrize(("chunk_size", "L", "G"), [(16, 3, 1), (16, 7, 2), (16, 12, 4), (32, 9, 2)])
def test_step_equals_operator_at_every_position(chunk_size, L, G):
    """Rows that step or rest in turn, so that they stand at different positions, read what one call of the definition
    gives for each; resting rows return 0 and keep their state.
    """
    B, T = 3, 260
    inputs = draw(B=B, T=T, G=G, H=4, L=L)
    wanted, _ = loglinear_attention(*inputs, backend="reference")
    state = empty_state(B, G, 4, 4, 3, L, chunk_size, torch.float64, "cpu")
    state.levels.fill_(1e3)  # blocks that are not there yet may hold anything finite
    generator = torch.Generator().manual_seed(5)
    for turn in range(T):
        active = torch.rand(B, generator=generator) < torch.tensor([1.0, 0.6, 0.9])
        resting = [x[~active].clone() for x in state]
        positions = StepPositions(state.lengths, state.merged_chunks, chunk_size, active)
        tokens = [x[torch.arange(B), state.lengths] for x in inputs]
        output = loglinear_attention_step(*tokens, state, positions=positions)
        assert not output[~active].any()
        assert_close(output[active], wanted[torch.arange(B), state.lengths][active], what=f"turn {turn}")
        assert all(torch.equal(a, b[~active]) for a, b in zip(resting, state))
        state = state._replace(**counters(state, active.long(), chunk_size))
    assert state.lengths[0] == T and len(set(state.lengths.tolist())) == B


def counters(state, new_tokens, chunk_size):
    return dict(zip(("lengths", "merged_chunks"), advanced(state.lengths, state.merged_chunks, new_tokens, chunk_size)))


@pytest.mark.parametrize("prompt", [1, 16, 31, 32, 33, 64, 100, 129])
def test_steps_and_calls_take_turns(prompt):
    """A call, then steps, then a call again: the state of each is what the other expects."""
    inputs = draw(B=2, T=220, G=1, H=2, L=7)
    wanted, _ = loglinear_attention(*inputs, backend="reference")
    output, state = loglinear_attention(*(x[:, :prompt] for x in inputs), return_final_state=True, chunk_size=16)
    state = LogLinearState(*(x.clone() for x in state))
    for t in range(prompt, prompt + 40):
        step = loglinear_attention_step(*(x[:, t] for x in inputs), state)
        assert_close(step, wanted[:, t], what=f"step {t}")
        state = state._replace(**counters(state, 1, 16))
    output, _ = loglinear_attention(*(x[:, prompt + 40 :] for x in inputs), initial_state=state, chunk_size=16)
    assert_close(output, wanted[:, prompt + 40 :])


# ------------------------------------------------------------------------------------------------------- numbers


def decays_of(kind, T, H, dtype):
    generator = torch.Generator().manual_seed(3)
    if kind == "mixed":
        choices = torch.tensor([0.0, -1e-3, -1.0, -20.0, -100.0], dtype=dtype)
        return choices[torch.randint(5, (1, T, H), generator=generator)]
    return torch.full((1, T, H), kind, dtype=dtype)


@pytest.mark.parametrize("decay", [0.0, -1e-6, -1.0, -20.0, -100.0, "mixed"])
def test_decays_from_0_to_minus_100(decay):
    """Values and gradients are finite and right from no forgetting at all to forgetting everything at once. (A decay of
    exp(-20) leaves its own gradient at 1e-9, what remains of terms of size 1 that cancel: hence the floor.)
    """
    inputs = list(draw(T=300, G=1, H=2, L=9))
    inputs[3] = decays_of(decay, 300, 2, torch.float64)
    assert_same_with_gradients(inputs, chunk_sizes=(16, 128), floor=1.0)


@pytest.mark.parametrize(("decay", "tolerance"), [(0.0, 2e-6), (-1.0, 2e-5), (-100.0, 2e-6), ("mixed", 2e-4)])
def test_float32_is_as_exact_as_its_sums(decay, tolerance):
    """float32 is near the float64 definition, values and gradients, after 2000 tokens of decay: what is lost is the rounding
    of sums over one chunk (about 1500 in the mixed case, times 6e-8), never of sums over the whole text.
    """
    inputs = list(draw(T=2000, G=1, H=2, N=2, P=2, L=12))
    inputs[3] = decays_of(decay, 2000, 2, torch.float64)
    wanted, wanted_grads = with_gradients(inputs, "reference")
    output, grads = with_gradients([x.float() for x in inputs], "torch", chunk_size=64)
    assert output.dtype == torch.float32
    assert_close(output, wanted, tolerance, "output")
    for name, grad, wanted_grad in zip(NAMES, grads, wanted_grads):
        assert_close(grad, wanted_grad, tolerance, f"gradient of {name}", floor=1.0)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("with_state", [False, True])
def test_garbage_in_padding_has_no_influence(backend, garbage, with_state):
    """NaN or infinity behind `lengths`, in any input, changes no output, no state and no gradient, and gets none."""
    lengths = torch.tensor([70, 0, 33])
    clean = draw(B=3, T=70, L=7)
    padded = torch.arange(70) >= lengths[:, None]
    state = None
    if with_state:
        _, state = loglinear_attention(*draw(B=3, T=50, L=7, seed=1), return_final_state=True, chunk_size=16)
    results = []
    for dirty in (False, True):
        leaves = [x.clone() for x in clean]
        if dirty:
            for x in leaves:
                x[padded] = garbage
        leaves = [x.requires_grad_() for x in leaves]
        output, final = loglinear_attention(
            *leaves, lengths=lengths, initial_state=state, return_final_state=True, chunk_size=16, backend=backend
        )
        grads = gradients(leaves, output, *final[:4])
        assert all(not grad[padded].any() for grad in grads)
        results.append((output, *final, *grads))
    assert not results[1][0][padded].any()
    for clean_result, dirty_result in zip(*results):
        assert torch.equal(clean_result, dirty_result)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype):
    """Inputs of 16 bits are computed in float32 and rounded once: half a unit in the last place plus float32 sums."""
    inputs = draw(B=2, T=150, G=2, H=4, dtype=dtype)
    exact, _ = loglinear_attention(*(x.double() for x in inputs), backend="reference")
    output, state = loglinear_attention(*inputs, return_final_state=True, backend="torch", chunk_size=16)
    assert output.dtype == state.key.dtype == state.value.dtype == dtype
    assert state.levels.dtype == state.log_decay.dtype == torch.float32
    error = (output.double() - exact).abs()
    assert (error <= exact.abs() * torch.finfo(dtype).eps * 0.51 + 1e-5).all()
    _, grads = with_gradients(inputs, "torch")
    _, wanted = with_gradients([x.double() for x in inputs], "reference")
    for name, x, grad, wanted_grad in zip(NAMES, inputs, grads, wanted):
        assert grad.dtype == x.dtype
        assert_close(grad, wanted_grad, 2 * torch.finfo(dtype).eps, name)


def test_autocast_does_not_lower_precision():
    """Under autocast, the operator computes in float32 as without, also in its backward pass."""
    inputs = draw(T=100, dtype=torch.float32)
    wanted, wanted_grads = with_gradients(inputs, "torch", chunk_size=16)
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = loglinear_attention(*leaves, backend="torch", chunk_size=16)
    assert torch.equal(output, wanted)
    assert all(torch.equal(a, b) for a, b in zip(gradients(leaves, output), wanted_grads))


# ------------------------------------------------------------------------------------------------------- transforms


@pytest.mark.parametrize("packed", [False, True])
def test_vmap_over_parameters(packed):
    """`vmap` over a stack of level weights and decays (models of an ensemble) equals a loop, with gradients."""
    query, key, value, log_decay, weights = draw(T=90, L=7)
    scales = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    arguments = {"cu_seqlens": torch.tensor([0, 30, 90])} if packed else {"lengths": torch.tensor([77])}

    def loss(scale):
        output, _ = loglinear_attention(
            query * scale, key, value, log_decay * scale, weights * scale, chunk_size=16, backend="torch", **arguments
        )
        return output.square().sum()

    value_and_grad = torch.func.grad_and_value(loss)
    stacked = torch.func.vmap(value_and_grad)(scales)
    for index, scale in enumerate(scales):
        for row, alone in zip(stacked, value_and_grad(scale)):
            assert_close(row[index], alone)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["dense", "ragged", "packed", "state"])
def test_compiles_without_graph_breaks(form, compiler):
    """torch.compile(fullgraph=True) gives the same outputs and gradients, for every form of input: as a traced graph, and
    (slow) as generated code.
    """
    inputs = [x.requires_grad_() for x in draw(B=1, T=100, L=8, dtype=torch.float32)]
    arguments = {"chunk_size": 16, "backend": "torch"}
    if form == "ragged":
        arguments["lengths"] = torch.tensor([63])
    if form in ("packed", "state"):
        arguments["cu_seqlens"] = torch.tensor([0, 10, 63, 100])
    if form == "state":
        _, state = loglinear_attention(*draw(B=3, T=90, L=8, dtype=torch.float32), return_final_state=True, chunk_size=16)
        arguments |= {"initial_state": state, "return_final_state": True}

    def run(*tensors):
        output, state = loglinear_attention(*tensors, **arguments)
        return (output, *state[:4]) if form == "state" else (output,)

    wanted = run(*inputs)
    actual = torch.compile(run, fullgraph=True, backend=compiler)(*inputs)
    for a, b in zip((*actual, *gradients(inputs, *actual)), (*wanted, *gradients(inputs, *wanted))):
        assert_close(a.detach(), b.detach(), 1e-5)


# ---------------------------------------------------------------------------------------------------------- errors


def wrong(**changes):
    """A call of B = 2, T = 20, G = 2, H = 4, N = 4, P = 3, L = 6 with some arguments replaced."""
    arguments = dict(zip(NAMES, draw(B=2, T=20, G=2, H=4)))
    return arguments | changes


def like(name, *shape, dtype=None):
    tensor = dict(zip(NAMES, draw(B=2, T=20, G=2, H=4)))[name]
    return {name: torch.zeros(*(shape or tensor.shape), dtype=dtype or tensor.dtype)}


def state_of(**arguments):
    return loglinear_attention(*draw(**({"B": 2, "T": 20, "G": 2, "H": 4} | arguments)), return_final_state=True)[1]


def decay_of(value):
    log_decay = draw(B=2, T=20, G=2, H=4)[3]
    log_decay[1, 3, 2] = value
    return {"log_decay": log_decay}


PACKED = {name: x[:1] for name, x in zip(NAMES, draw(B=2, T=20, G=2, H=4))}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "cuda"}, ["`backend`", "'cuda'", "'auto'", "'reference'", "'torch'", "'triton'"]),
        ({"chunk_size": 48}, ["`chunk_size`", "48", "16, 32, 64, 128"]),
        ({"chunk_size": 256}, ["`chunk_size`", "256", "128"]),
        (like("query", 2, 20, 8), ["`query`", "[2, 20, 8]", "[B, T, G, N]"]),
        (like("value", 2, 20, 12), ["`value`", "[2, 20, 12]", "[B, T, H, P]"]),
        (like("query", 2, 0, 2, 4), ["`query`", "at least one", "[2, 0, 2, 4]"]),
        (like("key", 2, 20, 1, 4), ["`key`", "[2, 20, 2, 4]", "[2, 20, 1, 4]"]),
        (like("value", 2, 19, 4, 3), ["`value`", "[2, 20, 4, 3]", "[2, 19, 4, 3]"]),
        (like("log_decay", 2, 20, 2), ["`log_decay`", "[2, 20, 4]", "[2, 20, 2]"]),
        (like("level_weights", 2, 20, 2, 6), ["`level_weights`", "[2, 20, 4, 6]", "[2, 20, 2, 6]"]),
        (like("level_weights", 2, 20, 4, 0), ["`level_weights`", "0 levels", "at least 1"]),
        (like("level_weights", 6), ["`level_weights`", "[6]"]),
        (
            like("query", 2, 20, 3, 4) | like("key", 2, 20, 3, 4),
            ["`query`", "3 groups", "divide", "4 heads"],
        ),
        (like("query", dtype=torch.int64), ["`query`", "int64", "floating"]),
        (like("level_weights", dtype=torch.int64), ["`level_weights`", "int64", "floating"]),
        (like("key", dtype=torch.float32), ["`query`, `key` and `value`", "float64", "float32", "one dtype"]),
        (like("log_decay", dtype=torch.float32), ["`log_decay`", "float32", "float64"]),
        (decay_of(0.5), ["`log_decay`", "0.5", "<= 0"]),
        (decay_of(float("nan")), ["`log_decay`", "nan", "finite"]),
        (decay_of(-float("inf")), ["`log_decay`", "-inf", "finite"]),
        ({"lengths": torch.tensor([3])}, ["`lengths`", "1 entries", "2 rows"]),
        ({"lengths": torch.tensor([3, 21])}, ["`lengths`", "[3, 21]", "0 to T = 20"]),
        ({"lengths": torch.tensor([-1, 20])}, ["`lengths`", "[-1, 20]", "0 to T = 20"]),
        ({"lengths": torch.tensor([3.0, 4.0])}, ["`lengths`", "int32 or int64", "float32"]),
        ({"lengths": torch.tensor([[3, 4]])}, ["`lengths`", "1-D", "[1, 2]"]),
        ({"cu_seqlens": torch.tensor([0, 20])}, ["`cu_seqlens`", "one packed row", "2 rows"]),
        (
            {"cu_seqlens": torch.tensor([0, 20]), "lengths": torch.tensor([3, 4])},
            ["`lengths` and `cu_seqlens`", "exclude"],
        ),
        (PACKED | {"cu_seqlens": torch.tensor([0])}, ["`cu_seqlens`", "1 entries", "at least 2"]),
        (PACKED | {"cu_seqlens": torch.tensor([0, 12, 8, 20])}, ["`cu_seqlens`", "[0, 12, 8, 20]", "0 to T = 20"]),
        (PACKED | {"cu_seqlens": torch.tensor([0, 19])}, ["`cu_seqlens`", "[0, 19]", "0 to T = 20"]),
        (PACKED | {"cu_seqlens": torch.tensor([1, 20])}, ["`cu_seqlens`", "[1, 20]", "0 to T = 20"]),
        ({"initial_state": state_of(B=1)}, ["`initial_state.key`", "[1, 128, 2, 4]", "[2, 128, 2, 4]"]),
        ({"initial_state": state_of(N=5)}, ["`initial_state.key`", "[2, 128, 2, 5]", "[2, 128, 2, 4]"]),
        ({"initial_state": state_of(P=5)}, ["`initial_state.value`", "[2, 128, 4, 5]", "[2, 128, 4, 3]"]),
        ({"initial_state": state_of(L=9)}, ["`initial_state.levels`", "[2, 2, 4, 4, 3]", "[2, 1, 4, 4, 3]"]),
        ({"initial_state": state_of(), "chunk_size": 32}, ["`initial_state.key`", "[2, 128, 2, 4]", "[2, 64, 2, 4]"]),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_errors_name_argument_value_and_what_is_allowed(changes, words, backend):
    """Every wrong argument is refused with a ValueError that says which, what it is and what it may be."""
    with pytest.raises(ValueError) as error:
        loglinear_attention(**({"backend": backend} | wrong(**changes)))
    for word in words:
        assert word in str(error.value)


def test_triton_is_refused_where_it_cannot_run():
    """backend="triton" never falls back in silence: float64 is not supported by the kernels."""
    with pytest.raises(ValueError, match="`backend` is 'triton'.*float64.*'auto' or 'torch'"):
        loglinear_attention(*draw(), backend="triton")


def test_auto_on_a_cpu_is_torch():
    """Where there is no GPU tensor, "auto" is bit for bit "torch"."""
    inputs = draw(T=100, dtype=torch.float32)
    assert torch.equal(loglinear_attention(*inputs)[0], loglinear_attention(*inputs, backend="torch")[0])


def test_no_values_are_read_from_other_devices():
    """On the meta device, which has no values, shapes and dtypes come out: nothing branches on what a device holds."""
    inputs = [x.to("meta") for x in draw(B=2, T=50, G=2, H=4, dtype=torch.bfloat16)]
    lengths = torch.tensor([50, 3], device="meta")
    output, state = loglinear_attention(*inputs, lengths=lengths, return_final_state=True, chunk_size=16)
    output, _ = loglinear_attention(*inputs, lengths=lengths, initial_state=state, chunk_size=16)
    step = loglinear_attention_step(*(x[:, 0] for x in inputs), state)
    assert output.shape == (2, 50, 4, 3) and output.dtype == torch.bfloat16 and step.shape == (2, 4, 3)
