"""Every kernel compiles for the GPUs it is tuned for: Triton's interpreter, which runs them in the other tests, takes programs
that its compiler refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
MOST_SHARED_MEMORY = 227 * 1024  # that a program can have on an H100 or H200
KERNELS = {
    "_chunk_decays", "_chunk_states", "_merge", "_output", "_final_levels", "_query_gradient", "_node_gradient",
    "_sum_segments", "_final_levels_gradient", "_split", "_key_gradient", "_merge_tail", "_decode",
    "_rms_norm", "_silu_product", "_gated_norm", "_convolution", "_time_step", "_level_weights",
    "_norm_projections", "_mixer_inputs", "_norm_linear_add", "_linear_add", "_norm_mlp",
}  # fmt: skip


@pytest.mark.parametrize(
    "sizes",
    [("bfloat16", "128", "64"), ("float16", "16", "16"), pytest.param(("float32", "256", "128"), marks=pytest.mark.slow)],
    ids="-".join,
)
def test_kernels_compile_for_hopper(sizes, tmp_path):
    """Usual, least and most memory per program: all kernels compile and fit."""
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, script, *sizes], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    shared_memory = json.loads(result.stdout)
    assert set(shared_memory) == KERNELS
    assert max(shared_memory.values()) <= MOST_SHARED_MEMORY
