"""Configuration of the LogLinear model."""

import math
from functools import wraps

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

CHUNK_SIZES = (16, 32, 64, 128)
BACKENDS = ("auto", "reference", "torch", "triton")
LAMBDA_MODES = ("mlp_softplus", "mlp_softmax", "linear", "fixed")


def _raise_value_errors(cls):
    """The library's own field errors are no `ValueError`; users catch `ValueError`."""

    def as_value_error(method):
        @wraps(method)
        def wrapped(self, *args, **kwargs):
            try:
                return method(self, *args, **kwargs)
            except StrictDataclassError as error:
                raise ValueError(f"{type(self).__name__}: {error}") from error

        return wrapped

    cls.__setattr__ = as_value_error(cls.__setattr__)
    cls.validate = as_value_error(cls.validate)
    cls.validate.__is_defined_by_strict_decorator__ = True  # so that a subclass may be @strict again
    return cls


@_raise_value_errors
@strict
class LogLinearConfig(PreTrainedConfig):
    r"""
    Configuration of a [`LogLinearModel`]: a Mamba-2 block whose state is a Fenwick tree of states (log-linear attention,
    arXiv 2506.04761), read with a learned weight lambda per level (arXiv 2605.06946).

    Every field of `Mamba2Config` exists under the same name and with the same meaning and default, so the configuration of
    a Mamba-2 model converts by its type alone.

    Args:
        num_heads (`int`, defaults to 128): Value heads. `num_heads * head_dim` must be `hidden_size * expand`.
        head_dim (`int`, defaults to 64): Channels of a value head.
        vocab_size (`int`, defaults to 32768): Words of the vocabulary.
        hidden_size (`int`, defaults to 4096): Channels of the residual stream.
        state_size (`int`, defaults to 128): Channels of a key or query.
        num_hidden_layers (`int`, defaults to 64): Blocks.
        layer_norm_epsilon (`float`, defaults to 1e-5): Added to the mean square in every norm.
        pad_token_id (`int`, *optional*, defaults to 1), bos_token_id (`int`, *optional*, defaults to 0),
        eos_token_id (`int` or `list[int]`, *optional*, defaults to 2): Special tokens.
        expand (`int`, defaults to 2): Value channels per residual channel.
        conv_kernel (`int`, defaults to 4): Taps of the causal convolution, at most 17.
        n_groups (`int`, defaults to 8): Groups of heads that share queries and keys; divides `num_heads`.
        use_bias (`bool`, defaults to `False`): Whether `in_proj` and `out_proj` have a bias.
        use_conv_bias (`bool`, defaults to `True`): Whether the convolution has a bias.
        hidden_act (`str`, defaults to `"silu"`): Activation behind the convolution and in the MLP.
        initializer_range (`float`, defaults to 0.1): Standard deviation of the initial weights.
        residual_in_fp32 (`bool`, defaults to `True`): Whether the residual stream is float32.
        time_step_rank (`int` or `"auto"`): Kept for Mamba-2 configurations; has no effect, as there.
        time_step_min (`float`, defaults to 0.001), time_step_max (`float`, defaults to 0.1),
        time_step_floor (`float`, defaults to 1e-4): Range of the initial time steps.
        time_step_limit (`tuple[float, float]`, defaults to `(0.0, inf)`): Time steps are clamped to this range.
        rescale_prenorm_residual (`bool`, defaults to `False`): Whether `out_proj` starts smaller by
            `sqrt(num_hidden_layers)`.
        use_cache (`bool`, defaults to `True`): Whether a forward pass returns a cache.
        chunk_size (`int`, defaults to 64): Tokens that are attended directly before the tree begins: 16, 32, 64 or 128.
            Any other positive value (256 in Mamba-2 configurations) becomes 64: the result does not depend on it.
        tie_word_embeddings (`bool`, defaults to `False`): Whether `lm_head` shares the embeddings.
        mlp_intermediate_size (`int`, *optional*): `None`: the block is Mamba-2's. A number: a gated MLP of this size, with
            its own norm, follows every mixer.
        lambda_mode (`str`, defaults to `"mlp_softplus"`): How the weight of a level comes from the input:
            `"mlp_softplus"` (the method of arXiv 2605.06946), `"mlp_softmax"` (its ablation), `"linear"` (arXiv 2506.04761),
            or `"fixed"` (all 1: Mamba-2).
        lambda_bias_init (`float`, defaults to 0.54): Initial bias of the MLP modes; softplus(0.54) is about 1.
        max_position_embeddings (`int`, defaults to 16384): Longest text of the training; sets the number of levels. Longer
            text works too: it shares the weight of the top level. A level beyond the training length would keep an
            untrained weight, so set the field to the training length.
        backend (`str`, defaults to `"auto"`): Implementation of the operator: `"auto"`, `"torch"`, `"triton"`, `"reference"`.

    Raises:
        ValueError: for a field of the wrong type or out of range and for sizes that do not fit together.

    Example:

    ```python
    >>> from modeling_loglinear import LogLinearConfig, LogLinearForCausalLM

    >>> config = LogLinearConfig(hidden_size=256, num_heads=8, head_dim=64, n_groups=1, num_hidden_layers=4)
    >>> model = LogLinearForCausalLM(config)
    ```"""

    model_type = "loglinear"
    keys_to_ignore_at_inference = ["past_key_values", "cache", "cache_params"]

    num_heads: int = 128
    head_dim: int = 64
    vocab_size: int = 32768
    hidden_size: int = 4096
    state_size: int = 128
    num_hidden_layers: int = 64
    layer_norm_epsilon: float = 1e-5
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    expand: int = 2
    conv_kernel: int = 4
    n_groups: int = 8
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    initializer_range: float = 0.1
    residual_in_fp32: bool = True
    time_step_rank: str | int = "auto"
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    time_step_limit: list[float] | tuple[float, ...] = (0.0, float("inf"))
    rescale_prenorm_residual: bool = False
    use_cache: bool = True
    chunk_size: int = 64
    tie_word_embeddings: bool = False
    mlp_intermediate_size: int | None = None
    lambda_mode: str = "mlp_softplus"
    lambda_bias_init: float = 0.54
    max_position_embeddings: int = 16384
    backend: str = "auto"

    def __post_init__(self, **kwargs):
        self._check_values()
        if self.time_step_rank == "auto":
            self.time_step_rank = math.ceil(self.hidden_size / 16)
        if self.chunk_size not in CHUNK_SIZES:
            self.chunk_size = 64
        self.time_step_limit = tuple(float(limit) for limit in self.time_step_limit)
        super().__post_init__(**kwargs)

    def _check_values(self):
        for name in (
            "num_heads", "head_dim", "vocab_size", "hidden_size", "state_size", "num_hidden_layers", "expand", "conv_kernel",
            "n_groups", "chunk_size", "max_position_embeddings", "mlp_intermediate_size",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}, but must be at least 1.")
        for name in ("layer_norm_epsilon", "time_step_min", "time_step_max", "time_step_floor"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"`{name}` is {value}, but must be positive and finite.")
        for name, value, allowed in (
            ("lambda_mode", self.lambda_mode, LAMBDA_MODES),
            ("backend", self.backend, BACKENDS),
        ):
            if value not in allowed:
                raise ValueError(f"`{name}` is {value!r}, but must be one of {', '.join(map(repr, allowed))}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` is {self.hidden_act!r}, but must be one of {', '.join(sorted(ACT2FN))}.")
        if self.hidden_size * self.expand != self.num_heads * self.head_dim:
            raise ValueError(
                f"`num_heads` * `head_dim` is {self.num_heads} * {self.head_dim} = {self.num_heads * self.head_dim}, but must "
                f"be `hidden_size` * `expand` = {self.hidden_size} * {self.expand} = {self.hidden_size * self.expand}."
            )
        if self.num_heads % self.n_groups:
            raise ValueError(f"`n_groups` is {self.n_groups}, but must divide `num_heads` = {self.num_heads}.")
        if self.conv_kernel > CHUNK_SIZES[0] + 1:
            raise ValueError(f"`conv_kernel` is {self.conv_kernel}, but must be at most {CHUNK_SIZES[0] + 1}.")
        limits = self.time_step_limit
        if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
            raise ValueError(f"`time_step_limit` is {limits}, but must be two numbers with 0 <= first <= second.")
        if self.time_step_min > self.time_step_max:
            raise ValueError(
                f"`time_step_min` is {self.time_step_min}, but must be at most `time_step_max` = {self.time_step_max}."
            )
        if not 0 <= self.initializer_range < math.inf:
            raise ValueError(f"`initializer_range` is {self.initializer_range}, but must be >= 0 and finite.")
        if not math.isfinite(self.lambda_bias_init):
            raise ValueError(f"`lambda_bias_init` is {self.lambda_bias_init}, but must be finite.")

    def validate_layer_type(self):
        """`layer_types` is no setting but follows from the depth; the library does not know its name."""

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache layer of every block."""
        return ["loglinear_attention"] * self.num_hidden_layers

    @property
    def num_levels(self) -> int:
        """L: levels 0 ... L - 1 that positions below `max_position_embeddings` can be apart."""
        return (self.max_position_embeddings - 1).bit_length() + 1

    @property
    def intermediate_size(self) -> int:
        """Value channels, `num_heads * head_dim`."""
        return self.hidden_size * self.expand

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.intermediate_size + 2 * self.n_groups * self.state_size


__all__ = ["LogLinearConfig"]
