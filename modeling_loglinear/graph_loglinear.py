"""Decoding steps as one CUDA graph.

A Fenwick cache has the same shape after every token, unlike one of keys and values. So a step can be recorded once and then be
replayed, with none of the hundreds of launches that an eager step spends its time on, and without a compiler.
"""

import operator
from contextvars import ContextVar

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

# The graph of the `generate()` that runs in this thread; weights and hooks do not change meanwhile.
RUNNING = ContextVar("running decode graph", default=None)


class DecodeGraph:
    """Runs steps of one token per row; records the step once the cache has kept all its tensors for a step.

    Whatever replaces a tensor of the cache (another cache, many tokens at once, a batch of another size) makes it start again
    with an eager step, which also compiles the kernels that a recording must not wait for.

    Args:
        backbone (`nn.Module`): the model whose steps these are.
        fused (`bool`, defaults to `False`): whether the blocks may take the kernels of step_loglinear.py.
    """

    def __init__(self, backbone, fused=False):
        self.backbone, self.fused = backbone, fused
        self.graph = self.inputs = self.output = None
        self.tensors = []  # of the cache after the last step
        self.recordable = True

    def step(self, run, inputs, cache):
        """`run(inputs)`, where `run` writes to the tensors of `cache` in place. The result is overwritten by the next step."""
        leader = cache.layers[0]
        if not self._knows(cache):
            self.graph = None
            for layer in cache.layers:
                layer.keeps_addresses = True
            output = run(inputs)
            self.tensors = _tensors(cache)
            return output
        if self.graph is None and not self._record(run, inputs, leader):
            return run(inputs)
        self.inputs.copy_(inputs)
        self.graph.replay()
        if not leader.static:
            leader.count(1)  # `run` counts on the host, where replaying changes nothing
        return self.output

    def _knows(self, cache):
        tensors = _tensors(cache)
        return len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))

    def _record(self, run, inputs, leader):
        """Whether the step could be recorded; that runs nothing on the device, so the cache is as before in any case."""
        if not self.recordable:
            return False
        self.inputs = inputs.clone()
        counters = leader.columns, leader.rolled_back
        try:
            with torch.cuda.device_of(inputs):
                self.graph, self.output = _recorded(lambda: run(self.inputs))
        except RuntimeError as error:  # something in the model waits for the device, as some quantised layers do
            logger.warning_once(f"Steps of `generate()` run eagerly, since one could not be recorded as a CUDA graph: {error}")
            self.recordable = False
        leader.columns, leader.rolled_back = counters
        leader.interrupted = False
        return self.recordable


def _recorded(function):
    """(CUDA graph of `function()`, its result). Without the garbage collection and the emptying of the memory pool that
    `torch.cuda.graph` begins with, which take longer than recording.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, result


def _tensors(cache):
    """What a step reads and writes, as quickly as can be: this is done before every token."""
    leader = cache.layers[0]
    of_layers = [x for a in cache.layers for x in (a.key, a.value, a.log_decay, a.levels, a.conv_ring)]
    return [leader.lengths, leader.merged_chunks, leader.recent, leader.hidden_ring, *of_layers]


def can_record(model) -> bool:
    """Whether a step of `model` is only kernels on one GPU: no hook of a user or of a library has to see it."""
    everywhere = torch.nn.modules.module
    hooked = bool(everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks) or any(
        m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in model.modules()
    )
    return model.device.type == "cuda" and not hooked
