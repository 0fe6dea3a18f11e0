"""Checkpoints as they go to the Hub: their files, the Auto classes with and without the package, two copies in one process."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache, dynamic_module_utils
from transformers.dynamic_module_utils import check_imports, get_class_from_dynamic_module, get_imports

import modeling_loglinear
from modeling_loglinear import FenwickCache, LogLinearConfig, LogLinearForCausalLM, LogLinearModel

PACKAGE = Path(modeling_loglinear.__file__).parent
CODE = {path.name for path in PACKAGE.glob("*_loglinear.py")}
ALLOWED = {"torch", "transformers", "huggingface_hub", "safetensors"}
AUTO_MAP = {
    "AutoConfig": "configuration_loglinear.LogLinearConfig",
    "AutoModel": "modeling_loglinear.LogLinearModel",
    "AutoModelForCausalLM": "modeling_loglinear.LogLinearForCausalLM",
}

# Of the model below, as transformers 5.17 and 5.24 write them: the weights' SHA-256, and config.json but for the version.
WEIGHTS = "8be723f91ee91212c68c6c2ca5a8920841a8b822b78a1cec85307eeb1452c34f"
CONFIG = dict(
    architectures=["LogLinearForCausalLM"], auto_map=AUTO_MAP, model_type="loglinear", dtype="float32",
    vocab_size=97, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=2, expand=2,
    conv_kernel=4, chunk_size=16, max_position_embeddings=64, mlp_intermediate_size=None, hidden_act="silu",
    use_bias=False, use_conv_bias=True, use_cache=True, tie_word_embeddings=False, residual_in_fp32=True,
    rescale_prenorm_residual=False, initializer_range=0.1, layer_norm_epsilon=1e-05, backend="auto",
    lambda_mode="mlp_softplus", lambda_bias_init=0.54, time_step_rank=2, time_step_min=0.001, time_step_max=0.1,
    time_step_floor=0.0001, time_step_limit=[0.0, {"__float__": "Infinity"}],
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip

torch.set_num_threads(1)


def small_model(seed=0):
    config = LogLinearConfig(
        vocab_size=97, hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=2, num_hidden_layers=2, chunk_size=16,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LogLinearForCausalLM(config).eval()
    for layer in model.backbone.layers:
        torch.nn.init.normal_(layer.mixer.lambda_head.down)
    return model


PROMPT = torch.arange(2, 82).view(2, 40)


@torch.no_grad()
def answers(model, prompt=PROMPT):
    """(logits, greedy text) of a prompt."""
    text = model.generate(prompt, max_new_tokens=30, do_sample=False, attention_mask=torch.ones_like(prompt))
    return model(prompt).logits, text


def assert_same_answers(model, wanted):
    for actual, expected in zip(answers(model), wanted):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.fixture
def saved(tmp_path):
    """(model, folder with its checkpoint)."""
    model = small_model()
    model.save_pretrained(tmp_path / "checkpoint")
    return model, tmp_path / "checkpoint"


# ------------------------------------------------------------------------------------------------------ what is saved


def test_files(saved):
    """A checkpoint is config, generation config, safetensors and all of the package's code, nothing else, and no file
    names a place on this machine.
    """
    _, folder = saved
    assert {path.name for path in folder.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"} | CODE
    for name in CODE:
        assert (folder / name).read_bytes() == (PACKAGE / name).read_bytes()
    for path in folder.glob("*.json"):
        assert str(folder.parent) not in path.read_text() and str(PACKAGE) not in path.read_text()


def test_config_names_its_code(saved):
    """config.json leads every Auto class to its class in the files beside it, also from the backbone's checkpoint."""
    model, folder = saved
    model.backbone.save_pretrained(folder.parent / "backbone")
    for checkpoint, architecture in ((folder, "LogLinearForCausalLM"), (folder.parent / "backbone", "LogLinearModel")):
        config = json.loads((checkpoint / "config.json").read_text())
        assert config["auto_map"] == AUTO_MAP
        assert config["model_type"] == "loglinear" and config["architectures"] == [architecture]
        assert {path.name for path in checkpoint.glob("*.py")} == CODE


