"""LogLinearConfig, LogLinearModel and LogLinearForCausalLM: against transformers' Mamba-2, against a forward pass written out
by hand, and against themselves on rows without padding, packing or checkpointing.
"""

import inspect
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch import nn
from transformers import DataCollatorWithFlattening, DynamicCache, LlamaConfig, Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from modeling_loglinear import FenwickCache, LogLinearConfig, LogLinearForCausalLM, LogLinearModel, loglinear_attention

GROUPED_NORM = "group_size" in inspect.signature(MambaRMSNormGated.__init__).parameters  # since transformers 5.24
VOCABULARY = 97
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=1, num_hidden_layers=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip

torch.set_num_threads(1)


def config_of(**fields):
    return LogLinearConfig(**SIZES | {"chunk_size": 16, "max_position_embeddings": 128} | fields)


def model_of(seed=0, **fields):
    """A random model in which every weight matters: lambda, norms and biases are random as well."""
    torch.manual_seed(seed)
    model = LogLinearForCausalLM(config_of(**fields)).eval()
    randomise(model)
    return model


@torch.no_grad()
def randomise(model):
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm_f.weight", ".D", "lambda_head.scale")):
            parameter.uniform_(0.5, 1.5)
        elif name.endswith(("bias", "lambda_head.down")):
            parameter.add_(torch.randn_like(parameter) * 0.3)
        elif name.endswith("A_log"):
            parameter.uniform_(-2.0, 1.0)  # some heads remember for long


def tokens(*shape, seed=0):
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def assert_near(actual, wanted, tolerance=1e-4):
    assert actual.shape == wanted.shape
    assert torch.isfinite(actual).all()
    assert (actual - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# ------------------------------------------------------------------------------------------------------------- Mamba-2


def mamba2_of(**fields):
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(Mamba2Config(**SIZES | {"chunk_size": 256} | fields)).eval()
    randomise(model)
    return model


needs_grouped_norm = pytest.mark.skipif(not GROUPED_NORM, reason="this Mamba-2 norms all groups together")


@pytest.mark.parametrize("lambda_mode", ["fixed", "mlp_softplus"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        pytest.param({"n_groups": 2}, marks=needs_grouped_norm),
        pytest.param({"n_groups": 4, "tie_word_embeddings": True}, marks=needs_grouped_norm),
        {"residual_in_fp32": False},
        {"use_bias": True, "use_conv_bias": False},
        {"hidden_act": "gelu", "conv_kernel": 2, "layer_norm_epsilon": 1e-2},
        {"chunk_size": 32, "expand": 1, "head_dim": 8, "num_hidden_layers": 3},
    ],
    ids=lambda fields: "-".join(map(str, fields)) or "default",
)
def test_converted_mamba2(fields, lambda_mode):
    """A Mamba-2 model, converted, gives the same logits (1e-4) at lengths within and beyond a chunk, and the same text."""
    source = mamba2_of(**fields)
    model = LogLinearForCausalLM.from_mamba2(source, lambda_mode=lambda_mode)
    assert not model.training and model.config.lambda_mode == lambda_mode
    with torch.no_grad():
        for length in (1, 3, 64, 150):
            ids = tokens(2, length)
            assert_near(model(ids).logits, source(ids).logits)
    prompt = tokens(2, 70)
    generate = dict(max_new_tokens=30, do_sample=False, attention_mask=torch.ones_like(prompt))
    assert torch.equal(model.generate(prompt, **generate), source.generate(prompt, **generate))


def test_converted_mamba2_with_time_step_limit():
    """`time_step_limit` clamps the time step as in Mamba-2's full forward (whose decoding ignores it)."""
    source = mamba2_of(time_step_limit=(0.3, 0.6))
    model = LogLinearForCausalLM.from_mamba2(source)
    ids = tokens(2, 100)
    assert_near(model(ids).logits, source(ids).logits)
    free = LogLinearForCausalLM.from_mamba2(mamba2_of())
    assert (free(ids).logits - model(ids).logits).abs().max() > 1e-2


def test_from_mamba2_takes_a_path_and_keeps_the_dtype(tmp_path):
    """A saved Mamba-2 model converts by its path, a bfloat16 model stays one, further fields reach the config."""
    source = mamba2_of().to(torch.bfloat16)
    source.save_pretrained(tmp_path)
    for path in (str(tmp_path), tmp_path):
        model = LogLinearForCausalLM.from_mamba2(path, max_position_embeddings=1024, chunk_size=128)
        assert model.dtype == torch.bfloat16
        assert model.config.num_levels == 11 and model.config.chunk_size == 128 and model.config.model_type == "loglinear"
        assert torch.equal(model.backbone.layers[1].mixer.in_proj.weight, source.backbone.layers[1].mixer.in_proj.weight)
    model.save_pretrained(tmp_path / "converted")
    assert LogLinearForCausalLM.from_pretrained(tmp_path / "converted").config.model_type == "loglinear"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lambda_mode": "linear"}, ["`lambda_mode`", "'linear'", "'mlp_softplus'", "'fixed'"]),
        ({"lambda_mode": "mlp_softmax"}, ["`lambda_mode`", "'mlp_softmax'"]),
        ({"n_groups": 3}, ["`n_groups`", "3", "4"]),
        ({"model": LogLinearForCausalLM(config_of())}, ["`model`", "'loglinear'", "'mamba2'"]),
    ],
)
def test_from_mamba2_errors(arguments, words):
    """What cannot be converted is refused by name."""
    with pytest.raises(ValueError) as error:
        LogLinearForCausalLM.from_mamba2(**{"model": mamba2_of()} | arguments)
    assert all(word in str(error.value) for word in words)


