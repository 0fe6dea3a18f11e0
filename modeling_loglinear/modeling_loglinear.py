"""The LogLinear model: mixer, block, backbone and causal language model, from the equations up.

The block is that of Mamba-2 (arXiv 2405.21060): `[z, x, B, C, dt] = in_proj(u)`, a causal convolution, attention, a gated norm
and `out_proj`. Its attention is log-linear (arXiv 2506.04761): the state is a Fenwick tree of states, each read with a weight
lambda that the input decides (arXiv 2605.06946).
"""

import copy
import inspect
import math
import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .attention_loglinear import (
    SpanPositions,
    StepPositions,
    full_precision,
    in_dtype,
    loglinear_attention,
    loglinear_attention_span,
    loglinear_attention_step,
)
from .cache_loglinear import FenwickCache
from .configuration_loglinear import LogLinearConfig
from .graph_loglinear import RUNNING, DecodeGraph, can_record

try:
    from .fused_loglinear import convolution as fused_convolution
    from .fused_loglinear import gated_norm as fused_gated_norm
    from .fused_loglinear import level_weights as fused_level_weights
    from .fused_loglinear import rms_norm as fused_rms_norm
    from .fused_loglinear import silu_product as fused_silu_product
    from .fused_loglinear import time_step as fused_time_step
    from .step_loglinear import can_fuse, step_through
except ImportError:  # Triton is not installed
    fused_convolution = None


logger = logging.get_logger(__name__)

# transformers calls the cache `past_key_values` up to 5.17 and `cache` in 5.24.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"


AUTO_MAP = {
    "AutoConfig": "configuration_loglinear.LogLinearConfig",
    "AutoModel": "modeling_loglinear.LogLinearModel",
    "AutoModelForCausalLM": "modeling_loglinear.LogLinearForCausalLM",
}


@dataclass
class LogLinearModelOutput(BaseModelOutputWithPast):
    """`last_hidden_state`, the cache (as `cache` and as `past_key_values`) and `hidden_states`."""

    if CACHE_NAME != "cache":

        @property
        def cache(self):
            return self.past_key_values


@dataclass
class LogLinearCausalLMOutput(CausalLMOutputWithPast):
    """`loss`, `logits`, the cache (as `cache` and as `past_key_values`) and `hidden_states`."""

    if CACHE_NAME != "cache":

        @property
        def cache(self):
            return self.past_key_values


class TokenLayout(NamedTuple):
    """Where the real tokens of a batch stand; the same for all layers, so worked out once."""

    lengths: torch.Tensor | None = None  # [B] real tokens per row, at its front; None: all
    cu_seqlens: torch.Tensor | None = None  # [num_seqs + 1] borders of the sequences packed into one row
    positions: torch.Tensor | None = None  # [T] position of each packed token in its sequence
    step: StepPositions | None = None  # with a cache: one token per row, to be decoded in place
    span: SpanPositions | None = None  # with a cache: any other number of tokens


