"""The Triton kernels against the O(T^2) definition in float64: on a GPU compiled, elsewhere in Triton's interpreter."""

import importlib.util
import random
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from modeling_loglinear.attention_loglinear import (
    LogLinearState,
    StepPositions,
    advanced,
    empty_state,
    loglinear_attention,
    loglinear_attention_step,
)

triton_loglinear = pytest.importorskip("modeling_loglinear.triton_loglinear", reason="Triton is not installed")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NAMES = "output", "query", "key", "value", "log_decay", "level_weights"
DTYPES = [dtype for dtype in TOLERANCE if ON_GPU or dtype != torch.bfloat16]  # the interpreter's bfloat16 dots are wrong


def make_inputs(B, T, G, H, N, P, L, dtype=torch.float32, seed=0, mean_decay=-2.0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    inputs = [
        normal(B, T, G, N) / N**0.5,
        normal(B, T, G, N),
        normal(B, T, H, P),
        -F.softplus(normal(B, T, H) + mean_decay),
        torch.rand(B, T, H, L, generator=generator) + 0.5,
    ]
    return [(x if i == 3 else x.to(dtype)).to(DEVICE) for i, x in enumerate(inputs)]


def relative_error(actual, expected):
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-3)).item()


def leaves_of(inputs, dtype=None):
    return [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in inputs]


def check_against_reference(inputs, **options):
    """Outputs and all five gradients, for a random gradient of the output."""
    ours, exact = leaves_of(inputs), leaves_of(inputs, torch.float64)
    output, _ = loglinear_attention(*ours, backend="triton", **options)
    expected, _ = loglinear_attention(*exact, backend="reference", **options)
    assert_close_with_gradients(output, ours, expected, exact)


def assert_close_with_gradients(output, ours, expected, exact):
    """`output` of the leaves `ours` and the gradients of these, against `expected` of the leaves `exact`."""
    d_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output)
    output.backward(d_output)
    expected.backward(d_output.double())
    tolerance = TOLERANCE[ours[0].dtype]
    assert relative_error(output, expected) < tolerance
    for name, x, y in zip(NAMES[1:], ours, exact):
        assert relative_error(x.grad, y.grad) < tolerance, name


def in_two_pieces(inputs, cuts, tokens, packed, chunk_size):
    """Every row up to its token `cuts`, then with the state of that up to `tokens`: the outputs of all rows in one list."""
    state, outputs = None, []
    for starts, stops in (([0] * len(cuts), cuts), (cuts, tokens)):
        counts = torch.tensor([stop - start for start, stop in zip(starts, stops)], device=DEVICE)
        options = {"chunk_size": chunk_size, "initial_state": state, "return_final_state": True, "backend": "triton"}
        cut = [[x[row, a:b] for row, (a, b) in enumerate(zip(starts, stops))] for x in inputs]
        if packed:
            borders = F.pad(counts.cumsum(0), (1, 0)).int()
            output, state = loglinear_attention(*(torch.cat(rows)[None] for rows in cut), cu_seqlens=borders, **options)
            outputs.append(output[0].split(counts.tolist()))
        else:
            padded = [torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in cut]
            output, state = loglinear_attention(*padded, lengths=counts, **options)
            outputs.append([row[:count] for row, count in zip(output, counts.tolist())])
    return torch.cat([piece for row in zip(*outputs) for piece in row])


@pytest.fixture
def small_blocks(monkeypatch):
    """Chunks of 16 and several tiles per node, so that short inputs make deep trees."""
    monkeypatch.setattr(triton_loglinear, "_block_size", lambda dtype, N, P, limit: min(16, limit))
    monkeypatch.setattr(triton_loglinear, "MERGE_TILE", 128)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1, 16, 16, 1), (2, 150, 1, 2, 16, 32, 9), (1, 130, 2, 4, 32, 16, 3), (1, 64, 3, 3, 16, 16, 7)],
    ids=str,
)
def test_output_and_gradients(shape, dtype):
    """One token, partial chunks, groups, more and fewer levels than the length has."""
    check_against_reference(make_inputs(*shape, dtype))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("N, P", [(64, 16), (128, 32), (256, 16), (256, 32), (256, 128), (16, 64)])