def test_code_needs_no_optional_package(monkeypatch):
    """transformers' import scanner accepts every file where Triton is missing, and asks for nothing beyond what
    transformers itself installs; all files are reached from the modelling file.
    """
    monkeypatch.setitem(sys.modules, "triton", None)
    reached = dynamic_module_utils.get_relative_import_files(PACKAGE / "modeling_loglinear.py")
    assert {Path(path).name for path in reached} | {"modeling_loglinear.py"} == CODE
    for name in CODE:
        check_imports(PACKAGE / name)
        assert set(get_imports(PACKAGE / name)) - set(sys.stdlib_module_names) <= ALLOWED, name


def test_content_is_the_same_under_every_version(tmp_path):
    """Names, types, shapes and bytes of the saved weights, and the fields of the config, are fixed: what one version of
    transformers or torch writes, all others read.
    """
    model = small_model()
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
            parameter.copy_((torch.arange(parameter.numel()) % 251 + number).view_as(parameter) / 64)
    model.save_pretrained(tmp_path)
    digest = hashlib.sha256()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + tensor.numpy().tobytes())
    assert digest.hexdigest() == WEIGHTS
    config = json.loads((tmp_path / "config.json").read_text())
    del config["transformers_version"]
    assert config == CONFIG


# --------------------------------------------------------------------------------------------------- with the package


def test_auto_classes(saved):
    """The Auto classes give this package's classes, with the same answers."""
    model, folder = saved
    assert type(AutoConfig.from_pretrained(folder)) is LogLinearConfig
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is LogLinearForCausalLM and not loaded.training
    assert_same_answers(loaded, answers(model))
    backbone = AutoModel.from_pretrained(folder)
    assert type(backbone) is LogLinearModel
    hidden = backbone(PROMPT).last_hidden_state
    torch.testing.assert_close(hidden, model.backbone(PROMPT).last_hidden_state, rtol=0, atol=1e-6)
    assert type(AutoModelForCausalLM.from_config(model.config)) is LogLinearForCausalLM


def test_backbone_and_head_are_saved_apart(saved):
    """A backbone's checkpoint loads into a language model, whose head is then new, and back."""
    model, folder = saved
    model.backbone.save_pretrained(folder.parent / "backbone")
    loaded, report = LogLinearForCausalLM.from_pretrained(folder.parent / "backbone", output_loading_info=True)
    assert set(report["missing_keys"]) == {"lm_head.weight"} and not report["unexpected_keys"]
    for name, tensor in model.backbone.state_dict().items():
        assert torch.equal(loaded.backbone.state_dict()[name], tensor)


def test_loading_reports_nothing_missing(saved):
    _, folder = saved
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]


def test_shards(saved):
    """A checkpoint in many files loads to the same model."""
    model, folder = saved
    sharded = folder.parent / "sharded"
    model.save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("model-*-of-*.safetensors"))) > 2
    assert (sharded / "model.safetensors.index.json").exists() and not list(sharded.glob("*.bin"))
    assert_same_answers(AutoModelForCausalLM.from_pretrained(sharded), answers(model))


def test_generation_config_is_saved(saved):
    """What `generate()` should do by default travels with the model."""
    model, folder = saved
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(folder)
    assert AutoModelForCausalLM.from_pretrained(folder).generate(PROMPT).shape == (2, 45)


# ------------------------------------------------------------------------------------------------ without the package


REMOTE = """
import json, sys
for missing in {missing!r}:
    sys.modules[missing] = None
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
torch.set_num_threads(1)
for Auto in (AutoConfig, AutoModel, AutoModelForCausalLM):
    loaded = Auto.from_pretrained({folder!r}, trust_remote_code=True)
    assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
model = loaded.eval()
prompt = torch.arange(2, 82).view(2, 40)
with torch.no_grad():
    text = model.generate(prompt, max_new_tokens=30, do_sample=False, attention_mask=torch.ones_like(prompt))
    torch.save((model(prompt).logits, text), {answers!r})
model.save_pretrained({again!r})
assert "modeling_loglinear" not in sys.modules or sys.modules["modeling_loglinear"] is None
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "triton" and sys.modules[name])))
"""