def use_fused(x):
    """Whether the fused kernels serve here: on a GPU, where no autograd, compiler or `torch.func` needs to see the parts."""
    return (
        fused_convolution is not None
        and x.is_cuda
        and x.dtype != torch.float64
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def at_least_float32(x):
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def rms_norm(x, eps):
    """x / sqrt(mean(x^2) + eps) over the last dimension."""
    if x.is_cuda and not torch._C._are_functorch_transforms_active():
        return F.rms_norm(x, x.shape[-1:], eps=eps)  # one kernel there, several everywhere else
    return x * (x.square().sum(-1, keepdim=True) * (1 / x.shape[-1]) + eps).rsqrt()


class LogLinearRMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        if use_fused(hidden_states):
            return fused_rms_norm(hidden_states, self.weight, self.variance_epsilon)
        normed = rms_norm(at_least_float32(hidden_states), self.variance_epsilon)
        return self.weight * in_dtype(normed, self.weight.dtype)


class LogLinearGatedRMSNorm(nn.Module):
    """`rms_norm((y + D * x) * silu(z))` over each group's channels, in float32."""

    def __init__(self, hidden_size, num_groups, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.num_groups = num_groups
        self.variance_epsilon = eps

    def forward(self, hidden_states, values, skip, gate):
        """y and x [B, T, H, P], D [H], z [B, T, H * P] -> [B, T, H * P]."""
        if use_fused(hidden_states):
            y, x = hidden_states.flatten(-2), values.flatten(-2)
            return fused_gated_norm(y, x, gate, skip, self.weight, self.num_groups, self.variance_epsilon)
        hidden_states = torch.addcmul(hidden_states, in_dtype(skip, hidden_states.dtype).unsqueeze(1), values).flatten(-2)
        gated = at_least_float32(hidden_states) * F.silu(at_least_float32(gate))
        grouped = gated.unflatten(-1, (self.num_groups, -1))  # [B, T, G, H * P / G]
        normed = rms_norm(grouped, self.variance_epsilon).flatten(-2)
        return self.weight * in_dtype(normed, self.weight.dtype)


class LogLinearLambdaHead(nn.Module):
    """Level weights lambda_t >= 0 from d_t = lambda_proj(x_t), one vector of L per head (arXiv 2605.06946, section 3).

    mlp_softplus: softplus(d W1 W2 + b), W1 [L, 2L] and W2 [2L, L] shared by the heads, W2 = 0 and b = 0.54 at initialisation
    mlp_softmax:  the same with a softmax over the levels
    linear:       softplus(L_h * d) with a learned scale per head and level (arXiv 2506.04761)
    """

    def __init__(self, config: LogLinearConfig):
        super().__init__()
        self.mode = config.lambda_mode
        levels = config.num_levels
        if self.mode == "linear":
            self.scale = nn.Parameter(torch.ones(config.num_heads, levels))
        else:
            self.up = nn.Parameter(torch.empty(levels, 2 * levels))  # W1
            self.down = nn.Parameter(torch.empty(2 * levels, levels))  # W2
            self.bias = nn.Parameter(torch.empty(levels))

    def forward(self, levels):
        """[B, T, H, L] -> [B, T, H, L] in float32 (float64 stays)."""
        if self.mode != "linear" and use_fused(levels):
            return fused_level_weights(levels, self.up, self.down, self.bias, softmax=self.mode == "mlp_softmax")
        levels = at_least_float32(levels)
        dtype = levels.dtype
        with full_precision(levels.device):
            if self.mode == "linear":
                return F.softplus(in_dtype(self.scale, dtype) * levels)
            # No activation between W1 and W2, so their product serves all tokens.
            both = in_dtype(self.up, dtype) @ in_dtype(self.down, dtype)
            levels = torch.addmm(in_dtype(self.bias, dtype), levels.flatten(0, 2), both).view(levels.shape)
        return levels.softmax(-1) if self.mode == "mlp_softmax" else F.softplus(levels)


class LogLinearMixer(nn.Module):
    """Sequence mixing: projections, causal convolution, log-linear attention, gated norm."""

    def __init__(self, config: LogLinearConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.lambda_mode, self.hidden_act = config.lambda_mode, config.hidden_act
        self.time_step_limit = config.time_step_limit
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.num_groups, self.state_size = config.n_groups, config.state_size
        self.num_levels, self.chunk_size = config.num_levels, config.chunk_size
        self.conv_kernel = config.conv_kernel
        self.act = ACT2FN[config.hidden_act]

        self.split_sizes = [config.intermediate_size, config.conv_dim, config.num_heads]  # z, (x, B, C), dt
        self.qkv_sizes = [config.intermediate_size, *[config.n_groups * config.state_size] * 2]  # x, B, C
        self.in_proj = nn.Linear(config.hidden_size, sum(self.split_sizes), bias=config.use_bias)
        self.conv1d = nn.Conv1d(
            config.conv_dim,
            config.conv_dim,
            config.conv_kernel,
            groups=config.conv_dim,
            padding=config.conv_kernel - 1,
            bias=config.use_conv_bias,
        )
        if config.lambda_mode != "fixed":
            self.lambda_proj = nn.Linear(config.hidden_size, config.num_heads * self.num_levels, bias=False)
            self.lambda_head = LogLinearLambdaHead(config)
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads))
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.D = nn.Parameter(torch.empty(config.num_heads))
        self.norm = LogLinearGatedRMSNorm(config.intermediate_size, config.n_groups, config.layer_norm_epsilon)
        self.out_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.use_bias)

    @force_accelerate_hooks("conv1d")
    def forward(self, hidden_states, cache_layer=None, layout: TokenLayout = TokenLayout()):
        """hidden_states [B, T, D] -> [B, T, D]; writes its tokens to `cache_layer` if there is one."""
        gate, conv_inputs, dt = torch.split_with_sizes(self.in_proj(hidden_states), self.split_sizes, -1)
        level_weights = self.level_weights(hidden_states)  # [B, T, H, L]
        if cache_layer is not None:
            self.begin(cache_layer, conv_inputs)
        query, key, values = self.convolved(conv_inputs, cache_layer, layout)
        log_decay, value = self.time_step(dt, values)
        if cache_layer is None:
            output, _ = loglinear_attention(
                query, key, value, log_decay, level_weights,
                chunk_size=self.chunk_size, lengths=layout.lengths, cu_seqlens=layout.cu_seqlens, backend=self.config.backend,
            )  # fmt: skip
        else:
            output = self._cached_attention(query, key, value, log_decay, level_weights, conv_inputs, cache_layer, layout)
        return self.out_proj(self.norm(output, values, self.D, gate))

    def begin(self, cache_layer, conv_inputs):
        """Tells the cache which sizes, dtype and device are about to come; conv_inputs [B, T, conv_dim]."""
        sizes = (self.num_groups, self.num_heads, self.state_size, self.head_dim, self.num_levels, self.chunk_size)
        cache_layer.lazy_initialization(len(conv_inputs), *sizes, conv_inputs)

    def level_weights(self, hidden_states):
        """lambda of every token, head and level: [B, T, D] -> [B, T, H, L]."""
        if self.lambda_mode == "fixed":
            return hidden_states.new_ones(1).expand(*hidden_states.shape[:2], self.num_heads, self.num_levels)
        return self.lambda_head(self.lambda_proj(hidden_states).unflatten(-1, (self.num_heads, self.num_levels)))

    def time_step(self, dt, values):
        """g = -exp(A_log) * s and v = s * x with s = clamp(softplus(dt + dt_bias)): [B, T, H] and [B, T, H, P]."""
        limits = self.time_step_limit
        if use_fused(values):
            return fused_time_step(dt, self.dt_bias, self.A_log, values, limits)
        dtype = torch.promote_types(values.dtype, torch.float32)
        dt = F.softplus(in_dtype(dt, dtype) + in_dtype(self.dt_bias, dtype))
        if limits != (0.0, math.inf):
            dt = dt.clamp(*limits)
        log_decay = -in_dtype(self.A_log, dtype).exp() * dt
        return log_decay, in_dtype(values * dt.unsqueeze(-1), values.dtype)

    def convolved(self, conv_inputs, cache_layer, layout):
        """Causal convolution and activation: [B, T, conv_dim] -> query, key [B, T, G, N], values [B, T, H, P]."""
        if self.hidden_act == "silu" and layout.positions is None and use_fused(conv_inputs):
            mixed = self._fused_convolution(conv_inputs, cache_layer, layout)
        else:
            mixed = self.act(self._convolution(conv_inputs, cache_layer, layout))
        values, key, query = torch.split_with_sizes(mixed, self.qkv_sizes, -1)
        B, T = mixed.shape[:2]
        groups = (B, T, self.num_groups, self.state_size)
        return query.view(groups), key.view(groups), values.view(B, T, self.num_heads, self.head_dim)

    def _fused_convolution(self, conv_inputs, cache_layer, layout):
        past = {}
        if cache_layer is not None and cache_layer.started:
            past = {"ring": cache_layer.conv_ring, "lengths": cache_layer.state.lengths}
        if layout.step is not None:
            past |= {"active": layout.step.active, "step": True}
        return fused_convolution(conv_inputs, self.conv1d.weight, self.conv1d.bias, **past)

    def _convolution(self, conv_inputs, cache_layer, layout):
        T, K = conv_inputs.shape[1], self.conv_kernel
        weight, bias = self.conv1d.weight, self.conv1d.bias  # [conv_dim, 1, K], [conv_dim]
        if layout.step is not None:
            layout.step.write(cache_layer.conv_ring, conv_inputs.squeeze(1))
            mixed = (layout.step.window(cache_layer.conv_ring, K) * weight[:, 0].T.contiguous()).sum(1, keepdim=True)
            return mixed if bias is None else mixed + bias
        if layout.positions is not None or torch._C._are_functorch_transforms_active():
            padded = F.pad(conv_inputs, (0, 0, K - 1, 0))
            taps = []
            for back in range(K):  # one by one: many convolutions at once are slow
                tap = padded[:, K - 1 - back :][:, :T] * weight[:, 0, K - 1 - back]
                if layout.positions is not None:  # packed: a tap must not reach into the sequence before
                    tap = torch.where((layout.positions >= back)[:, None], tap, 0)
                taps.append(tap)
            return sum(taps) if bias is None else sum(taps) + bias
        padding = K - 1
        if cache_layer is not None and cache_layer.started:
            conv_inputs, padding = torch.cat([cache_layer.conv_window(K - 1), conv_inputs], 1), 0
        return F.conv1d(conv_inputs.mT, weight, bias, padding=padding, groups=len(weight))[..., :T].mT

    def _cached_attention(self, query, key, value, log_decay, level_weights, conv_inputs, cache_layer, layout):
        """Attention to the tokens in the cache and to the new ones, which it also writes to the cache."""
        if layout.step is not None:
            cache_layer.note(conv_inputs, (key, value, log_decay))
            tokens = (x.squeeze(1) for x in (query, key, value, log_decay, level_weights))
            output = loglinear_attention_step(*tokens, cache_layer.state, positions=layout.step, backend=self.config.backend)
            return output.unsqueeze(1)
        output, state = loglinear_attention_span(
            query, key, value, log_decay, level_weights, layout.span,
            state=cache_layer.state if cache_layer.started else None, backend=self.config.backend,
        )  # fmt: skip
        cache_layer.extend(state, conv_inputs, layout.span, (key, value, log_decay))
        return output