def test_narrow_and_large_tiles(N, P, dtype):
    """Sizes for which a compiled kernel once read outside its shared memory, or needed more than there is."""
    for H in (1, 2):
        check_against_reference(make_inputs(2, 340, 1, H, N, P, 10, dtype))


@pytest.mark.parametrize("length", [33, 300, 560])
def test_deep_tree(small_blocks, length):
    """Every path of the tree: two launches of merges, nodes of more chunks than a segment, several spans."""
    check_against_reference(make_inputs(1, length, 1, 1, 16, 16, 12))


def test_lengths(small_blocks):
    """Ragged rows: padding holds NaN, and still neither output nor gradients see it."""
    inputs = make_inputs(3, 70, 1, 2, 16, 16, 8)
    lengths = torch.tensor([70, 0, 35], device=DEVICE)
    padded = torch.arange(70, device=DEVICE) >= lengths[:, None]
    for x in inputs:
        x[padded] = torch.nan
    ours = leaves_of(inputs)
    output, _ = loglinear_attention(*ours[:3], ours[3], ours[4], backend="triton", lengths=lengths, chunk_size=32)
    output.square().sum().backward()
    assert (output[padded] == 0).all()
    clean = [torch.where(padded.view(3, 70, *[1] * (x.dim() - 2)), 0, x) for x in inputs]
    exact = leaves_of(clean, torch.float64)
    expected, _ = loglinear_attention(*exact, backend="reference", lengths=lengths, chunk_size=32)
    expected.square().sum().backward()
    assert relative_error(output, expected) < 1e-5
    for x, y in zip(ours, exact):
        assert (x.grad[padded] == 0).all()
        assert relative_error(x.grad, y.grad) < 1e-5


