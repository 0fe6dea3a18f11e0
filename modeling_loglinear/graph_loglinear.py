"""Decoding steps as one CUDA graph.

A static Fenwick cache keeps its shape and its addresses, whatever the length. So a step can be recorded once and then be
replayed, with none of the hundreds of launches that an eager step spends its time on, and without a compiler.
"""

from contextvars import ContextVar

import torch

# The graph of the `generate()` that runs in this thread; weights and hooks do not change meanwhile.
RUNNING = ContextVar("running decode graph", default=None)


class DecodeGraph:
    """Runs steps of one token per row; records the step once the cache has kept all its tensors for a step.

    Whatever replaces a tensor of the cache (another cache, a batch of another size) makes it start again with an eager step,
    which also compiles the kernels that a recording must not wait for.
    """

    def __init__(self):
        self.graph = self.hidden_states = self.output = None
        self.tensors = []  # of the cache after the last step

    def step(self, run, hidden_states, cache):
        """`run(hidden_states)`: hidden_states [B, 1, D] -> [B, 1, D], where `run` writes to the static `cache` in place.

        The result is overwritten by the next step.
        """
        if not self._knows(cache):
            self.graph = None
            output = run(hidden_states)
            self.tensors = _tensors(cache)
            return output
        if self.graph is None:
            self._record(run, hidden_states)
        self.hidden_states.copy_(hidden_states)
        self.graph.replay()
        return self.output

    def _knows(self, cache):
        tensors = _tensors(cache)
        return len(tensors) == len(self.tensors) and all(new is old for new, old in zip(tensors, self.tensors))

    def _record(self, run, hidden_states):
        self.hidden_states = hidden_states.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device_of(hidden_states), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.output = run(self.hidden_states)


def _tensors(cache):
    return [tensor for layer in cache.layers for tensor in layer.tensors().values()]


def can_record(model) -> bool:
    """Whether a step of `model` is only kernels on one GPU: no hook of a user or of a library has to see it."""
    hooked = any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in model.modules())
    return model.device.type == "cuda" and not hooked
