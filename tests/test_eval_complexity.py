"""The complexity figures: counted parameters, fitted exponents, and what must grow how."""

import pytest

from eval import complexity


def test_lambda_mlp_adds_what_the_paper_says():
    """4 L^2 + L parameters per layer, under 0.007 % of the 317M model; the linear baseline H * L."""
    table = {row["mixer"]: row for row in complexity.added_parameters()}
    levels, layers, heads = 15, 24, 32
    assert table["mlp_softplus"]["lambda_head"] == layers * (4 * levels**2 + levels)
    assert table["linear"]["lambda_head"] == layers * heads * levels
    assert table["mlp_softplus"]["parameters"] == pytest.approx(317e6, rel=0.005)
    assert table["mlp_softplus"]["percent"] < 0.007
    assert table["fixed"]["lambda_head"] == table["fixed"]["lambda_proj"] == 0


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_exponent_of_a_power_is_the_power(power):
    lengths = [64, 128, 256, 512, 1024]
    assert complexity.exponent(lengths, [3 * t**power for t in lengths]) == pytest.approx(power)


def test_cache_grows_by_levels_and_kept_bytes_about_linearly():
    """From 128 to 1024 tokens a Llama's cache grows 8 times, ours by less than 4 levels; kept bytes grow by about T."""
    ours, llama = complexity.measure(["mlp_softplus", "transformer"], [128, 1024], 1, "cpu")
    assert llama["cache_bytes"][1] == 8 * llama["cache_bytes"][0]
    state = 4 * 2 * 8 * 64 * 64  # float32, layers, heads, N, P
    assert 0 <= ours["cache_bytes"][1] - ours["cache_bytes"][0] <= 4 * state
    assert 0.95 < ours["exponents"]["kept_bytes"] < 1.25