def test_packed(small_blocks):
    """Sequences of 0, 1, 39 and 130 tokens in one row do not see each other."""
    cu_seqlens = torch.tensor([0, 0, 1, 40, 170], dtype=torch.int32, device=DEVICE)
    check_against_reference(make_inputs(1, 170, 1, 2, 16, 16, 9), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("num_levels", [4, 9], ids=["one shared level", "several levels"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_states_with_gradients(small_blocks, packed, num_levels):
    """A sequence in two pieces, with a state between: as in one piece, gradients through the state included."""
    tokens, cuts = [150, 230], [70, 97]
    inputs = make_inputs(2, 230, 1, 1, 16, 16, num_levels)
    ours, exact = leaves_of(inputs), leaves_of(inputs, torch.float64)
    expected, _ = loglinear_attention(*exact, backend="reference", lengths=torch.tensor(tokens, device=DEVICE))
    output = in_two_pieces(ours, cuts, tokens, packed, chunk_size=32)
    expected = torch.cat([expected[row, :count] for row, count in enumerate(tokens)])
    assert_close_with_gradients(output, ours, expected, exact)


def test_states_after_many_chunks():
    """Rows whose states hold several nodes go on until these are part of larger ones; nothing decays much, so every wrong
    node would show."""
    merged, more, chunk_size = [3, 7, 12, 14, 15, 21, 24, 28, 30, 31], 9 * 32, 32
    cuts = [chunk_size * (chunks + 1) + 5 for chunks in merged]
    rows, longest = len(cuts), max(cuts)
    inputs = make_inputs(rows, longest + more, 1, 1, 16, 16, 12, mean_decay=-8.0)
    ours, exact = leaves_of(inputs), leaves_of(inputs, torch.float64)
    lengths = torch.tensor(cuts, device=DEVICE)
    options = {"chunk_size": chunk_size, "return_final_state": True}
    expected, _ = loglinear_attention(*exact, backend="torch", lengths=lengths + more, chunk_size=chunk_size)
    _, state = loglinear_attention(*(x[:, :longest] for x in ours), lengths=lengths, backend="torch", **options)
    assert state.merged_chunks.tolist() == merged
    rest = [torch.stack([x[row, cut : cut + more] for row, cut in enumerate(cuts)]) for x in ours]
    output, _ = loglinear_attention(*rest, initial_state=state, backend="triton", **options)
    expected = torch.stack([expected[row, cut : cut + more] for row, cut in enumerate(cuts)])
    d_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)
    output.backward(d_output)
    expected.backward(d_output.double())
    for row in range(rows):
        assert relative_error(output[row], expected[row]) < 1e-5, row
        for x, y in zip(ours, exact):
            assert relative_error(x.grad[row], y.grad[row]) < 1e-5, row


class GuardedMemory(TorchFunctionMode):
    """Gives every new tensor a NaN in each element and guard bands on both sides.

    So what is read before it is written spoils the result, and `assert_untouched` finds what was written outside.
    """

    GUARD = 512  # elements: keeps every alignment that an allocation has
    NAMES = "empty", "zeros", "empty_like", "zeros_like", "new_empty", "new_zeros"

    def __init__(self):
        super().__init__()
        self.buffers = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        if getattr(function, "__name__", None) not in self.NAMES or not made.is_floating_point() or not made.numel():
            return made
        assert made.is_contiguous()
        size, guard = made.numel(), self.GUARD
        buffer = made.new_full((size + 2 * guard,), torch.nan)
        self.buffers.append(buffer)
        inside = buffer[guard : guard + size].view(made.shape)
        return inside.zero_() if "zeros" in function.__name__ else inside

    def of(self, x):
        """A copy of x between guard bands."""
        with self:
            return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)

    def assert_untouched(self):
        for buffer in self.buffers:
            assert buffer[: self.GUARD].isnan().all() and buffer[-self.GUARD :].isnan().all()


def random_case(number, longest, sizes, levels):
    """(inputs, form, lengths, chunk size) of a random call: tokens and levels up to these, N and P of `sizes`."""
    draw = random.Random(number)
    dtype = DTYPES[number % len(DTYPES)]
    form = ("dense", "ragged", "packed", "pieces", "packed pieces")[number // len(DTYPES) % 5]
    B, T = draw.randint(1, 3), round(longest ** draw.random())
    G = draw.choice([1, 1, 2, 3])
    H, N, P = G * draw.choice([1, 2, 4]), draw.choice(sizes), draw.choice([size for size in sizes if size <= 128])
    L, mean_decay = draw.randint(1, levels), draw.choice([-5.0, -2.0, 1.0])
    inputs = make_inputs(B, T, G, H, N, P, L, dtype, number, mean_decay)
    lengths = [T, *(draw.randint(0, T) for _ in range(B - 1))]
    return inputs, form, lengths, draw.choice([32, 64, 128])


def check_random_case(number, *limits):
    """Output and gradients of a random call within guarded memory: close to the reference, and the same bits again."""
    inputs, form, lengths, chunk_size = random_case(number, *limits)
    counts, options = torch.tensor(lengths, device=DEVICE), {"chunk_size": chunk_size}
    if form == "packed":
        inputs = [torch.cat([row[:count] for row, count in zip(x, lengths)])[None] for x in inputs]
        options["cu_seqlens"] = F.pad(counts.cumsum(0), (1, 0)).int()
    elif form != "dense":
        options["lengths"] = counts
    cuts = [random.Random(number).randint(0, count) for count in lengths]

    def run(x):
        if "pieces" in form:
            return in_two_pieces(x, cuts, lengths, form.startswith("packed"), chunk_size)
        return loglinear_attention(*x, backend="triton", **options)[0]

    exact = leaves_of(inputs, torch.float64)
    expected, _ = loglinear_attention(*exact, backend="reference", **options)
    if "pieces" in form:
        expected = torch.cat([row[:count] for row, count in zip(expected, lengths)])
    memory, runs = GuardedMemory(), []
    for _ in range(2):
        ours = [memory.of(x).requires_grad_() for x in inputs]
        with memory:
            output = run(ours)
            allocated = len(memory.buffers)
            d_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output)
            output.backward(memory.of(d_output))
        assert len(memory.buffers) > allocated  # the mode also sees what autograd's own thread allocates
        runs.append([output, *(x.grad for x in ours)])
    memory.assert_untouched()
    expected.backward(d_output.double())
    tolerance = TOLERANCE[inputs[0].dtype]
    for name, actual, again, truth in zip(NAMES, *runs, [expected, *(x.grad for x in exact)]):
        assert torch.equal(actual, again), name
        assert relative_error(actual, truth) < tolerance, name


@pytest.mark.parametrize("number", range(10))
def test_random_shapes(small_blocks, number):
    """Every form of call, short."""
    check_random_case(number, 60, [16, 32], 9)


@pytest.mark.slow
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("number", range(96))
def test_random_shapes_compiled(number):
    """Every form of call, dtype and size, up to 2,000 tokens."""
    check_random_case(number, 2000, [16, 32, 64, 128, 256], 14)


@pytest.mark.slow
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_a_hundred_runs_are_bit_equal(dtype):
    """No race: enough chunks for every kernel and more programs than run at a time."""
    inputs = make_inputs(2, 1500, 1, 8, 64, 64, 12, dtype)
    first = None
    for _ in range(100):
        leaves = leaves_of(inputs)
        output, _ = loglinear_attention(*leaves, backend="triton", chunk_size=32)
        output.square().sum().backward()
        run = [output, *(x.grad for x in leaves)]
        first = first or run
        assert all(torch.equal(x, y) for x, y in zip(first, run))


def test_strong_decay_stays_finite():
    """-100 per token: nothing overflows, nothing becomes NaN, and what remains is the token itself."""
    inputs = make_inputs(1, 100, 1, 1, 16, 16, 8)
    inputs[3] = torch.full_like(inputs[3], -100.0)
    check_against_reference(inputs)


def test_views_are_read_in_place():
    """Query, key and value as slices of one wide tensor, level weights with transposed levels."""
    q, k, v, g, weights = make_inputs(2, 70, 1, 2, 16, 16, 8)
    wide = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    views = [x.view(2, 70, -1, 16) for x in wide.split([16, 16, 32], -1)]
    transposed = weights.mT.contiguous().mT
    expected, _ = loglinear_attention(q, k, v, g, weights, backend="triton")
    output, _ = loglinear_attention(*views, g, transposed, backend="triton")
    assert torch.equal(output, expected)


def test_repeats_are_bit_equal(small_blocks):
    """No atomics: two runs give the same bits, forward and backward."""
    inputs = make_inputs(1, 290, 1, 2, 16, 16, 10)
    runs = []
    for _ in range(2):
        leaves = leaves_of(inputs)
        output, _ = loglinear_attention(*leaves, backend="triton", chunk_size=32)
        output.sum().backward()
        runs.append([output, *(x.grad for x in leaves)])
    assert all(torch.equal(x, y) for x, y in zip(*runs))


def test_operator_is_registered_properly():
    """Schema, fake tensors and autograd registration, as torch.library checks them."""
    inputs = leaves_of(make_inputs(1, 40, 1, 1, 16, 16, 6))
    torch.library.opcheck(triton_loglinear._forward, (*inputs, None, None, None, None, None, 32))


def test_compile_and_checkpoint():
    """One graph under torch.compile, and the same gradients when the forward is recomputed."""
    inputs = make_inputs(1, 40, 1, 1, 16, 16, 6)
    plain, other = leaves_of(inputs), leaves_of(inputs)

    def attend(*args):
        return triton_loglinear.tree_attention(*args, chunk_size=32)[0]

    expected = attend(*plain)
    expected.sum().backward()
    output = checkpoint(torch.compile(attend, fullgraph=True, backend="aot_eager"), *other, use_reentrant=False)
    output.sum().backward()
    assert torch.equal(output, expected)
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(plain, other))


