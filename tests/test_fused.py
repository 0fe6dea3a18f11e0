"""The fused inference kernels against their plain PyTorch twins: on a GPU compiled, elsewhere in Triton's interpreter."""

import math

import pytest
import torch

from modeling_loglinear import FenwickCache, LogLinearConfig, LogLinearForCausalLM
from modeling_loglinear.modeling_loglinear import LogLinearGatedRMSNorm, LogLinearLambdaHead, LogLinearMixer, LogLinearRMSNorm

fused = pytest.importorskip("modeling_loglinear.fused_loglinear", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
B, T, K = 2, 37, 4


def small_config(**kwargs):
    sizes = dict(hidden_size=24, num_heads=4, head_dim=12, n_groups=2, state_size=6, num_hidden_layers=2, vocab_size=50)
    return LogLinearConfig(**sizes | dict(max_position_embeddings=2048, chunk_size=16) | kwargs)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@torch.no_grad()
def test_rms_norm():
    """A row length that is no power of two gives what the module gives."""
    norm = LogLinearRMSNorm(200, 1e-5).to(DEVICE)
    norm.weight.copy_(random(200))
    x = random(B, T, 200, seed=1)
    close(fused.rms_norm(x, norm.weight, 1e-5), norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm(dtype):
    """A sum that keeps the dtype of its first part, and the norm of the sum as it was stored."""
    weight, x, added = random(200).bfloat16(), random(B, 1, 200, seed=1).to(dtype), random(B, 1, 200, seed=2).bfloat16()
    total, normed = fused.add_rms_norm(x, added, weight, 1e-5)
    assert total.dtype == dtype and normed.dtype == torch.bfloat16
    torch.testing.assert_close(total, x + added)  # the interpreter rounds bfloat16 in another way
    torch.testing.assert_close(normed, fused.rms_norm(total, weight, 1e-5), rtol=0, atol=0)


@torch.no_grad()
def test_silu_product():
    """Sizes that fill no block, and slices of one projection."""
    x = random(B, T, 90)
    gate, up = x[..., :45], x[..., 45:]
    close(fused.silu_product(gate, up), torch.nn.functional.silu(gate) * up)


@torch.no_grad()
def test_gated_norm():
    """Skip connection, gate and norm per group, from slices of one projection."""
    norm = LogLinearGatedRMSNorm(48, 2, 1e-5).to(DEVICE)
    norm.weight.copy_(random(48))
    projected, y, skip = random(B, T, 100, seed=1), random(B, T, 4, 12, seed=2), random(4, seed=3)
    values, gate = projected[..., :48], projected[..., 50:98]
    gated = (y + skip[:, None] * values.unflatten(-1, (4, 12))).flatten(-2) * torch.nn.functional.silu(gate)
    grouped = gated.unflatten(-1, (2, 24))
    expected = norm.weight * (grouped / (grouped.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)
    close(fused.gated_norm(y.flatten(-2), values, gate, skip, norm.weight, 2, 1e-5), expected)


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_starts_at_zeros_or_goes_on_from_a_ring(bias):
    """Rows of different lengths, one of them new: the taps find the tokens before in the ring, and zeros before the first."""
    x, weight, ring = random(B, T, 90), random(90, 1, K, seed=1), random(B, 32, 90, seed=2)
    bias = random(90, seed=3) if bias else None

    def convolved(inputs):
        return torch.nn.functional.silu(torch.nn.functional.conv1d(inputs.mT, weight, bias, groups=90)).mT

    zeros = x.new_zeros(B, K - 1, 90)
    close(fused.convolution(x, weight, bias), convolved(torch.cat([zeros, x], 1)))
    lengths = torch.tensor([0, 41], device=DEVICE)
    before = torch.stack([zeros[0], ring[1, torch.arange(41 - K + 1, 41) % 32]])
    expected = convolved(torch.cat([before, x], 1))
    close(fused.convolution(x, weight, bias, ring, lengths), expected)

    after = ring.clone()
    active = torch.tensor([True, False], device=DEVICE)
    close(fused.convolution(x[:, :1], weight, bias, after, lengths, active, step=True), expected[:, :1])
    assert torch.equal(after[0, 0], x[0, 0]) and torch.equal(after[0, 1:], ring[0, 1:]), "the token stands in its slot"
    assert torch.equal(after[1], ring[1]), "a row without a token keeps its ring"


@torch.no_grad()
@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.1, 1.0)])
def test_time_step(limits):
    """Decay and value from slices of a projection, with and without a limit."""
    mixer = LogLinearMixer(small_config(time_step_limit=limits), 0).to(DEVICE)
    mixer.dt_bias.copy_(random(4))
    mixer.A_log.copy_(random(4, seed=1))
    projected = random(B, T, 60, seed=2) * 4
    dt, values = projected[..., :4], projected[..., 8:56].unflatten(-1, (4, 12))
    step = torch.nn.functional.softplus(dt + mixer.dt_bias).clamp(*limits)
    log_decay, value = fused.time_step(dt, mixer.dt_bias, mixer.A_log, values, limits)
    close(log_decay, -mixer.A_log.exp() * step)
    close(value, values * step[..., None])