def test_initial_weights_are_those_of_mamba2():
    """Every parameter that Mamba-2 has starts from the same distribution: same constants, or same spread and range."""
    fields = {"hidden_size": 128, "num_heads": 16, "use_bias": True, "rescale_prenorm_residual": True}
    torch.manual_seed(0)
    ours = LogLinearForCausalLM(config_of(**fields)).state_dict()
    torch.manual_seed(1)
    theirs = Mamba2ForCausalLM(Mamba2Config(**SIZES | fields)).state_dict()
    assert set(theirs) == {name for name in ours if ".lambda_" not in name}
    for name, wanted in theirs.items():
        actual = ours[name]
        assert actual.shape == wanted.shape
        if wanted.numel() > 300:
            assert actual.std().item() == pytest.approx(wanted.std().item(), rel=0.08), name
            assert actual.abs().max().item() == pytest.approx(wanted.abs().max().item(), rel=0.25), name
        elif name.endswith("dt_bias"):
            steps = F.softplus(actual)
            assert 0.001 * 0.999 <= steps.min() < 0.01 < steps.max() <= 0.1 * 1.001
        else:
            assert torch.equal(actual, wanted), name


def test_loading_does_not_rescale_the_residual_again(tmp_path):
    """`rescale_prenorm_residual` acts on new weights only."""
    model = LogLinearForCausalLM(config_of(rescale_prenorm_residual=True))
    model.save_pretrained(tmp_path)
    loaded = LogLinearForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values()))


# -------------------------------------------------------------------------------------------------------- lambda modes