@pytest.mark.parametrize("form", ["dense", "ragged", "packed"])
def test_vmap_over_parameters(form):
    """`torch.func.vmap` of a gradient, over decays, weights and queries of an ensemble, equals a loop over its members."""
    query, key, value, log_decay, weights = make_inputs(1, 70, 1, 2, 16, 16, 8)
    arguments = {"chunk_size": 32, "backend": "triton"}
    if form == "ragged":
        arguments["lengths"] = torch.tensor([61], device=DEVICE)
    if form == "packed":
        arguments["cu_seqlens"] = torch.tensor([0, 25, 70], dtype=torch.int32, device=DEVICE)

    def loss(scale):
        output, _ = loglinear_attention(query * scale, key, value, log_decay * scale, weights * scale, **arguments)
        return output.square().sum()

    scales = torch.tensor([0.5, 1.0, 2.0], device=DEVICE)
    stacked = torch.func.vmap(torch.func.grad_and_value(loss))(scales)
    for index, scale in enumerate(scales):
        for mapped, alone in zip(stacked, torch.func.grad_and_value(loss)(scale)):
            assert relative_error(mapped[index], alone) < 1e-5


def test_two_copies_in_one_process():
    """The package and a remote-code copy of the file register different operators."""
    spec = importlib.util.spec_from_file_location("copy_of_triton_loglinear", triton_loglinear.__file__)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy
    spec.loader.exec_module(copy)
    inputs = make_inputs(1, 40, 1, 1, 16, 16, 6)
    ours = triton_loglinear.tree_attention(*inputs, chunk_size=32)[0]
    theirs = copy.tree_attention(*inputs, chunk_size=32)[0]
    assert torch.equal(ours, theirs)
    assert triton_loglinear._NAMESPACE != copy._NAMESPACE