@torch.no_grad()
@pytest.mark.parametrize("mode", ["mlp_softplus", "mlp_softmax"])
def test_level_weights(mode):
    """Both MLP modes, for a number of levels that is no power of two and rows that fill no tile."""
    head = LogLinearLambdaHead(small_config(lambda_mode=mode)).to(DEVICE)
    for seed, parameter in enumerate(head.parameters()):
        parameter.copy_(random(*parameter.shape, seed=seed) / 2)
    levels = random(B, T, 4, 12, seed=5)
    raw = levels @ head.up @ head.down + head.bias
    expected = raw.softmax(-1) if mode == "mlp_softmax" else torch.nn.functional.softplus(raw)
    close(fused.level_weights(levels, head.up, head.down, head.bias, mode == "mlp_softmax"), expected)


@needs_gpu
@torch.no_grad()
def test_model_on_a_gpu_gives_what_it_gives_on_a_cpu():
    """Full forward, a cache filled in pieces and single steps, with the kernels against plain PyTorch."""
    config = small_config(head_dim=16, num_heads=3, hidden_size=24, n_groups=1, state_size=16, chunk_size=32)
    on_cpu = LogLinearForCausalLM(config).eval()
    on_gpu = LogLinearForCausalLM(config).eval()
    on_gpu.load_state_dict(on_cpu.state_dict())
    on_gpu.cuda()
    ids = torch.randint(3, 50, (2, 200), generator=torch.Generator().manual_seed(0))
    expected = on_cpu(ids).logits
    torch.testing.assert_close(on_gpu(ids.cuda()).logits.cpu(), expected, rtol=1e-4, atol=1e-4)
    cache = FenwickCache(config)
    pieces = [on_gpu(piece.cuda(), cache=cache).logits.cpu() for piece in ids.split([70, *[1] * 80, 50], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-4)


@needs_gpu
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}, {"do_sample": True}]
)
def test_replayed_steps_generate_what_eager_steps_generate(options):
    """The step is a CUDA graph; a hook on the model makes it step eagerly instead."""
    config = small_config(head_dim=16, num_heads=3, hidden_size=24, n_groups=1, state_size=16, chunk_size=32)
    model = LogLinearForCausalLM(config).eval().cuda()
    ids = torch.randint(3, 50, (2, 90), generator=torch.Generator().manual_seed(0)).cuda()
    options = dict(max_new_tokens=80, do_sample=False, eos_token_id=None) | options
    torch.manual_seed(0)
    replayed = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    calls = []
    hook = model.backbone.layers[0].register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    eager = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    hook.remove()
    assert torch.equal(replayed, eager)
    assert len(calls) == 80, "the hook saw every step"