def block_by_hand(block, u):
    """A block written from section 1 of the papers, token by token where it may be: u [T, D] -> [T, D], in float64."""
    mixer, config = block.mixer, block.mixer.config
    H, P, G, N, L = config.num_heads, config.head_dim, config.n_groups, config.state_size, config.num_levels

    def norm(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.layer_norm_epsilon) * weight

    x = norm(u, block.norm.weight)
    T = len(x)
    sizes = (H * P, H * P + 2 * G * N, H)
    z, xbc, dt = (x @ mixer.in_proj.weight.T).split(sizes, dim=-1)
    conv = torch.zeros_like(xbc)
    for t, tap in itertools.product(range(T), range(config.conv_kernel)):
        if (past := t + 1 - config.conv_kernel + tap) >= 0:
            conv[t] += xbc[past] * mixer.conv1d.weight[:, 0, tap]
    conv = conv + mixer.conv1d.bias
    conv = conv * torch.sigmoid(conv)
    values, keys, queries = conv[:, : H * P].view(T, H, P), *conv[:, H * P :].view(T, 2, G, N).unbind(1)
    dt = torch.log1p(torch.exp(dt + mixer.dt_bias))
    g = -mixer.A_log.exp() * dt
    d = (x @ mixer.lambda_proj.weight.T).view(T, H, L)
    head = mixer.lambda_head
    if config.lambda_mode == "linear":
        weights = torch.log1p(torch.exp(head.scale * d))
    else:
        d = d @ head.up @ head.down + head.bias
        weights = torch.log1p(d.exp()) if config.lambda_mode == "mlp_softplus" else d.exp() / d.exp().sum(-1, keepdim=True)
    y = values * mixer.D[:, None]  # not weighted by lambda
    for i, j, h in itertools.product(range(T), range(T), range(H)):
        if j <= i:
            level = min((i ^ j).bit_length(), L - 1)
            score = queries[i, h // (H // G)] @ keys[j, h // (H // G)] * g[j + 1 : i + 1, h].sum().exp()
            y[i, h] += weights[i, h, level] * score * dt[j, h] * values[j, h]
    gated = y.reshape(T, H * P) * z * torch.sigmoid(z)
    normed = norm(gated.view(T, G, -1), mixer.norm.weight.view(G, -1)).flatten(1)
    u = u + normed @ mixer.out_proj.weight.T
    if config.mlp_intermediate_size is None:
        return u
    x = norm(u, block.mlp_norm.weight)
    gate = x @ block.mlp.gate_proj.weight.T
    return u + (gate * torch.sigmoid(gate) * (x @ block.mlp.up_proj.weight.T)) @ block.mlp.down_proj.weight.T


@pytest.mark.parametrize(
    ("lambda_mode", "fields"),
    [
        ("mlp_softplus", {"n_groups": 2}),
        ("mlp_softplus", {"mlp_intermediate_size": 48}),
        ("mlp_softmax", {"max_position_embeddings": 6}),
        ("linear", {"n_groups": 4, "mlp_intermediate_size": 24}),
    ],
)
@torch.no_grad()
def test_block_by_hand(lambda_mode, fields):
    """A block equals its equations, written out here without the operator, for every lambda mode (1e-10, float64)."""
    model = model_of(lambda_mode=lambda_mode, **fields).double()
    hidden = torch.randn(1, 21, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    block = model.backbone.layers[0]
    assert_near(block(hidden)[0], block_by_hand(block, hidden[0]), 1e-10)


def test_initial_lambda_is_softplus_of_the_bias():
    """In `mlp_softplus` lambda = softplus(0.54) for any input, head, level and layer; 1 / L in `mlp_softmax`; 1 if fixed."""
    x = torch.randn(2, 5, 32)
    for mode, wanted in (("mlp_softplus", math.log1p(math.exp(0.54))), ("mlp_softmax", 1 / 8), ("fixed", 1.0)):
        model = LogLinearModel(config_of(lambda_mode=mode))
        for layer in model.layers:
            weights = layer.mixer.level_weights(x)
            assert weights.shape == (2, 5, 4, 8) and weights.dtype == torch.float32
            torch.testing.assert_close(weights, torch.full_like(weights, wanted))
    assert 0.99 < math.log1p(math.exp(0.54)) < 1.01
    bias = LogLinearModel(config_of(lambda_bias_init=-1.0)).layers[0].mixer.lambda_head.bias
    assert torch.equal(bias, torch.full_like(bias, -1.0))


@pytest.mark.parametrize("lambda_mode", ["mlp_softplus", "mlp_softmax", "linear"])
def test_every_lambda_parameter_learns(lambda_mode):
    """After one step of an optimizer (W2 = 0 hides W1 and lambda_proj before it) all of them get a gradient."""
    model = LogLinearForCausalLM(config_of(lambda_mode=lambda_mode, max_position_embeddings=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = tokens(2, 64)
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    names = [name for name, _ in model.named_parameters() if ".lambda_" in name]
    assert len(names) == 2 * (2 if lambda_mode == "linear" else 4)
    found = gradients(model)
    for name in names:
        assert torch.isfinite(found[name]).all() and found[name].abs().max() > 0, name
        if not name.endswith("up"):  # every level is used
            assert (found[name].flatten(0, -2) if found[name].dim() > 1 else found[name]).ne(0).any(0).all(), name


def test_fixed_mode_has_no_lambda_parameters():
    assert not [name for name in LogLinearForCausalLM(config_of(lambda_mode="fixed")).state_dict() if "lambda" in name]


def test_lambda_mlp_is_a_small_share():
    """On the 317M model of the paper (24 layers of 1024, 8 groups, 15 levels, untied vocabulary of 50280), the MLP adds
    4 L^2 + L parameters per layer: below 0.007 %.
    """
    with torch.device("meta"):
        model = LogLinearForCausalLM(
            LogLinearConfig(hidden_size=1024, num_heads=32, num_hidden_layers=24, n_groups=8, vocab_size=50280)
        )
    total = model.num_parameters()
    mlp = sum(p.numel() for name, p in model.named_parameters() if ".lambda_head." in name)
    assert model.config.num_levels == 15 and mlp == 24 * (4 * 15**2 + 15)
    assert 316e6 < total < 318e6 and mlp / total < 0.00007


@pytest.mark.parametrize("lambda_mode", ["mlp_softplus", "linear"])
def test_lambda_is_computed_in_float32(lambda_mode):
    """Also in a bfloat16 model and under autocast, only the input of the lambda head is rounded."""
    model = model_of(lambda_mode=lambda_mode).to(torch.bfloat16)
    head = model.backbone.layers[0].mixer.lambda_head
    levels = torch.randn(1, 3, 4, 8).bfloat16()
    wanted = {name: p.float() for name, p in head.named_parameters()}
    exact = torch.func.functional_call(head, wanted, (levels.float(),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(levels), exact)


# -------------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lambda_mode": "mlp"}, ["`lambda_mode`", "'mlp'", "'mlp_softplus'", "'mlp_softmax'", "'linear'", "'fixed'"]),
        ({"backend": "cuda"}, ["`backend`", "'cuda'", "'auto'", "'torch'", "'triton'", "'reference'"]),
        ({"hidden_act": "sillu"}, ["`hidden_act`", "'sillu'", "silu", "gelu"]),
        ({"num_heads": 5}, ["`num_heads`", "5 * 16 = 80", "32 * 2 = 64"]),
        ({"n_groups": 3}, ["`n_groups`", "3", "`num_heads` = 4"]),
        ({"n_groups": 0}, ["`n_groups`", "0", "at least 1"]),
        ({"hidden_size": 0}, ["`hidden_size`", "0", "at least 1"]),
        ({"num_hidden_layers": -1}, ["`num_hidden_layers`", "-1", "at least 1"]),
        ({"chunk_size": 0}, ["`chunk_size`", "0", "at least 1"]),
        ({"max_position_embeddings": 0}, ["`max_position_embeddings`", "0", "at least 1"]),
        ({"mlp_intermediate_size": 0}, ["`mlp_intermediate_size`", "0", "at least 1"]),
        ({"conv_kernel": 18}, ["`conv_kernel`", "18", "at most 17"]),
        ({"layer_norm_epsilon": 0.0}, ["`layer_norm_epsilon`", "0.0", "positive"]),
        ({"time_step_min": 0.0}, ["`time_step_min`", "0.0", "positive"]),
        ({"time_step_min": 0.5}, ["`time_step_min`", "0.5", "`time_step_max` = 0.1"]),
        ({"time_step_limit": (0.5, 0.1)}, ["`time_step_limit`", "(0.5, 0.1)", "first <= second"]),
        ({"time_step_limit": (0.1,)}, ["`time_step_limit`", "(0.1,)", "two numbers"]),
        ({"lambda_bias_init": float("nan")}, ["`lambda_bias_init`", "nan", "finite"]),
        ({"initializer_range": -1.0}, ["`initializer_range`", "-1.0"]),
        ({"hidden_size": "32"}, ["hidden_size", "int", "str"]),
        ({"use_bias": "yes"}, ["use_bias", "bool", "str"]),
        ({"mlp_intermediate_size": 1.5}, ["mlp_intermediate_size", "int", "float"]),
    ],
)
def test_config_errors(fields, words):
    """A wrong field is a ValueError with the field, its value and what is allowed."""
    with pytest.raises(ValueError) as error:
        config_of(**fields)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_config_refuses_wrong_assignments():
    """A type is also checked when a field of a finished config is set."""
    config = config_of()
    with pytest.raises(ValueError, match="num_heads"):
        config.num_heads = "many"


def test_config_round_trip(tmp_path):
    """Saved and loaded, all fields keep their values, also infinite limits and fields the class does not know."""
    config = config_of(lambda_mode="linear", mlp_intermediate_size=40, time_step_limit=(0.01, math.inf), my_own_field=[1, 2])
    config.save_pretrained(tmp_path)
    loaded = LogLinearConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert loaded.time_step_limit == (0.01, math.inf) and loaded.my_own_field == [1, 2]
    assert loaded.layer_types == ["loglinear_attention"] * 2


def test_mamba2_config_converts_by_its_type(tmp_path):
    """Every field of Mamba2Config has the same name, default and meaning; chunk size 256 becomes 64."""
    theirs = Mamba2Config()
    ours = LogLinearConfig(**{k: v for k, v in theirs.to_dict().items() if k != "model_type"})
    different = {k for k, v in theirs.to_dict().items() if ours.to_dict().get(k) != v}
    assert different == {"model_type", "chunk_size"}
    default = LogLinearConfig().to_dict()
    assert {k for k, v in theirs.to_dict().items() if default.get(k) != v} == {"model_type", "chunk_size"}
    assert ours.chunk_size == 64 and theirs.chunk_size == 256
    Mamba2Config(**SIZES).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text().replace('"mamba2"', '"loglinear"')
    (tmp_path / "config.json").write_text(text)
    LogLinearForCausalLM(LogLinearConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(("given", "used"), [(16, 16), (32, 32), (64, 64), (128, 128), (1, 64), (100, 64), (256, 64)])
def test_chunk_sizes(given, used):
    assert config_of(chunk_size=given).chunk_size == used


@pytest.mark.parametrize(("longest", "levels"), [(1, 1), (2, 2), (3, 3), (4, 3), (128, 8), (129, 9), (16384, 15)])
def test_num_levels(longest, levels):
    """L = levels 0 ... bit_length(longest - 1): the distance of the first and the last of `longest` tokens."""
    config = config_of(max_position_embeddings=longest)
    assert config.num_levels == levels == max(0 ^ i for i in range(longest)).bit_length() + 1
    assert "num_levels" not in config.to_dict()


@torch.no_grad()
def test_result_does_not_depend_on_chunk_size_or_backend():
    """The same weights give the same logits for every chunk size and both CPU backends, within and beyond
    `max_position_embeddings`.
    """
    ids = tokens(1, 300)
    models = [model_of(chunk_size=c, backend=b) for c in (16, 32, 64, 128) for b in ("torch", "reference")]
    wanted = models[1](ids).logits
    for model in models:
        assert_near(model(ids).logits, wanted, 1e-5)


@torch.no_grad()
def test_input_beyond_max_position_embeddings():
    """Text longer than `max_position_embeddings` shares the top level's weight: the same as a model with more levels in
    which all levels from there on carry that weight.
    """
    model = model_of(lambda_mode="linear", max_position_embeddings=16)  # 5 levels
    wide = model_of(lambda_mode="linear", max_position_embeddings=512)  # 10 levels
    shared = torch.arange(10).clamp(max=4)
    weights = model.state_dict()
    for name in weights:
        if name.endswith("lambda_proj.weight"):
            weights[name] = weights[name].unflatten(0, (4, 5))[:, shared].flatten(0, 1)
        elif name.endswith("lambda_head.scale"):
            weights[name] = weights[name][:, shared]
    wide.load_state_dict(weights)
    ids = tokens(2, 400)
    assert_near(model(ids).logits, wide(ids).logits, 1e-5)


# ------------------------------------------------------------------------------------------------------------- padding


def masks():
    """[rows, 90] masks of every kind."""
    generator = torch.Generator().manual_seed(0)
    column = torch.arange(90)
    return {
        "left": column[None] >= torch.tensor([[0], [13], [50], [89]]),
        "right": column[None] < torch.tensor([[90], [70], [17], [1]]),
        "scattered": torch.rand(4, 90, generator=generator) < torch.tensor([[1.0], [0.9], [0.5], [0.1]]),
        "different": torch.stack([column >= 20, column < 33, (column > 10) & (column < 60), column % 2 == 0]),
        "whole row": torch.stack([column >= 0, column < 0, column > 40, column < 0]),
    }


def cache_of(output):
    assert output.cache is output.past_key_values
    return output.cache


def assert_same_cache(cache, row, alone):
    """Row `row` of one cache holds what the only row of the other does."""
    assert cache.lengths[row] == alone.lengths[0]
    for layer, other in zip(cache.layers, alone.layers):
        for name, a, b in zip(layer.state._fields, layer.state, other.state):
            assert_near(a[row].double(), b[0].double(), 1e-5), name
        assert_near(layer.conv_window(3)[row], other.conv_window(3)[0], 1e-5)


@pytest.mark.parametrize("kind", masks())
@torch.no_grad()
def test_padding_changes_nothing(kind):
    """Logits at every real token, the cache and the next tokens' logits are those of the row alone without padding; a padded
    position repeats the real token before it; a row without tokens gives zero hidden states.
    """
    model = model_of(n_groups=2)
    mask = masks()[kind]
    ids = torch.where(mask, tokens(4, 90), 0)
    next_ids = tokens(4, 20, seed=1)
    output = model(ids, attention_mask=mask.long(), use_cache=True)
    cache = cache_of(output)
    hidden = model.backbone(ids, attention_mask=mask.long()).last_hidden_state
    alone = []
    for row in range(4):
        real = mask[row].nonzero()[:, 0]
        if not len(real):
            assert not hidden[row].any() and cache.lengths[row] == 0
            alone.append(None)
            continue
        alone.append(model(ids[row : row + 1, real], use_cache=True))
        assert_near(output.logits[row, real], alone[row].logits[0], 1e-5)
        assert_same_cache(cache, row, cache_of(alone[row]))
        before = (mask[row].cumsum(0) - 1).clamp(min=0)
        padded = ~mask[row] & (mask[row].cumsum(0) > 0)
        assert torch.equal(output.logits[row, padded], output.logits[row, real[before[padded]]])
    continued = model(next_ids, cache=cache).logits
    for row, single in enumerate(alone):
        start = None if single is None else cache_of(single)
        assert_near(continued[row], model(next_ids[row : row + 1], cache=start).logits[0], 2e-5)


@torch.no_grad()
def test_padding_in_later_calls():
    """Masks of one call or of the whole text, in any later call, also one column wide: a row without new tokens keeps its
    cache and repeats its last output.
    """
    model = model_of()
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(3, 60, generator=generator) < 0.6
    ids = tokens(3, 60)
    outputs, cache, start = [], None, 0
    for width in (20, 1, 1, 1, 17, 1, 19):
        stop = start + width
        seen = mask[:, :stop] if start % 2 else mask[:, start:stop]  # [B, past + T] or [B, T]
        output = model(ids[:, start:stop], attention_mask=seen.long(), cache=cache, use_cache=True)
        outputs.append(output.logits)
        cache, start = cache_of(output), stop
    assert start == 60 and cache.get_seq_length() == 60 and cache.lengths.tolist() == mask.sum(1).tolist()
    logits = torch.cat(outputs, 1)
    whole = model(ids, attention_mask=mask.long()).logits
    assert_near(logits[mask], whole[mask], 1e-5)
    for row in range(3):  # padding repeats the token before
        for column in range(1, 60):
            if not mask[row, column] and mask[row, :column].any():
                assert_near(logits[row, column], logits[row, column - 1], 1e-5)


def test_padding_gets_no_gradient():
    """The loss on real tokens sends nothing to the embeddings of padded positions and the same as without padding to all
    weights.
    """
    model = model_of()
    mask = masks()["different"]
    ids = tokens(4, 90)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    hidden = model.backbone(inputs_embeds=embeds, attention_mask=mask.long(), use_cache=False).last_hidden_state
    hidden[mask].square().sum().backward()
    assert not embeds.grad[~mask].any() and embeds.grad[mask].abs().sum(-1).gt(0).all()
    padded = gradients(model)
    model.zero_grad()
    for row in range(4):
        alone = embeds.detach()[row, mask[row]][None]
        model.backbone(inputs_embeds=alone, use_cache=False).last_hidden_state.square().sum().backward()
    for name, grad in gradients(model).items():
        assert_near(padded[name], grad, 1e-4)


@torch.no_grad()
def test_garbage_embeddings_under_padding():
    """NaN at padded positions of `inputs_embeds` reaches neither real tokens nor the cache."""
    model = model_of()
    mask = masks()["different"]
    embeds = model.get_input_embeddings()(tokens(4, 90))
    wanted = model(inputs_embeds=embeds, attention_mask=mask.long(), use_cache=True)
    dirty = model(inputs_embeds=embeds.masked_fill(~mask[..., None], torch.nan), attention_mask=mask.long(), use_cache=True)
    assert torch.equal(dirty.logits, wanted.logits)
    for a, b in zip(cache_of(dirty).layers, cache_of(wanted).layers):
        assert all(torch.equal(x, y) for x, y in zip(a.state, b.state))


# ------------------------------------------------------------------------------------------------------------- packing


PIECES = (5, 1, 40, 33, 64)


def packed_forms(lengths):
    borders = torch.tensor([0, *itertools.accumulate(lengths)])
    return {
        "cu_seq_lens_q": borders.int(),
        "seq_idx": torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None].int(),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
    }


@pytest.mark.parametrize("form", packed_forms(PIECES))
@torch.no_grad()
def test_packed_rows_are_separate_rows(form):
    """Sequences packed into one row, whichever way their borders are given, equal each sequence alone; nothing is cached."""
    model = model_of(n_groups=2)
    pieces = [tokens(1, n, seed=n) for n in PIECES]
    output = model(torch.cat(pieces, 1), **{form: packed_forms(PIECES)[form]})
    assert output.cache is None and output.past_key_values is None
    for piece, logits in zip(pieces, output.logits.split(PIECES, 1)):
        assert_near(logits, model(piece).logits, 1e-5)


@torch.no_grad()
def test_packed_rows_in_a_batch():
    """`seq_idx` also separates within the rows of a batch, and the first row's last sequence from the second row."""
    model = model_of()
    ids = tokens(2, 50)
    seq_idx = torch.stack([torch.arange(50) // 20, torch.arange(50) // 35])
    output = model(ids, seq_idx=seq_idx, output_hidden_states=True)
    assert output.logits.shape == (2, 50, VOCABULARY) and output.hidden_states[1].shape == (2, 50, 32)
    for row, cuts in enumerate(([0, 20, 40, 50], [0, 35, 50])):
        for start, stop in itertools.pairwise(cuts):
            assert_near(output.logits[row, start:stop], model(ids[row : row + 1, start:stop]).logits[0], 1e-5)


@torch.no_grad()
def test_ordinary_position_ids_do_not_pack():
    """Rising position ids, from 0 or another start, and those of several rows, change nothing."""
    model = model_of()
    ids = tokens(1, 30)
    wanted = model(ids).logits
    for start in (0, 7):
        assert torch.equal(model(ids, position_ids=torch.arange(start, start + 30)[None]).logits, wanted)
    assert_near(model(ids.expand(2, -1), position_ids=torch.arange(30).expand(2, -1)).logits[:1], wanted, 1e-5)


@pytest.mark.parametrize("arguments", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}])
def test_collator_with_flattening(arguments):
    """A batch of DataCollatorWithFlattening gives the mean loss over all predicted tokens of the separate rows."""
    model = model_of().train()
    rows = [tokens(n, seed=n) for n in PIECES]
    batch = DataCollatorWithFlattening(return_tensors="pt", **arguments)([{"input_ids": row.tolist()} for row in rows])
    loss = model(**batch).loss
    total = sum(model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows if len(row) > 1)
    torch.testing.assert_close(loss, total / sum(len(row) - 1 for row in rows), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 10, 20])}, ["`cu_seq_lens_q`", "2 rows"]),
        ({"seq_idx": torch.zeros(2, 19)}, ["`seq_idx`", "[2, 19]", "[2, 20]"]),
        (
            {"seq_idx": torch.arange(40).view(2, 20) // 7, "attention_mask": torch.arange(20).expand(2, 20) > 3},
            ["`attention_mask`", "packed", "pass none"],
        ),
        ({"seq_idx": torch.arange(40).view(2, 20) // 7, "cache": FenwickCache(config_of())}, ["cache"]),
    ],
)
def test_packing_errors(arguments, words):
    """Packed borders that do not fit, and packing together with padding or a cache, are refused by name."""
    with pytest.raises(ValueError) as error:
        model_of()(tokens(2, 20), **arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


# ------------------------------------------------------------------------------------------------------------- forward


@pytest.mark.parametrize("fields", [{}, {"mlp_intermediate_size": 48, "residual_in_fp32": False}])
def test_gradient_checkpointing_changes_no_gradient(fields):
    """Loss and all gradients are the same bit for bit, also on padded rows; a cache is not kept meanwhile."""
    model = model_of(**fields).train()
    ids, mask = tokens(3, 50), torch.arange(50) < torch.tensor([[50], [20], [33]])
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        output = model(ids, attention_mask=mask.long(), labels=ids.where(mask, -100), use_cache=checkpointing)
        output.loss.backward()
        results.append((output.loss.item(), gradients(model)))
    assert output.cache is None and model.is_gradient_checkpointing
    assert results[0][0] == results[1][0]
    assert set(results[0][1]) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(grad, results[1][1][name]) for name, grad in results[0][1].items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", [{}, {"residual_in_fp32": False, "mlp_intermediate_size": 48}])
def test_half_precision_model(dtype, fields):
    """A model of 16 bits trains and decodes, with finite logits near those of float32, in its own dtype."""
    exact = model_of(**fields)
    model = model_of(**fields).to(dtype)
    ids = tokens(2, 80)
    output = model(ids, labels=ids)
    output.loss.backward()
    assert output.logits.dtype == dtype and torch.isfinite(output.loss)
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == dtype for p in model.parameters())
    assert_near(output.logits.float(), exact(ids).logits, 0.06)
    with torch.no_grad():
        cache = cache_of(model(ids[:, :70], use_cache=True))
        for t in range(70, 80):
            step = model(ids[:, t : t + 1], cache=cache).logits
            assert_near(step[:, 0].float(), output.logits[:, t].float(), 0.06)


def test_autocast_training():
    """Under autocast a float32 model gives a finite loss near that without, and float32 gradients."""
    model = model_of(mlp_intermediate_size=48).train()
    ids = tokens(2, 60)
    wanted = model(ids, labels=ids).loss.item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(wanted, rel=0.02)
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in model.parameters())