class LogLinearMLP(nn.Module):
    """Gated MLP: down(act(gate(x)) * up(x))."""

    def __init__(self, config: LogLinearConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_intermediate_size, config.hidden_size, bias=False)
        self.hidden_act = config.hidden_act
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden_states):
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        if self.hidden_act == "silu" and use_fused(gate):
            return self.down_proj(fused_silu_product(gate, up))
        return self.down_proj(self.act(gate) * up)


class LogLinearBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then, with `mlp_intermediate_size`, x + mlp(norm(x))."""

    def __init__(self, config: LogLinearConfig, layer_idx: int):
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = LogLinearRMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = LogLinearMixer(config, layer_idx)
        self.has_mlp = config.mlp_intermediate_size is not None
        if self.has_mlp:
            self.mlp_norm = LogLinearRMSNorm(config.hidden_size, config.layer_norm_epsilon)
            self.mlp = LogLinearMLP(config)

    def forward(self, hidden_states, cache_layer=None, layout: TokenLayout = TokenLayout()):
        residual = hidden_states
        if self.residual_in_fp32:
            residual = at_least_float32(residual)
        residual = residual + self.mixer(self.norm(hidden_states), cache_layer, layout)
        if self.has_mlp:
            residual = residual + self.mlp(self.mlp_norm(residual))
        return residual


# What a block consists of where nobody has replaced anything.
PARTS_OF_BLOCK = (
    LogLinearBlock, LogLinearMixer, LogLinearLambdaHead, LogLinearMLP, LogLinearRMSNorm, LogLinearGatedRMSNorm,
    nn.Linear, nn.Conv1d, type(ACT2FN["silu"]),
)  # fmt: skip


class LogLinearPreTrainedModel(PreTrainedModel):
    config: LogLinearConfig
    config_class = LogLinearConfig
    base_model_prefix = "backbone"
    _no_split_modules = ["LogLinearBlock"]
    supports_gradient_checkpointing = True
    _can_compile_fullgraph = True
    _is_stateful = False  # the cache can be rolled back
    _supports_attention_backend = False

    def save_pretrained(self, *args, **kwargs):
        """As in the library. The checkpoint carries its code, and names it for every Auto class."""
        if self._auto_class is not None:
            self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(*args, **kwargs)

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, LogLinearMixer):
            self._init_mixer(module)
        elif isinstance(module, LogLinearLambdaHead):
            self._init_lambda_head(module)

    def _init_mixer(self, mixer):
        """As Mamba-2 (arXiv 2405.21060): A = 1 ... H, D = 1, time steps log-uniform between `time_step_min` and `_max`."""
        config = self.config
        init.copy_(mixer.A_log, torch.arange(1, config.num_heads + 1, dtype=torch.float32).log())
        init.ones_(mixer.D)
        span = math.log(config.time_step_max) - math.log(config.time_step_min)
        dt = (torch.rand(config.num_heads) * span + math.log(config.time_step_min)).exp().clamp(min=config.time_step_floor)
        init.copy_(mixer.dt_bias, dt + (-torch.expm1(-dt)).log())  # softplus(dt_bias) = dt
        init.kaiming_uniform_(mixer.conv1d.weight, a=math.sqrt(5))
        init.kaiming_uniform_(mixer.out_proj.weight, a=math.sqrt(5))
        if config.rescale_prenorm_residual:
            init.copy_(mixer.out_proj.weight, mixer.out_proj.weight / math.sqrt(config.num_hidden_layers))

    def _init_lambda_head(self, head):
        if head.mode == "linear":
            init.ones_(head.scale)
        else:  # d W1 W2 + b = b at first, so that every level starts with the same weight
            init.normal_(head.up, std=self.config.initializer_range)
            init.zeros_(head.down)
            init.constant_(head.bias, self.config.lambda_bias_init)


class LogLinearModel(LogLinearPreTrainedModel):
    """The backbone: embeddings, blocks, final norm."""

    def __init__(self, config: LogLinearConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LogLinearBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.gradient_checkpointing = False
        self.norm_f = LogLinearRMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings

    def set_input_embeddings(self, new_embeddings):
        self.embeddings = new_embeddings

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        cache_params: Cache | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple | LogLinearModelOutput:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `[B, T]`, *optional*): exactly one of `input_ids` and `inputs_embeds`.
            attention_mask (`torch.Tensor` of shape `[B, T]` or `[B, past + T]`, *optional*): 1 at real tokens, 0 at padding,
                which may stand anywhere. A padded position returns the output of the last real token before it (zeros if
                there is none). Columns before the last T say what was real in the past: the last tokens of a row that are
                padding by now, as after its end in `generate()`, are taken back.
            position_ids (`torch.LongTensor` of shape `[1, T]`, *optional*): read only if B = 1 and there is neither a mask
                nor a cache: a position that does not follow the one before it starts a new packed sequence.
            past_key_values, cache, cache_params (`Cache`, *optional*): names of the same thing, a [`FenwickCache`] or a
                `DynamicCache(config=...)` with the tokens so far. It is changed.
            inputs_embeds (`torch.FloatTensor` of shape `[B, T, hidden_size]`, *optional*): instead of `input_ids`.
            use_cache (`bool`, *optional*): whether to return a cache; defaults to `config.use_cache`, when training to
                `False`.
            output_hidden_states (`bool`, *optional*): also return the input of every block and the final output.
            return_dict (`bool`, *optional*): `False`: return a tuple.
            cu_seq_lens_q (`torch.Tensor` of shape `[num_seqs + 1]`, *optional*): borders of sequences packed into one row.
            seq_idx (`torch.Tensor` of shape `[B, T]`, *optional*): number of the packed sequence of every token.

        Raises:
            ValueError: for inputs whose shapes do not fit, no tokens, token ids out of range (on the CPU), and a cache of
                another model or batch.
        """
        output_hidden_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return_dict = self.config.return_dict if return_dict is None else return_dict
        cache = _one_cache(cache, past_key_values, cache_params)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is not None and (inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != self.config.hidden_size):
            raise ValueError(
                f"`inputs_embeds` must be [B, T, {self.config.hidden_size}], but has the shape {list(inputs_embeds.shape)}."
            )
        hidden_states = self._embed(input_ids) if inputs_embeds is None else inputs_embeds
        shape = hidden_states.shape[:2]
        if 0 in shape:
            raise ValueError(f"The input has the shape {list(shape)}, but needs at least one row and one token.")

        cu_seqlens = _packed_borders(shape, attention_mask, cache, position_ids, cu_seq_lens_q, seq_idx)
        use_cache = self._resolve_use_cache(use_cache, cache, cu_seqlens)
        cache = self._prepare_cache(cache, shape[0]) if use_cache else None
        if cache is not None:
            _agree_on_past(cache, attention_mask, shape)
        if cu_seqlens is not None:
            hidden_states = hidden_states.flatten(0, 1)[None]
        padding = _Padding(attention_mask, shape, hidden_states.device, has_past=cache is not None and cache.layers[0].started)
        all_hidden_states = [] if output_hidden_states else None
        compact = padding.compact(hidden_states)
        last_hidden = None if cache is None or padding.mask is None else cache.layers[0].last_hidden()
        hidden_states = self._run(compact, cache, padding, cu_seqlens, all_hidden_states)
        if output_hidden_states:
            all_hidden_states = tuple(
                padding.scatter(x.to(padding.device), None).reshape(*shape, -1) for x in all_hidden_states
            )
        hidden_states = padding.scatter(hidden_states, last_hidden).reshape(*shape, -1)
        output = LogLinearModelOutput(
            last_hidden_state=hidden_states,
            hidden_states=all_hidden_states,
            **{CACHE_NAME: cache},
        )
        return output if return_dict else output.to_tuple()

    def _run(self, hidden_states, cache, padding, cu_seqlens=None, all_hidden_states=None, fused=False):
        """All blocks and the final norm, real tokens at the front: [B, T, D] -> [B, T, D]; the cache has then seen the tokens.

        `fused`: whether the blocks take the kernels of step_loglinear.py.
        Appends what enters every block, and the result, to the list `all_hidden_states`.
        """
        positions = _packed_positions(cu_seqlens, hidden_states.shape[1])
        step, span = self._cache_positions(cache, padding, hidden_states.device)
        layout = TokenLayout(padding.lengths, cu_seqlens, positions, step, span)
        if fused:
            hidden_states = step_through(self.layers, hidden_states, cache.layers)
        else:
            hidden_states = self._run_blocks(hidden_states, cache, layout, all_hidden_states)
        hidden_states = self.norm_f(hidden_states).to(padding.device)  # the layers may live on several
        if all_hidden_states is not None:
            all_hidden_states.append(hidden_states)
        if cache is not None:
            cache.layers[0].advance(*padding.counts(), hidden_states, step)
        return hidden_states

    def _run_blocks(self, hidden_states, cache, layout, all_hidden_states):
        offloading = cache is not None and cache.offloading
        # A draft that exits early has a config of fewer blocks.
        for index, block in zip(range(self.config.num_hidden_layers), self.layers):
            if all_hidden_states is not None:
                all_hidden_states.append(hidden_states)
            cache_layer = None if cache is None else cache.layers[index]
            if offloading:
                cache_layer.prefetch()
            hidden_states = block(hidden_states, cache_layer, layout)
            if offloading:
                cache_layer.offload()
        if offloading:  # who copies or saves the cache next would read it while the copies still arrive
            for device in {cache_layer.device for cache_layer in cache.layers}:
                torch.accelerator.synchronize(device)
        return hidden_states

    def _embed(self, input_ids):
        if input_ids.dim() != 2:
            raise ValueError(f"`input_ids` must be [B, T], but has the shape {list(input_ids.shape)}.")
        if input_ids.numel() and input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = input_ids.aminmax()
            low, high = low.item(), high.item()
            if low < 0 or high >= self.embeddings.num_embeddings:
                raise ValueError(
                    f"`input_ids` range from {low} to {high}, but must be from 0 to "
                    f"{self.embeddings.num_embeddings - 1} (vocab_size - 1)."
                )
        return self.embeddings(input_ids)

    def _resolve_use_cache(self, use_cache, cache, cu_seqlens):
        if cu_seqlens is not None:
            if cache is not None:
                raise ValueError("Packed sequences cannot be cached: pass a batch of rows, or no `cache`.")
            return False
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if cache is not None:
            if checkpointing:
                raise ValueError("A `cache` does not go with gradient checkpointing, which would run every layer on it twice.")
            return True
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and checkpointing:
            logger.warning_once("`use_cache=True` does not go with gradient checkpointing. Setting `use_cache=False`.")
            return False
        return use_cache

    def _cache_positions(self, cache, padding, device):
        """Positions of a forward pass with a cache: one token per row as `StepPositions`, more as `SpanPositions`."""
        if cache is None:
            return None, None
        leader, chunk_size = cache.layers[0], self.config.chunk_size
        # A step writes in place, so nothing may need the old state for a gradient.
        if padding.shape[1] == 1 and leader.started and not torch.is_grad_enabled():
            active = None if padding.lengths is None else padding.lengths > 0
            return StepPositions(leader.lengths, leader.merged_chunks, chunk_size, active), None
        counters = (leader.lengths, leader.merged_chunks) if leader.started else None
        return None, SpanPositions(padding.shape, chunk_size, device, counters, padding.lengths)

    def _prepare_cache(self, cache, batch_size):
        """The cache to use, a new one if there is none; its layers share the counters of the first."""
        if cache is None:
            cache = FenwickCache(self.config)
        layers = getattr(cache, "layers", None)
        if layers is not None and len(layers) == 0:  # DynamicCache() made without a config
            layers.extend(FenwickCache(self.config).layers)
            cache.layer_class_to_replicate = None
        if layers is None or not all(hasattr(layer, "conv_window") for layer in layers):
            raise ValueError(
                f"`cache` is a {type(cache).__name__}, but must be a FenwickCache or a DynamicCache or StaticCache made with "
                "config=model.config."
            )
        if layers and layers[0].interrupted:
            _restart(layers)
        depth = self.config.num_hidden_layers  # fewer than there are while a draft exits early
        if len(layers) != depth:
            raise ValueError(f"`cache` has {len(layers)} layers, but this model has {depth}.")
        if layers[0].batch_size not in (-1, batch_size):
            raise ValueError(
                f"`cache` does not fit this input: `batch_size` is {layers[0].batch_size} in the cache and {batch_size} here."
            )
        for layer in layers:
            layer.leader = layers[0]
        return cache