@pytest.mark.parametrize("steps, start", [(100, 0), (70, 230)])
def test_decode_steps(steps, start):
    """Rows at different positions, some of them pausing, across merges: outputs and states as in PyTorch's step."""
    B, G, H, N, P, L, C = 2, 1, 2, 16, 16, 8, 32
    state = empty_state(B, G, H, N, P, L, C, torch.float32, DEVICE)
    if start:
        lengths = torch.tensor([start, start - 37], device=DEVICE)
        _, state = loglinear_attention(
            *make_inputs(B, start, G, H, N, P, L), chunk_size=C, lengths=lengths, return_final_state=True, backend="torch"
        )
    ours = LogLinearState(*(x.clone() for x in state))
    exact = LogLinearState(*(x.to(torch.float64 if x.is_floating_point() else x.dtype, copy=True) for x in state))
    inputs = make_inputs(B, steps, G, H, N, P, L, seed=1)
    active = (torch.arange(steps * B).view(steps, B) % 5 > 0).to(DEVICE)
    for step in range(steps):
        token = [x[:, step] for x in inputs]
        positions = StepPositions(exact.lengths, exact.merged_chunks, C, active[step])
        output = triton_loglinear.decode_step(*token, ours, active[step])
        expected = loglinear_attention_step(*(x.double() for x in token), exact, positions=positions, backend="torch")
        assert relative_error(output, expected) < 1e-5
        counters = advanced(ours.lengths, ours.merged_chunks, active[step].long(), C)
        ours = ours._replace(lengths=counters[0], merged_chunks=counters[1])
        exact = exact._replace(lengths=counters[0], merged_chunks=counters[1])
    K = ours.levels.shape[1]
    merged = ours.merged_chunks[:, None] >> torch.arange(K, device=DEVICE)
    occupied = torch.where(torch.arange(K, device=DEVICE) < K - 1, merged % 2, merged) > 0
    assert occupied.any()
    assert relative_error(ours.levels[occupied], exact.levels[occupied]) < 1e-5
    for name in ("key", "value", "log_decay"):
        assert torch.equal(getattr(ours, name), getattr(exact, name).float()), name


def test_supported_inputs():
    """What the kernels cannot do goes to the torch backend."""

    def supported(N=64, P=64, dtype=torch.float32, chunk_size=64):
        query, value = (torch.empty(1, 1, 1, size, dtype=dtype, device=DEVICE) for size in (N, P))
        return triton_loglinear.is_supported(query, value, torch.empty(1, 1, 1, 4, device=DEVICE), chunk_size)

    assert supported() and supported(N=256, P=128) and supported(dtype=torch.float16, chunk_size=32)
    assert not supported(dtype=torch.float64)
    assert not supported(N=24) and not supported(N=512) and not supported(P=8) and not supported(chunk_size=16)