@torch.no_grad()
def test_hidden_states():
    """One entry per block and a final one, all [B, T, D], the first the embeddings, the last the output; on padded rows as
    on rows alone.
    """
    model = model_of(num_hidden_layers=3)
    ids = tokens(2, 40)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :15] = 0
    output = model.backbone(ids, attention_mask=mask, output_hidden_states=True)
    assert len(output.hidden_states) == 4
    assert all(x.shape == (2, 40, 32) for x in output.hidden_states)
    assert torch.equal(output.hidden_states[0][0], model.get_input_embeddings()(ids)[0])
    assert torch.equal(output.hidden_states[-1][mask > 0], output.last_hidden_state[mask > 0])
    alone = model.backbone(ids[1:, 15:], output_hidden_states=True)
    for padded, wanted in zip(output.hidden_states, alone.hidden_states):
        assert_near(padded[1, 15:], wanted[0], 1e-5)
    assert model.backbone(ids).hidden_states is None


@torch.no_grad()
def test_logits_to_keep():
    """A number keeps the last positions, 0 all, a tensor the ones it names."""
    model = model_of()
    ids = tokens(2, 20)
    logits = model(ids).logits
    assert_near(model(ids, logits_to_keep=1).logits, logits[:, -1:], 1e-6)
    assert_near(model(ids, logits_to_keep=7).logits, logits[:, -7:], 1e-6)
    assert_near(model(ids, logits_to_keep=torch.tensor([0, 19, 3])).logits, logits[:, [0, 19, 3]], 1e-6)
    assert model(ids, logits_to_keep=0).logits.shape == (2, 20, VOCABULARY)