def _one_cache(*caches):
    """The one that was given; the argument has three names in the library's history."""
    given = [cache for cache in caches if cache is not None]
    if any(cache is not given[0] for cache in given):
        raise ValueError("`cache`, `past_key_values` and `cache_params` are names of the same argument: pass one.")
    return given[0] if given else None


def _restart(layers):
    """After a forward pass that failed midway: an empty cache is as new, one with tokens cannot be used again."""
    if layers[0].has_tokens:
        raise ValueError(
            "`cache` was left by a forward pass that did not come to its end: some layers have seen its tokens, others have "
            "not. Call `reset()` and pass the whole text again, or a copy of the cache that was made before."
        )
    for layer in layers:
        layer.reset()


def _has_tokens(cache):
    layers = getattr(cache, "layers", None)
    return bool(layers) and getattr(layers[0], "started", False)


def _agree_on_past(cache, attention_mask, shape):
    """Where the mask of new tokens, [B, T] = `shape`, begins with the columns of the cache, it says which of these were real:
    see `drop_padding`."""
    leader = cache.layers[0]
    if attention_mask is None or not leader.started or torch.compiler.is_compiling():
        return
    past = attention_mask.shape[-1] - shape[1]
    if past <= 0 or (attention_mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if attention_mask.shape[:-1] == shape[:1] and past == int(cache.get_seq_length()):
        leader.drop_padding(attention_mask[:, :past] != 0)


def _packed_borders(shape, attention_mask, cache, position_ids, cu_seq_lens_q, seq_idx):
    """Borders of packed sequences in the flattened tokens, [num_seqs + 1], or None for ordinary rows."""
    B, T = shape
    if attention_mask is not None and (cu_seq_lens_q is not None or seq_idx is not None):
        raise ValueError("`attention_mask` does not go with packed sequences, which have no padding: pass none.")
    if cu_seq_lens_q is not None:
        if B != 1:
            raise ValueError(f"`cu_seq_lens_q` needs one packed row, but the batch has {B} rows.")
        return cu_seq_lens_q.flatten().to(torch.int32)
    if seq_idx is not None:
        if seq_idx.shape != shape:
            raise ValueError(f"`seq_idx` has the shape {list(seq_idx.shape)}, but must have that of the input, {list(shape)}.")
        starts = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
    elif position_ids is not None and B == 1 and attention_mask is None and cache is None and position_ids.shape == shape:
        starts = F.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0), value=True)
    else:
        return None
    borders = F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=B * T).to(torch.int32)
    return borders if len(borders) > 2 or B > 1 else None


