"""Language modelling on token files: the corpus is split without overlap, windows are right, perplexities are the
model's.
"""

import json
import math

import numpy as np
import pytest
import torch

from eval import experiment, language_modeling, records
from eval.stacked import Sizes, Stack, build_model

SIZES = Sizes(vocab_size=300, hidden_size=16, head_dim=8, state_size=8, chunk_size=16, max_position_embeddings=16)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "delta", "say"], 40_000)
    (folder / "text.txt").write_text(" ".join(words))
    (folder / "other.txt").write_text("beta says gamma " * 20)
    language_modeling.prepare(folder / "text.txt", folder / "other.txt", folder / "tokens", 300, 3)
    return folder / "tokens"


def test_prepare_splits_the_text_by_blocks(tokens):
    """Bytes of training and held-out part add up to the text; every third block is held out; tokens stay in range."""
    sizes = json.loads((tokens / "corpus.json").read_text())["splits"]
    text = (tokens.parent / "text.txt").read_text()
    held = [text[i : i + language_modeling.PART] for i in range(0, len(text), language_modeling.PART)][2::3]
    assert sizes["heldout"]["bytes"] == sum(map(len, held))
    assert sizes["heldout"]["bytes"] + sizes["train"]["bytes"] == len(text)
    for split in sizes:
        stored = np.load(tokens / f"{split}.npy")
        assert stored.dtype == np.uint16 and len(stored) == sizes[split]["tokens"] and stored.max() < 300


def test_windows_are_shifted_pieces_of_the_training_text(tokens):
    task = language_modeling.LanguageTask(300, 16, tokens=str(tokens))
    ids, positions, targets = task.batch(8, torch.Generator().manual_seed(0))
    train = "," + ",".join(map(str, np.load(tokens / "train.npy").tolist())) + ","
    for row, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        assert row[1:] == wanted[:-1]
        assert "," + ",".join(map(str, [*row, wanted[-1]])) + "," in train
    assert positions[0].tolist() == list(range(16))


def test_surprise_is_the_models_own_loss(tokens):
    """Mean over windows equals the loss of the causal LM on the same windows."""
    stack = Stack([build_model("transformer", SIZES, seed) for seed in (0, 1)], "cpu")
    text = torch.from_numpy(np.load(tokens / "heldout.npy").astype(np.int64))[:100]
    found = language_modeling.surprise(stack, stack.initial, text, 16, windows=4)
    windows = text[:96].view(6, 16)
    model = stack.model(stack.initial[1])
    logits = model(input_ids=windows).logits.flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(logits, text[1:97])
    torch.testing.assert_close(found[1], wanted, rtol=1e-4, atol=1e-4)


def test_preset_trains_tests_and_resumes(tokens, tmp_path):
    preset = {
        "name": "tiny",
        "sizes": {k: v for k, v in vars(SIZES).items() if v is not None},
        "recipe": {"steps": 2, "batch_size": 2},
        "task": {"length": 16},
        "grid": [{"mixers": ["linear"], "learning_rates": [0.01], "seeds": 2}],
    }
    path = tmp_path / "records.jsonl"
    for _ in range(2):
        language_modeling.run_preset(preset, tokens, path, ["linear"])
    rows = records.read(path)
    assert [row["seed"] for row in rows] == [0, 1] and rows[0]["train_tokens"] == 2 * 2 * 16
    for test in rows[0]["tests"]:
        assert test["perplexity"] == pytest.approx(math.exp(test["loss"]), rel=1e-3)
    assert rows[0]["tests"][0]["bits_per_byte"] > 0


def test_vocabulary_beyond_uint16_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size is 70000"):
        language_modeling.prepare("a", "b", tmp_path, 70_000, 10)


def test_shipped_preset_is_the_papers_six_runs_with_three_seeds():
    preset = experiment.load_preset(records.FOLDER.parents[1] / "configuration" / "lm-gcide.json")
    cells = experiment.expand(preset, language_modeling.LanguageTask)
    assert len(cells) == 3 * 2 * 3
    assert {(c.run.mixer, c.sizes.hidden_size) for c in cells} == {
        (m, w) for m in ("linear", "mlp_softplus", "mlp_softmax") for w in (256, 512)
    }