def test_return_dict_false():
    """Tuples hold the values of the named output in its order."""
    model = model_of()
    ids = tokens(2, 20)
    named = model(ids, labels=ids, use_cache=False, output_hidden_states=True)
    loss, logits, hidden_states = model(ids, labels=ids, use_cache=False, output_hidden_states=True, return_dict=False)
    assert torch.equal(loss, named.loss) and torch.equal(logits, named.logits) and len(hidden_states) == 3
    hidden, cache = model.backbone(ids, use_cache=True, return_dict=False)
    assert hidden.shape == (2, 20, 32) and cache.lengths.tolist() == [20, 20]


def test_loss():
    """The loss is the mean cross entropy of the next token over labels that are not -100, in float32; num_items_in_batch
    replaces the count.
    """
    model = model_of()
    ids = tokens(2, 30)
    labels = ids.clone()
    labels[0, :10] = -100
    output = model(ids, labels=labels)
    log_probabilities = output.logits[:, :-1].log_softmax(-1)
    picked = [log_probabilities[b, t, labels[b, t + 1]] for b in range(2) for t in range(29) if labels[b, t + 1] >= 0]
    wanted = -torch.stack(picked).mean()
    torch.testing.assert_close(output.loss, wanted)
    summed = model(ids, labels=labels, num_items_in_batch=torch.tensor(100)).loss
    torch.testing.assert_close(summed, wanted * len(picked) / 100)