def _packed_positions(cu_seqlens, num_tokens):
    if cu_seqlens is None:
        return None
    token = torch.arange(num_tokens, device=cu_seqlens.device)
    return token - cu_seqlens[torch.searchsorted(cu_seqlens, token.int(), right=True) - 1]


class _Padding:
    """Moves the real tokens of every row to its front and back again, so that no layer has to know about padding."""

    def __init__(self, attention_mask, shape, device, has_past):
        self.shape, self.device = shape, device
        self.mask = self._real(attention_mask, shape, device, has_past)
        self.lengths = None
        if self.mask is not None:
            self.lengths = self.mask.sum(1)
            self.order = (~self.mask).to(torch.uint8).argsort(dim=1, stable=True)  # [B, T] real tokens first
            self.last_real = self.mask.cumsum(1) - 1  # [B, T] the token's place in `order`, or that of the real one before

    @staticmethod
    def _real(attention_mask, shape, device, has_past):
        """[B, T] bool, or None where it is known that all tokens are real; with a past, the mask may begin with its columns."""
        if attention_mask is None:
            return None
        B, T = shape
        columns = attention_mask.shape[-1]
        if attention_mask.shape != (B, columns) or columns < T or (columns > T and not has_past):
            raise ValueError(
                f"`attention_mask` must be [B, T] or, after a past, [B, past + T] with B, T = {B}, {T}, but has the "
                f"shape {list(attention_mask.shape)}."
            )
        mask = attention_mask[:, -T:].to(device) != 0
        readable = mask.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and attention_mask.is_floating_point() and (attention_mask[:, -T:] != mask).any():
            raise ValueError(f"`attention_mask` must hold 0 and 1 only, but holds {attention_mask.unique()[:5].tolist()}.")
        return None if readable and mask.all() else mask

    def compact(self, x):
        if self.mask is None or self.shape[1] == 1:
            return x
        return x.gather(1, self.order[..., None].expand_as(x))

    def scatter(self, x, last_hidden):
        """[B, T, D] real tokens first -> at their places; padding repeats the real token before it."""
        if self.mask is None:
            return x
        spread = x.gather(1, self.last_real.clamp(min=0)[..., None].expand_as(x))
        before = torch.zeros_like(spread[:, :1]) if last_hidden is None else last_hidden[:, None].to(spread.dtype)
        return torch.where((self.last_real < 0)[..., None], before, spread)

    def counts(self):
        """(new tokens, columns, mask) for the cache."""
        return (self.shape[1] if self.mask is None else self.lengths), self.shape[1], self.mask