def run_elsewhere(folder, tmp_path, missing, again):
    """Loads the checkpoint in a process that can import neither the package nor anything in `missing`."""
    script = REMOTE.format(folder=str(folder), answers=str(tmp_path / "answers.pt"), again=str(again), missing=missing)
    places = {"HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=tmp_path, env=os.environ | places, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return torch.load(tmp_path / "answers.pt"), json.loads(done.stdout.splitlines()[-1])


def test_remote_code_without_package_and_triton(saved, tmp_path):
    """Where neither the package nor Triton can be imported, the checkpoint loads through every Auto class with the code it
    carries, answers the same, and saved from there it is complete again, byte for byte, so that it can go on travelling.
    """
    model, folder = saved
    wanted = answers(model)
    again, third = tmp_path / "again", tmp_path / "third"
    found, triton = run_elsewhere(folder, tmp_path, ["modeling_loglinear", "triton"], again)
    assert triton == []
    for actual, expected in zip(found, wanted):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in again.iterdir()} == names
    for name in names - {"config.json"}:
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name
    first, second = (json.loads((path / "config.json").read_text()) for path in (folder, again))
    assert first == second
    found, _ = run_elsewhere(again, tmp_path, ["modeling_loglinear"], third)
    assert torch.equal(found[1], wanted[1]) and {path.name for path in third.iterdir()} == names


@pytest.fixture
def remote_class(saved, tmp_path, monkeypatch):
    """(model, class): the package's model and the model class of the code in its checkpoint, in this process."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    model, folder = saved
    remote = get_class_from_dynamic_module("modeling_loglinear.LogLinearForCausalLM", str(folder))
    yield model, remote
    for name in [name for name in sys.modules if name.startswith("transformers_modules.checkpoint")]:
        del sys.modules[name]


@torch.no_grad()
def test_two_copies_in_one_process(saved, remote_class):
    """The package and the code of a checkpoint work side by side, also with caches that the other one made: given ones, and
    those of `DynamicCache(config)` and `StaticCache(config)`, which belong to whichever copy was imported last.
    """
    _, folder = saved
    model, remote = remote_class
    assert remote is not LogLinearForCausalLM and remote.__module__.startswith("transformers_modules.")
    other = remote.from_pretrained(folder).eval()
    assert not isinstance(other, LogLinearForCausalLM) and type(other.config) is not LogLinearConfig
    wanted = answers(model)
    assert_same_answers(other, wanted)
    assert_same_answers(model, wanted)
    for writer, reader in ((model, other), (other, model)):
        for make in (
            lambda m: None,
            lambda m: DynamicCache(config=m.config),
            lambda m: StaticCache(config=m.config, max_cache_len=100),
            lambda m: FenwickCache(m.config),
        ):
            cache = writer(PROMPT[:, :25], past_key_values=make(writer), use_cache=True).past_key_values
            logits = reader(PROMPT[:, 25:39], past_key_values=cache).logits
            torch.testing.assert_close(logits, wanted[0][:, 25:39], rtol=1e-4, atol=1e-4)
            last = reader(PROMPT[:, 39:], past_key_values=cache).logits
            torch.testing.assert_close(last, wanted[0][:, 39:], rtol=1e-4, atol=1e-4)
            text = reader.generate(wanted[1][:, :50], past_key_values=cache, max_new_tokens=20, do_sample=False)
            assert torch.equal(text, wanted[1])


def test_saving_the_remote_copy_writes_its_code(remote_class, saved, tmp_path):
    """A model of the checkpoint's own code, saved in the process that also has the package, carries all files."""
    _, folder = saved
    _, remote = remote_class
    remote.register_for_auto_class("AutoModelForCausalLM")
    remote.config_class.register_for_auto_class()
    remote.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == {path.name for path in folder.iterdir()}
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"] == AUTO_MAP
