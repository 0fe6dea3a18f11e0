"""The kernels of a decoding step against the modules they stand for: on a GPU compiled, elsewhere in Triton's interpreter."""

import copy
import sys
from functools import partial

import pytest
import torch
from torch import nn

from modeling_loglinear import FenwickCache, LogLinearConfig, LogLinearForCausalLM
from modeling_loglinear.modeling_loglinear import PARTS_OF_BLOCK, _Padding

step = pytest.importorskip("modeling_loglinear.step_loglinear", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CHUNK = 32


def small_model(dtype=torch.float32, seed=0, **kwargs):
    sizes = dict(hidden_size=32, num_heads=4, head_dim=16, expand=2, n_groups=2, state_size=16, num_hidden_layers=1)
    config = LogLinearConfig(**sizes | dict(vocab_size=50, max_position_embeddings=512, chunk_size=CHUNK) | kwargs)
    torch.manual_seed(seed)
    model = LogLinearForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # so that no part of the model is without effect
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval().to(DEVICE, dtype)


def tokens(rows, length):
    return torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(length)).to(DEVICE)


@torch.no_grad()
def stepped(model, cache, ids, fused):
    """The hidden states after every token of ids [B, T], one step each."""
    backbone, outputs = model.backbone, []
    for token in ids.split(1, 1):
        padding = _Padding(None, token.shape, ids.device, has_past=True)
        outputs.append(backbone._run(backbone.embeddings(token), cache, padding, fused=fused))
    return torch.cat(outputs, 1)


def assert_same_steps(model, lengths, num_steps, **tolerance):
    """Rows of some lengths, stepped by the kernels and by the modules: the same outputs and the same cache."""
    rows = len(lengths)
    mask = torch.arange(max(lengths), device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    caches = [FenwickCache(model.config) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(tokens(rows, max(lengths)), attention_mask=mask, cache=cache)
    ids = tokens(rows, num_steps)
    expected, actual = (stepped(model, cache, ids, fused) for cache, fused in zip(caches, (False, True)))
    torch.testing.assert_close(actual, expected, **tolerance)
    entry = torch.arange(caches[0].layers[0].levels.shape[1], device=DEVICE)
    merged = caches[0].layers[0].merged_chunks[:, None] >> entry
    occupied = torch.where(entry == entry[-1], merged > 0, merged % 2 > 0)[..., None, None, None]
    for layer, other in zip(*(cache.layers for cache in caches)):
        for name, tensor in layer.tensors().items():
            found = other.tensors()[name]
            if name == "levels":  # what stands in an entry that is not occupied is never read
                found, tensor = (torch.where(occupied, x, 0) for x in (found, tensor))
            torch.testing.assert_close(found, tensor, msg=partial("{}: {}".format, name), **tolerance)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"lambda_mode": "linear", "n_groups": 1, "mlp_intermediate_size": 40},
        {"lambda_mode": "mlp_softmax", "use_bias": True, "use_conv_bias": False, "time_step_limit": (0.01, 0.5)},
        {"lambda_mode": "fixed", "residual_in_fp32": True, "mlp_intermediate_size": 300, "conv_kernel": 2},
    ],
    ids=["softplus", "linear-mlp", "softmax-bias", "fixed-mlp"],
)
def test_steps_are_those_of_the_modules(kwargs):
    """Every mode and option, for a row that reaches the token at which the tail's oldest chunk is merged, alone and beside one
    that is nearly new."""
    model = small_model(**kwargs)
    for lengths in ([4 * CHUNK - 2], [2, 4 * CHUNK - 2]):
        assert_same_steps(model, lengths, 4, rtol=1e-4, atol=1e-5)


def test_sizes_that_fill_no_tile(monkeypatch):
    """Matrices of several tiles and parts of tiles in both directions."""
    monkeypatch.setattr(step, "MOST_COLUMNS", 32)
    model = small_model(hidden_size=40, num_heads=5, n_groups=5, mlp_intermediate_size=70)
    assert_same_steps(model, [5], 1, rtol=1e-4, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """To what rounding leaves; float16 with a residual stream far beyond its range once it is squared."""
    model = small_model(dtype, mlp_intermediate_size=40)
    with torch.no_grad():
        model.backbone.embeddings.weight.mul_(500)
    for lengths in ([4 * CHUNK - 2], [2, 4 * CHUNK - 2]):
        assert_same_steps(model, lengths, 4, rtol=5e-2, atol=5e-2)


@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
def test_early_launches_change_nothing(monkeypatch, rows):
    """Kernels that start while the one in front still runs give, bit for bit, what they give one after the other: 200 replayed
    steps, merges of chunks among them."""
    model = small_model(torch.bfloat16, hidden_size=512, num_heads=16, head_dim=64, state_size=64, mlp_intermediate_size=1024)
    ids = tokens(rows, 200)

    def logits():
        cache = FenwickCache(model.config)
        model(tokens(rows, 70), cache=cache)
        with model.replaying():
            return torch.cat([model(token, cache=cache).logits.clone() for token in ids.split(1, 1)], 1)

    early = logits()
    for module in (step, sys.modules["modeling_loglinear.triton_loglinear"]):
        monkeypatch.setattr(module, "early_launch", lambda device: {"EARLY": False})
    assert torch.equal(early, logits())


def test_replaced_modules_are_left_alone():
    """Adapters, quantised layers, mixed dtypes, other activations and sizes take the ordinary way."""
    model = small_model(mlp_intermediate_size=40, num_hidden_layers=2)
    layers, config = model.backbone.layers, model.config
    assert step.can_fuse(layers, config, PARTS_OF_BLOCK)

    def refused(change):
        other = copy.deepcopy(model)
        change(other.backbone.layers[1])
        return not step.can_fuse(other.backbone.layers, config, PARTS_OF_BLOCK)

    class Adapter(nn.Linear):
        pass

    assert refused(lambda block: setattr(block.mixer, "out_proj", Adapter(64, 32)))
    assert refused(lambda block: setattr(block.mlp, "up_proj", Adapter(32, 40, bias=False)))
    assert refused(lambda block: setattr(block, "mlp", nn.Sequential(nn.Linear(32, 32))))
    assert refused(lambda block: setattr(block, "norm", nn.Identity()))
    assert refused(lambda block: setattr(block.mlp, "forward", lambda x: x))
    assert refused(lambda block: block.mixer.in_proj.half())
    assert refused(lambda block: nn.utils.parametrizations.weight_norm(block.mixer.lambda_proj))
    with torch.autocast(DEVICE, torch.bfloat16):
        assert not step.can_fuse(layers, config, PARTS_OF_BLOCK)
    for kwargs in ({"hidden_act": "gelu"}, {"state_size": 20}, {"head_dim": 8, "num_heads": 8}):
        other = small_model(**kwargs)
        assert not step.can_fuse(other.backbone.layers, other.config, PARTS_OF_BLOCK)
