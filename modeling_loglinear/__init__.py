"""Log-linear attention language models for Transformers (arXiv 2506.04761, arXiv 2605.06946)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .attention_loglinear import LogLinearState, loglinear_attention
from .cache_loglinear import FenwickCache
from .configuration_loglinear import LogLinearConfig
from .modeling_loglinear import LogLinearForCausalLM, LogLinearModel, LogLinearPreTrainedModel

AutoConfig.register("loglinear", LogLinearConfig, exist_ok=True)
AutoModel.register(LogLinearConfig, LogLinearModel, exist_ok=True)
AutoModelForCausalLM.register(LogLinearConfig, LogLinearForCausalLM, exist_ok=True)

# A saved checkpoint carries this code, so that it loads where the package is not installed (trust_remote_code=True).
LogLinearConfig.register_for_auto_class()
LogLinearModel.register_for_auto_class("AutoModel")
LogLinearForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__version__ = "0.1.0"
__all__ = [
    "FenwickCache",
    "LogLinearConfig",
    "LogLinearForCausalLM",
    "LogLinearModel",
    "LogLinearPreTrainedModel",
    "LogLinearState",
    "loglinear_attention",
]
