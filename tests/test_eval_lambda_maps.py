"""The numbers of the lambda maps: known values for known weights; and the maps of a real model."""

import pytest
import torch

from eval import lambda_maps
from eval.stacked import Sizes, build_model

SIZES = Sizes(vocab_size=32, hidden_size=16, head_dim=8, state_size=8, chunk_size=16, max_position_embeddings=32)


def test_usable_levels_are_those_of_the_set_bits():
    """Position 5 = 101b reads levels 0, 1 and 3; with 3 levels, everything from level 2 on shares the last one."""
    assert lambda_maps.usable(8, 5)[5].tolist() == [True, True, False, True, False]
    assert lambda_maps.usable(8, 3)[4].tolist() == [True, False, True]
    assert lambda_maps.usable(8, 4)[0].tolist() == [True, False, False, False]


def test_uniform_weights_have_entropy_one_and_no_variance():
    entropy, variance = lambda_maps.numbers(torch.full((2, 32, 3, 6), 0.7))
    torch.testing.assert_close(entropy, torch.ones(2, 3))
    torch.testing.assert_close(variance, torch.zeros(2, 3))


def test_one_level_has_entropy_zero_and_variance_is_relative():
    """All weight on level 0 gives entropy 0; weights that alternate between 0.5 and 1.5 of their mean have variance
    0.25.
    """
    single = torch.full((1, 32, 1, 6), 1e-9)
    single[..., 0] = 1.0
    assert lambda_maps.numbers(single)[0].item() == pytest.approx(0, abs=1e-4)
    weights = torch.ones(1, 64, 1, 1)
    weights[:, ::2] = 3.0
    assert lambda_maps.numbers(weights * 5)[1].item() == pytest.approx(0.25)


def test_new_softplus_model_is_uniform_and_linear_one_depends_on_content():
    """Facts of the initialisation: softplus(0.54) everywhere; softplus(d) varies with the token."""
    ids, tokens = lambda_maps.recall_example(32, 4, 32)
    flat = lambda_maps.analyse(build_model("mlp_softplus", SIZES), ids, tokens)
    varied = lambda_maps.analyse(build_model("linear", SIZES), ids, tokens)
    assert flat["mean_entropy"] == pytest.approx(1, abs=1e-4) and flat["mean_variance"] == pytest.approx(0, abs=1e-6)
    assert varied["mean_variance"] > 1e-4
    assert len(flat["weights"]) == 2 and len(flat["weights"][0]) == 32 and len(flat["weights"][0][0]) == 4
    assert tokens.count("key") == tokens.count("value") == tokens.count("question") == 4


def test_models_without_level_weights_are_refused():
    with pytest.raises(ValueError, match="no level weights"):
        lambda_maps.level_weights(build_model("fixed", SIZES), torch.zeros(1, 4, dtype=torch.long))


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    ids, tokens = lambda_maps.recall_example(32, 4, 32)
    result = lambda_maps.analyse(build_model("linear", SIZES), ids, tokens)
    assert lambda_maps.plot(result, tmp_path / "map.png").stat().st_size > 1000
