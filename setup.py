from pathlib import Path

from setuptools import find_namespace_packages, setup

# The interpreter of Triton 3.9, in which the kernels are tested without a GPU, refuses masks that are scalars.
TEST = ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "ruff>=0.17", 'triton>=3.4,<3.9; platform_system == "Linux"']
PLOTS = ["matplotlib>=3.8"]

setup(
    name="modeling-loglinear",
    version="0.1.0",
    description="Log-linear attention with adaptive memory decay, as a Hugging Face Transformers model",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_namespace_packages(include=["modeling_loglinear", "eval", "eval.benchmarks"]),
    install_requires=[
        "torch>=2.7",
        "transformers>=5.17,<6",
        "accelerate>=1.1",
        "datasets>=4.0",
        "tokenizers>=0.22",
        "evaluate>=0.4.6",
        "safetensors>=0.4.3",
    ],
    extras_require={"test": TEST + PLOTS, "plots": PLOTS},
)