@torch.no_grad()
def test_inputs_embeds_equal_ids():
    model = model_of()
    ids = tokens(2, 20)
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)


def test_training_mode_returns_no_cache_by_default():
    """A cache comes by default in evaluation, on request in training, and not if `use_cache` says so."""
    model = model_of()
    ids = tokens(1, 5)
    assert model(ids).cache is not None and model(ids, use_cache=False).cache is None
    assert model.train()(ids).cache is None and model(ids, use_cache=True).cache is not None


def test_a_given_cache_is_always_read():
    """`use_cache=False` does not make the model forget a cache that it was given."""
    model = model_of()
    ids = tokens(1, 40)
    wanted = model(ids).logits[:, 30:]
    cache = cache_of(model(ids[:, :30]))
    assert_near(model(ids[:, 30:], cache=cache, use_cache=False).logits.detach(), wanted.detach(), 1e-5)


def test_gradient_flows_through_a_cache():
    """A text trained in two calls, the second with the cache of the first, has the gradients of one call."""
    model = model_of(seed=3)
    ids = tokens(2, 70)
    results = []
    for pieces in ([70], [45, 25], [45, 1, 24]):
        model.zero_grad()
        cache, outputs = None, []
        for piece in ids.split(pieces, 1):
            output = model(piece, cache=cache, use_cache=True)
            outputs.append(output.logits)
            cache = cache_of(output)
        torch.cat(outputs, 1).square().mean().backward()
        results.append(gradients(model))
    for split in results[1:]:
        for name, grad in results[0].items():
            assert_near(split[name], grad, 1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_ids": torch.tensor([[1, VOCABULARY]])}, ["`input_ids`", str(VOCABULARY), f"0 to {VOCABULARY - 1}"]),
        ({"input_ids": torch.tensor([[-1, 3]])}, ["`input_ids`", "-1", f"0 to {VOCABULARY - 1}"]),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, ["[2, 0]", "at least one"]),
        ({"input_ids": torch.zeros(0, 2, dtype=torch.long)}, ["[0, 2]", "at least one"]),
        ({"input_ids": torch.tensor([1, 2])}, ["`input_ids`", "[B, T]", "[2]"]),
        ({"input_ids": tokens(1, 3), "inputs_embeds": torch.zeros(1, 3, 32)}, ["`input_ids`", "`inputs_embeds`"]),
        ({}, ["`input_ids`", "`inputs_embeds`"]),
        ({"inputs_embeds": torch.zeros(1, 3, 31)}, ["`inputs_embeds`", "[1, 3, 31]", "32"]),
        ({"inputs_embeds": torch.zeros(3, 32)}, ["`inputs_embeds`", "[3, 32]", "32"]),
        ({"input_ids": tokens(2, 5), "attention_mask": torch.ones(2, 4)}, ["`attention_mask`", "2, 5", "[2, 4]"]),
        ({"input_ids": tokens(2, 5), "attention_mask": torch.ones(1, 5)}, ["`attention_mask`", "2, 5", "[1, 5]"]),
        ({"input_ids": tokens(2, 5), "attention_mask": torch.ones(2, 1, 5, 5)}, ["`attention_mask`", "[2, 1, 5, 5]"]),
        ({"input_ids": tokens(2, 5), "attention_mask": torch.ones(2, 7)}, ["`attention_mask`", "2, 5", "[2, 7]"]),
        ({"input_ids": tokens(1, 5), "cache": ((torch.zeros(1),),)}, ["`cache`", "tuple", "FenwickCache"]),
        (
            {
                "input_ids": tokens(1, 5),
                "past_key_values": DynamicCache(config=LlamaConfig(num_hidden_layers=2, hidden_size=64)),
            },
            ["`cache`", "DynamicCache", "FenwickCache"],
        ),
        ({"input_ids": tokens(1, 5), "cache": FenwickCache(config_of(num_hidden_layers=3))}, ["`cache`", "3", "2"]),
        (
            {"input_ids": tokens(1, 5), "cache": FenwickCache(config_of()), "past_key_values": FenwickCache(config_of())},
            ["`cache`", "`past_key_values`"],
        ),
    ],
)
def test_forward_errors(arguments, words):
    """A wrong input is a ValueError that names it, what it is and what it may be."""
    with pytest.raises(ValueError) as error:
        model_of()(**arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_cache_of_another_batch_or_model_is_refused():
    model = model_of()
    cache = cache_of(model(tokens(2, 5), use_cache=True))
    with pytest.raises(ValueError, match="`cache`.*`batch_size` is 2 in the cache and 3 here"):
        model(tokens(3, 5), cache=cache)
    with pytest.raises(ValueError, match="`cache`.*`state_size` is 8 in the cache and 4 here"):
        model_of(state_size=4)(tokens(2, 5), cache=cache)


def test_empty_prompt_of_generate_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        model_of(bos_token_id=None).generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=2)