class LogLinearForCausalLM(LogLinearPreTrainedModel, GenerationMixin):
    """The language model: [`LogLinearModel`] and a linear head over the vocabulary."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}

    def __init__(self, config: LogLinearConfig):
        super().__init__(config)
        self.backbone = LogLinearModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, new_embeddings):
        self.backbone.set_input_embeddings(new_embeddings)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        cache_params: Cache | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> tuple | LogLinearCausalLMOutput:
        r"""
        Args:
            labels (`torch.LongTensor` of shape `[B, T]`, *optional*): targets, shifted inside the model; -100 is ignored.
            logits_to_keep (`int` or `torch.Tensor`, defaults to 0): compute logits only for the last so many positions
                (0: all), or for the positions in the tensor.

        The other arguments are those of [`LogLinearModel.forward`].
        """
        return_dict = self.config.return_dict if return_dict is None else return_dict
        output_hidden_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        cache = _one_cache(cache, past_key_values, cache_params)
        plain = not output_hidden_states and all(x is None for x in (attention_mask, inputs_embeds, labels))
        if plain and not kwargs and isinstance(logits_to_keep, int) and self._can_replay(input_ids, cache):
            output = LogLinearCausalLMOutput(logits=self._replayed(input_ids, cache), **{CACHE_NAME: cache})
            return output if return_dict else output.to_tuple()
        packing = {name: kwargs.pop(name) for name in ("cu_seq_lens_q", "seq_idx") if name in kwargs}
        outputs = self.backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            cache=cache,
            **packing,
        )
        hidden_states = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden_states[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = LogLinearCausalLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE_NAME: outputs.cache}
        )
        return output if return_dict else output.to_tuple()

    def _can_replay(self, input_ids, cache):
        """Whether this is a step of `generate()` that may be recorded and replayed: a token per row, written in place."""
        graph = None if torch.compiler.is_compiling() or torch.is_grad_enabled() else RUNNING.get()
        if graph is None or graph.backbone is not self.backbone:  # a logits processor may run another model
            return False
        if input_ids is None or input_ids.shape[1:] != (1,) or not _has_tokens(cache):
            return False
        return not (cache.offloading or cache.layers[0].record_past or cache.layers[0].record)

    def _replayed(self, input_ids, cache):
        """Logits of a step, [B, 1] -> [B, 1, vocab_size], by the graph that runs; the next step overwrites them."""
        backbone, graph = self.backbone, RUNNING.get()
        backbone._prepare_cache(cache, len(input_ids))
        padding = _Padding(None, input_ids.shape, input_ids.device, has_past=True)

        def run(ids):
            return self.lm_head(backbone._run(backbone._embed(ids), cache, padding, fused=graph.fused))

        return graph.step(run, input_ids, cache)

    # ---------------------------------------------------------------------------------------------------- generation

    def generate(self, *args, **kwargs):
        """As in the library. On a GPU, steps are replayed as one CUDA graph, or compiled if there is a `compile_config`.

        Not with a `custom_generate`, which may keep outputs that a replayed step would overwrite.
        """
        with nullcontext() if kwargs.get("custom_generate") else self.replaying():
            return super().generate(*args, **kwargs)

    @contextmanager
    def replaying(self):
        """Within it, forward passes of one token per row with a cache are recorded as a CUDA graph and replayed, as in
        `generate()`, where `can_record` allows it; the output of a step is overwritten by the next. Weights and hooks must
        not change meanwhile.
        """
        graph = None
        if can_record(self) and self.config.backend in ("auto", "triton"):
            fused = fused_convolution is not None and can_fuse(self.backbone.layers, self.config, PARTS_OF_BLOCK)
            graph = DecodeGraph(self.backbone, fused)
        token = RUNNING.set(graph)
        try:
            yield
        finally:
            RUNNING.reset(token)

    def _without_position_limit(self):
        """This model with a config whose `max_position_embeddings` limits nothing: longer text shares the top level's weight.

        A copy, since other threads may generate with the same model.
        """
        unlimited = copy.copy(self)
        unlimited.config = copy.copy(self.config)
        unlimited.config.max_position_embeddings = 2**62
        return unlimited

    def _prepare_generated_length(self, *args, **kwargs):
        return super(LogLinearForCausalLM, self._without_position_limit())._prepare_generated_length(*args, **kwargs)

    def _get_stopping_criteria(self, *args, **kwargs):
        return super(LogLinearForCausalLM, self._without_position_limit())._get_stopping_criteria(*args, **kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, batch_size, *args):
        implementation = generation_config.cache_implementation
        given = any(model_kwargs.get(name) is not None for name in ("cache", "past_key_values"))
        if given or generation_config.use_cache is False or implementation == "quantized":
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, batch_size, *args)
        static = implementation is not None and "static" in implementation
        offloading = implementation is not None and "offloaded" in implementation
        cache = FenwickCache(self.config, static=static, offloading=offloading)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[CACHE_NAME] = cache

    def _valid_auto_compile_criteria(self, model_kwargs, generation_config):
        """A recorded step is as fast as a compiled one, without a minute of compiling: only `compile_config` asks for that."""
        if RUNNING.get() is not None and generation_config.compile_config is None:
            return False
        return super()._valid_auto_compile_criteria(model_kwargs, generation_config)

    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        self._check_new_tokens(input_ids, **model_kwargs)
        model_kwargs = model_kwargs | {"is_prompt": True}  # for `prepare_inputs_for_generation`
        cache, mask = model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
        if _has_tokens(cache) and mask is not None:  # the model only gets the part of the new tokens
            seen = int(cache.get_seq_length())
            _agree_on_past(cache, mask, (len(input_ids), mask.shape[-1] - seen))
            if generation_config.prefill_chunk_size is not None and CACHE_NAME == "past_key_values":
                # Transformers 5.17 would read in pieces all that it is given, what the cache holds included.
                input_ids, model_kwargs["attention_mask"] = input_ids[:, seen - mask.shape[1] :], mask[:, seen:]
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    @staticmethod
    def _check_new_tokens(input_ids, attention_mask=None, inputs_embeds=None, **kwargs):
        """That a prompt goes on after what the cache holds: the library would cut it to nothing, or to the wrong end."""
        cache = kwargs.get(CACHE_NAME)
        if inputs_embeds is not None or not _has_tokens(cache):
            return
        seen, given = int(cache.get_seq_length()), input_ids.shape[1]
        if seen >= given and (attention_mask is None or attention_mask.shape[1] == given):
            raise ValueError(
                f"`input_ids` has {given} tokens and `cache` holds {seen}: pass the whole text and at least one new token, or "
                "only new tokens with an `attention_mask` over the old and the new ones."
            )

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
        """None: the cache knows the positions, and keeping them up to date would cost every step six launches."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        """What follows the prompt needs no mask: a generated token is always real, and the cache knows the others."""
        if _has_tokens(outputs.get(CACHE_NAME)):
            model_kwargs.pop("attention_mask", None)
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, is_first_iteration=False, is_prompt=False, **kwargs):
        is_prompt = is_prompt or is_first_iteration
        continuing = not is_prompt and _has_tokens(kwargs.get(CACHE_NAME))
        if continuing and kwargs.get("next_sequence_length") == 1:  # all that a step needs; the library would take much longer
            unused = ("next_sequence_length", "position_ids", "attention_mask")
            return {"input_ids": input_ids[:, -1:]} | {name: x for name, x in kwargs.items() if name not in unused}
        inputs = super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, is_first_iteration=is_first_iteration, **kwargs
        )
        mask = inputs.get("attention_mask")
        if mask is not None:
            tokens = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
            # The last columns count, and a generated token is always real.
            inputs["attention_mask"] = None if continuing else mask[:, -tokens.shape[1] :]
        return inputs

    def _assisted_decoding(self, *args, **kwargs):
        """The library lets the cache record its past; a cache that is returned or was given must not go on recording."""
        cache = kwargs.get(CACHE_NAME)
        before = [getattr(layer, "record_past", False) for layer in getattr(cache, "layers", ())]
        try:
            return super()._assisted_decoding(*args, **kwargs)
        finally:
            for layer, record_past in zip(getattr(cache, "layers", ()), before):
                layer.record_past = record_past
                if not record_past:
                    layer.record = None

    @staticmethod
    def create_masks_for_generate(attention_mask=None, **kwargs):
        """The model reads the plain [B, T] mask; the library would build a 4D one for a static cache."""
        return attention_mask

    # ---------------------------------------------------------------------------------------------------- conversion

    @classmethod
    def from_mamba2(cls, model, lambda_mode: str = "mlp_softplus", **kwargs) -> "LogLinearForCausalLM":
        """A LogLinear model that computes what a Mamba-2 model computes, to be trained further.

        Args:
            model (`Mamba2ForCausalLM`, `str` or `os.PathLike`): the model, or the path or Hub name of one.
            lambda_mode (`str`, defaults to `"mlp_softplus"`): one of `"mlp_softplus"` (bias ln(e - 1), so that lambda = 1) and
                `"fixed"`; the other modes cannot start at lambda = 1.
            kwargs: further fields of [`LogLinearConfig`], for example `max_position_embeddings`.

        Raises:
            ValueError: for another `lambda_mode`, and for a model that is no Mamba-2.
        """
        if lambda_mode not in ("mlp_softplus", "fixed"):
            raise ValueError(
                f"`lambda_mode` is {lambda_mode!r}, but must be 'mlp_softplus' or 'fixed': no other can start at lambda = 1."
            )
        if isinstance(model, (str, os.PathLike)):
            from transformers import Mamba2ForCausalLM

            model = Mamba2ForCausalLM.from_pretrained(model)
        if model.config.model_type != "mamba2":
            raise ValueError(f"`model` is a {model.config.model_type!r} model, but must be a 'mamba2' one.")
        fields_of_source = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures")}
        fields_of_source |= {"lambda_mode": lambda_mode, "lambda_bias_init": math.log(math.e - 1)} | kwargs
        converted = cls(LogLinearConfig(**fields_of_source))
        converted.to(device=model.device, dtype=model.dtype)
        missing, unexpected = converted.load_state_dict(model.state_dict(), strict=False)
        unmatched = [name for name in missing if ".lambda_" not in name] + unexpected
        if unmatched:
            raise ValueError(f"`model` has weights that do not map to a LogLinear model: {unmatched}.")
        converted.generation_config = model.generation_config
        return converted.train(model.training)


# `generate()` asks for the signature of a model with its own code before every token; so it is worked out once.
LogLinearForCausalLM.forward.__signature__ = inspect.signature(LogLinearForCausalLM.forward)

__all__ = ["LogLinearForCausalLM", "LogLinearModel", "LogLinearPreTrainedModel"]