# ------------------------------------------------------------------------------------------------------ whole model


@pytest.mark.parametrize("tie", [False, True])
def test_resize_and_tie(tie, tmp_path):
    """Embeddings and head grow together, stay tied if they were, keep the old rows and survive saving."""
    model = model_of(tie_word_embeddings=tie)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tie
    ids = tokens(1, 10)
    with torch.no_grad():
        old = model(ids).logits
    model.resize_token_embeddings(VOCABULARY + 9)
    assert model.config.vocab_size == VOCABULARY + 9 and model.get_output_embeddings().weight.shape[0] == VOCABULARY + 9
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tie
    assert_near(model(ids).logits[..., :VOCABULARY], old, 1e-6)
    model(torch.full((1, 3), VOCABULARY + 8), labels=torch.full((1, 3), VOCABULARY + 8)).loss.backward()
    model.save_pretrained(tmp_path)
    loaded = LogLinearForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tie
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_load_in_bfloat16(tmp_path):
    """`dtype=torch.bfloat16` rounds the saved weights once and gives a model that runs."""
    model = model_of()
    model.save_pretrained(tmp_path)
    loaded = LogLinearForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for (name, actual), wanted in zip(loaded.named_parameters(), model.parameters()):
        assert torch.equal(actual, wanted.bfloat16()), name
    assert loaded(tokens(1, 20)).logits.dtype == torch.bfloat16
    assert loaded.config.dtype == torch.bfloat16


@torch.no_grad()
def test_load_with_device_map(tmp_path):
    """`device_map` works for one device and names no block that may be cut."""
    model = model_of()
    model.save_pretrained(tmp_path)
    ids = tokens(2, 30)
    for device_map in ({"": "cpu"}, "cpu"):
        loaded = LogLinearForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert set(model._no_split_modules) == {"LogLinearBlock"}


class OnAnotherDevice(nn.Module):
    """A block on the meta device, which gets its arguments as accelerate's hooks move them; what it returns is lost, so it
    returns zeros of that shape on the CPU.
    """

    def __init__(self, block):
        super().__init__()
        self.block = block.to("meta")

    def forward(self, *args, **kwargs):
        args, kwargs = send_to_device(args, "meta"), send_to_device(kwargs, "meta")
        return torch.zeros(self.block(*args, **kwargs).shape)


@torch.no_grad()
def test_layers_on_another_device():
    """Blocks may live on another device than the first, whose counters they share: prefill, ragged rows, packed rows,
    decoding, decoding with resting rows, reordering and taking back never mix devices, and the cache of a block stays
    where the block is.
    """
    model = model_of(num_hidden_layers=3)
    for index in (1, 2):
        model.backbone.layers[index] = OnAnotherDevice(model.backbone.layers[index])
    ids, mask = tokens(2, 50), torch.arange(50) < torch.tensor([[50], [20]])
    model(ids[:1], cu_seq_lens_q=torch.tensor([0, 20, 50]))
    cache = cache_of(model(ids, attention_mask=mask.long()))
    cache.activate_past_recording()
    for step_mask in (None, torch.tensor([[1], [0]]), None):
        cache = cache_of(model(ids[:, :1], attention_mask=step_mask, cache=cache))
    cache.crop(-1)
    cache = cache_of(model(ids, attention_mask=mask.long(), cache=cache))
    cache.crop(-40)
    cache.reorder_cache(torch.tensor([1, 0]))
    model(ids[:, :20], cache=cache)
    for index, device in enumerate(("cpu", "meta", "meta")):
        assert {x.device.type for x in cache.layers[index].state} == {device}
    assert cache.lengths.device.type == "cpu"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path):
    """A model split over two GPUs by `device_map` generates what it generates on one."""
    model = model_of(num_hidden_layers=4)
    model.save_pretrained(tmp_path)
    split = {"backbone.embeddings": 0, "backbone.norm_f": 1, "lm_head": 1, **{f"backbone.layers.{i}": i // 2 for i in range(4)}}
    ids, mask = tokens(3, 40), torch.arange(40) >= torch.tensor([[0], [10], [39]])
    texts = []
    for device_map in ({"": 0}, split):
        loaded = LogLinearForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        arguments = {"attention_mask": mask.long().cuda(), "do_sample": False, "max_new_tokens": 40}
        texts.append(loaded.generate(ids.cuda(), **arguments).cpu())
    assert torch.equal(*texts)


def test_state_dict_names():
    """Weights carry Mamba-2's names; what is new is named as the documentation says."""
    names = set(LogLinearForCausalLM(config_of(num_hidden_layers=1, mlp_intermediate_size=8, use_bias=True)).state_dict())
    layer, mixer = "backbone.layers.0.", "backbone.layers.0.mixer."
    assert names == {
        "backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight", layer + "norm.weight",
        layer + "mlp_norm.weight", *(f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        *(mixer + name for name in (
            "A_log", "D", "dt_bias", "in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias", "norm.weight",
            "conv1d.weight", "conv1d.bias", "lambda_proj.weight", "lambda_head.up", "lambda_head.down", "lambda_head.bias",
        )),
    }  # fmt: skip


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ragged", [False, True])
def test_training_compiles_without_graph_breaks(ragged, compiler):
    """torch.compile(fullgraph=True) of the training forward gives the eager loss and gradients: as a traced graph, and
    (slow) as generated code.
    """
    model = model_of().train()
    ids = tokens(2, 50)
    mask = (torch.arange(50) < torch.tensor([[50], [20]])).long() if ragged else None
    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend=compiler)):
        model.zero_grad()
        loss = run(ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    torch.testing.assert_close(results[0][0], results[1][0])
    for name, grad in results[0][1].items():
        assert_near(results[1][1][name], grad, 1e-4)


def test_operator_and_model_agree_on_the_public_function():
    """The function of the package is the one the mixer calls: switching the backend by config reaches it."""
    with pytest.raises(ValueError, match="`backend` is 'triton'"):
        model_of(backend="triton").double()(tokens(1, 20))
    assert loglinear_attention.__module__ == "modeling_loglinear.attention_loglinear"


def test_a_mask_that_is_added_elsewhere_is_refused():
    """0 and -inf, as the library adds them to scores, would be read the wrong way round."""
    model = LogLinearForCausalLM(config_of()).eval()
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="must hold 0 and 1 only"):
        model(ids, attention_mask=torch.tensor([[-torch.inf, 0.0, 0.0]]))
    assert torch.equal(model(ids, attention_mask=torch.ones(1, 3)).logits, model(ids).logits)
