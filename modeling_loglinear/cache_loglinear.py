"""The Fenwick cache: what every layer keeps between calls, O(chunk_size + log T) memory whatever the length.

A layer keeps a `LogLinearState` (the raw keys and values of the current and the previous chunk, and the blocks above) and the
raw inputs of its convolution, in a ring of the same length. Since both are raw, the newest chunk of tokens can be taken back.
"""

import copy

import torch
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin

from .attention_loglinear import (
    LogLinearState,
    advanced,
    empty_state,
    loglinear_attention,
    ring_update,
)

TENSORS = ("key", "value", "log_decay", "levels", "conv_ring")  # of every layer
COUNTERS = ("lengths", "merged_chunks", "columns", "rolled_back", "recent", "last_hidden")  # of the leader


class FenwickLayer(CacheLayerMixin):
    """Cache of one layer: its part of a [`LogLinearState`] and `conv_ring` (`[B, 2 * chunk_size, conv_dim]`).

    All layers of a model have seen the same tokens, so the counters live in one of them, the `leader` (the first layer).
    *Columns* count positions of the input, padding included: `generate()` slices by them. `lengths` counts real tokens per
    row. The sizes are taken from the first forward pass.

    Args:
        static (`bool`, *optional*): keep every tensor at its address and count columns on the device, so that a compiled
            decoding step neither recompiles nor needs new memory. Defaults to the attribute of the class.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False
    static = False

    def __init__(self, static: bool | None = None, **kwargs):
        super().__init__()
        if static is not None:
            self.static = static
        self.leader = self
        self.sizes = self.device = None
        self.record_past = False
        self.recorded = None  # what is needed to undo the last forward pass, if it was longer than a chunk
        # Of every layer:
        self.key = self.value = self.log_decay = self.levels = self.conv_ring = None
        # Of the leader:
        self.lengths = self.merged_chunks = None
        self.columns: int | torch.Tensor = 0
        self.rolled_back: int | torch.Tensor = 0  # columns below the most that were ever seen
        self.recent: torch.Tensor | None = None  # [B, C] which of the last C columns were real; None: all
        self.last_hidden: torch.Tensor | None = None  # [B, D] final hidden state of every row's last token
        self.undo = None  # rolled_back, recent and the mask of the recorded forward pass
        self.replaying = False  # how the last crop went back, for the other layers

    @property
    def is_compileable(self) -> bool:
        return self.static

    @property
    def state(self) -> LogLinearState | None:
        """The state of this layer's attention; `None` before the first forward pass."""
        if self.key is None:
            return None
        return LogLinearState(self.key, self.value, self.log_decay, self.levels, self.leader.merged_chunks, self.leader.lengths)

    @property
    def started(self) -> bool:
        """Whether the cache may hold tokens; known without asking the device."""
        columns = self.leader.columns
        return columns > 0 if isinstance(columns, int) else True

    @property
    def chunk_size(self) -> int:
        return self.sizes[6]

    @property
    def batch_size(self) -> int:
        return self.sizes[0]

    def __repr__(self):
        if self.state is None:
            return f"{type(self).__name__}(empty)"
        tokens = self.leader.lengths.tolist()
        return f"{type(self).__name__}(tokens={tokens}, levels={self.levels.shape[1]}, bytes={self.nbytes():,})"

    def nbytes(self) -> int:
        """Bytes of all tensors of this layer."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors().values())

    # ---------------------------------------------------------------------------------------------------- writing

    def lazy_initialization(self, B, G, H, N, P, L, chunk_size, conv_inputs) -> None:
        """Takes sizes, dtype and device from the first forward pass, or checks that they are still the same.

        Raises:
            ValueError: if the batch size or the model differs from that of the tokens that are in the cache.
        """
        sizes = (B, G, H, N, P, L, chunk_size, conv_inputs.shape[-1])
        if self.sizes == sizes:
            return
        if self.sizes is not None:
            names = ("batch size", "groups", "heads", "state_size", "head_dim", "levels", "chunk_size", "conv_dim")
            different = [f"{n} {a} in the cache and {b} here" for n, a, b in zip(names, self.sizes, sizes) if a != b]
            raise ValueError(f"`cache` does not fit this input: {', '.join(different)}. It comes from another batch or model.")
        self.sizes, self.device = sizes, conv_inputs.device
        state = empty_state(B, G, H, N, P, L, chunk_size, conv_inputs.dtype, conv_inputs.device)
        self.key, self.value, self.log_decay, self.levels = state[:4]
        self.conv_ring = conv_inputs.new_zeros(B, 2 * chunk_size, conv_inputs.shape[-1])
        if self.leader is self:
            self.merged_chunks, self.lengths = state[4:]
            if self.static:
                self.columns, self.rolled_back = (state.lengths.new_zeros(()) for _ in range(2))
        self.is_initialized = True
        for tensor in self._tensors().values():
            self._keep_address(tensor)

    def conv_window(self, width: int) -> torch.Tensor:
        """The convolution inputs before the next token: [B, width, conv_dim], zeros before the first token."""
        R = self.conv_ring.shape[1]
        slot = (self.leader.lengths[:, None] + torch.arange(-width, 0, device=self.conv_ring.device)) % R
        return self.conv_ring.gather(1, slot[..., None].expand(-1, -1, self.conv_ring.shape[-1]))

    def extend(self, state: LogLinearState, conv_inputs, new_tokens, tokens) -> None:
        """Many tokens per row: takes what is after them. The counters follow in `advance`.

        Args:
            state (`LogLinearState`): as returned by `loglinear_attention`.
            conv_inputs (`torch.Tensor` of shape `[B, T, conv_dim]`): inputs of the convolution, real tokens at the front.
            new_tokens (`torch.Tensor` of shape `[B]`): how many of the T are real.
            tokens (`tuple`): key, value and log_decay of these tokens, kept while a cache records its past.
        """
        self.recorded = None
        if self.leader.record_past and conv_inputs.shape[1] > self.chunk_size:
            before = self.state, self.conv_ring
            self.recorded = *(copy.deepcopy(before) if self.static else before), conv_inputs, tokens
        self._assign(
            conv_ring=ring_update(self.conv_ring, conv_inputs, self.leader.lengths, new_tokens),
            key=state.key, value=state.value, log_decay=state.log_decay, levels=state.levels,
        )  # fmt: skip

    def advance(self, new_tokens, columns: int, mask: torch.Tensor | None, last_hidden: torch.Tensor) -> None:
        """Counts the tokens of a forward pass; called on the leader after all layers have written them.

        Args:
            new_tokens (`torch.Tensor` of shape `[B]` or `int`): real tokens.
            columns (`int`): columns.
            mask (`torch.Tensor` of shape `[B, columns]`, *optional*): which columns were real; `None`: all.
            last_hidden (`torch.Tensor` of shape `[B, D]`): output at the last token of every row.
        """
        lengths, merged_chunks = advanced(self.lengths, self.merged_chunks, new_tokens, self.chunk_size)
        if self.recorded is not None:
            self.undo = self.rolled_back + 0, None if self.recent is None else self.recent.clone(), mask
        self._assign(lengths=lengths, merged_chunks=merged_chunks, last_hidden=last_hidden)
        if mask is not None or self.recent is not None:
            recent = self._all_real(self.chunk_size) if self.recent is None else self.recent
            mask = self._all_real(min(columns, self.chunk_size)) if mask is None else mask
            self._assign(recent=torch.cat([recent, mask], 1)[:, -self.chunk_size :])
        self._count(columns)

    def _count(self, columns):
        if self.static:
            self.columns.add_(columns)
            self.rolled_back.sub_(columns).clamp_(min=0)
        else:
            self.columns += columns
            self.rolled_back = max(0, self.rolled_back - columns)

    def _all_real(self, columns):
        return torch.ones(self.batch_size, columns, dtype=torch.bool, device=self.device)

    # ---------------------------------------------------------------------------------------------------- reading

    def get_seq_length(self) -> int:
        """Columns consumed, padding included."""
        return self.leader.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def update(self, key_states, value_states, *args, **kwargs):
        raise TypeError(
            f"{type(self).__name__} keeps no growing keys and values; LogLinearForCausalLM writes it through `extend`."
        )

    # ------------------------------------------------------------------------------------------- changing the batch

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keeps the rows `beam_idx`, in that order."""
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices` (positions or a mask)."""
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def _map(self, rows):
        if self.sizes is None:
            return
        self.recorded = None
        mapped = {name: rows(tensor) for name, tensor in self._tensors().items() if tensor.dim()}
        batch_size = len(mapped["key"])
        if batch_size != self.batch_size:  # no address can be kept
            self.__dict__.update(mapped)
            self.sizes = (batch_size, *self.sizes[1:])
        self._assign(**mapped)

    def reset(self) -> None:
        """Forgets all tokens, keeps the tensors."""
        self.recorded = None
        for tensor in self._tensors().values():
            tensor.zero_()
        if self.recent is not None:
            self.recent.fill_(True)
        if not self.static:
            self.columns = self.rolled_back = 0

    def offload(self) -> None:
        """Moves the tensors of this layer to the CPU; the counters stay."""
        for name in ("key", "value", "log_decay", "levels", "conv_ring"):
            setattr(self, name, getattr(self, name).to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Moves the tensors of this layer back to their device."""
        if self.sizes is not None and self.key.device != self.device:
            for name in ("key", "value", "log_decay", "levels", "conv_ring"):
                setattr(self, name, getattr(self, name).to(self.device, non_blocking=True))

    # ---------------------------------------------------------------------------------------------------- taking back

    def activate_past_recording(self) -> None:
        """From now on the whole last forward pass can be undone, however long, until the next `crop`."""
        self.record_past = True

    def max_rollback(self) -> int:
        """Columns that `crop` can remove now."""
        leader = self.leader
        if leader.sizes is None:
            return 0
        reach = max(0, min(leader.chunk_size - int(leader.rolled_back), int(leader.columns)))
        return reach if leader.recorded is None else max(reach, leader.recorded[2].shape[1])

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last columns, exactly: `crop(-n)` leaves what was there n columns before.

        Any point down to the longest length seen minus `chunk_size` can be reached; after `activate_past_recording` also any
        point of the last forward pass.

        Raises:
            ValueError: for a positive number and for one that reaches too far; the cache is then unchanged.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"`crop` takes minus the number of tokens to remove, but got {tokens_to_remove}.")
        n = -tokens_to_remove
        if self.leader is self:
            if n > self.max_rollback():
                raise ValueError(
                    f"`crop({tokens_to_remove})` reaches too far: at most {self.max_rollback()} of {int(self.columns)} columns "
                    "can be removed now (the cache keeps one chunk of raw tokens; call `activate_past_recording()` before a "
                    "forward pass to be able to undo all of it)."
                )
            self.replaying = n > self.chunk_size - int(self.rolled_back) if self.sizes is not None else False
            if n and not self.replaying:
                self._uncount(n)
        recorded, self.recorded = self.recorded, None
        if self.leader.replaying and n:
            self._replay(recorded, n)

    def _uncount(self, n):
        """Takes n columns back: the rings still hold what was there before, so only the counters change."""
        removed = n
        if self.recent is not None:
            removed = self.recent[:, -n:].sum(1)
            self._assign(recent=torch.cat([self._all_real(n), self.recent[:, :-n]], 1))
        self._assign(lengths=self.lengths - removed, last_hidden=torch.zeros_like(self.last_hidden))
        if self.static:
            self.columns.sub_(n)
            self.rolled_back.add_(n)
        else:
            self.columns -= n
            self.rolled_back += n

    def _replay(self, recorded, n):
        """Goes back to before the last forward pass and repeats it without its last n columns."""
        before, conv_ring, conv_inputs, (key, value, log_decay) = recorded
        B, T = conv_inputs.shape[:2]
        rolled_back, recent, mask = self.leader.undo
        kept = torch.full_like(before.lengths, T - n) if mask is None else mask[:, : T - n].sum(1)
        weights = log_decay.new_ones(B, T, value.shape[2], self.sizes[5])
        _, state = loglinear_attention(
            key, key, value, log_decay, weights,
            chunk_size=self.chunk_size, initial_state=before, return_final_state=True, lengths=kept,
        )  # fmt: skip
        self._assign(
            conv_ring=ring_update(conv_ring, conv_inputs, before.lengths, kept),
            key=state.key, value=state.value, log_decay=state.log_decay, levels=state.levels,
        )  # fmt: skip
        if self.leader is not self:
            return
        self._assign(lengths=state.lengths, merged_chunks=state.merged_chunks, last_hidden=torch.zeros_like(self.last_hidden))
        if self.recent is not None:
            recent = self._all_real(self.chunk_size) if recent is None else recent
            mask = self._all_real(T - n) if mask is None else mask[:, : T - n]
            self._assign(recent=torch.cat([recent, mask], 1)[:, -self.chunk_size :])
        if self.static:
            self.columns.sub_(n)
            self.rolled_back.copy_((rolled_back - (T - n)).clamp(min=0))
        else:
            self.columns -= n
            self.rolled_back = max(0, rolled_back - (T - n))

    # ---------------------------------------------------------------------------------------------------- tensors

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of this layer by name."""
        tensors = {name: getattr(self, name) for name in TENSORS + COUNTERS}
        return {name: tensor for name, tensor in tensors.items() if torch.is_tensor(tensor)}

    def _assign(self, **tensors):
        """New contents, written to the old address if the layer is static."""
        for name, tensor in tensors.items():
            old = getattr(self, name)
            if not self.static or old is None:
                setattr(self, name, self._keep_address(tensor.clone() if self.static else tensor))
            elif old is not tensor:
                old.copy_(tensor)

    def _keep_address(self, tensor):
        if self.static and not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(tensor)
        return tensor


class StaticFenwickLayer(FenwickLayer):
    """A [`FenwickLayer`] with fixed addresses, for `StaticCache(config, ...)`; it needs no maximal length."""

    static = True


# `DynamicCache(config=...)` and `StaticCache(config=...)` look their layers up here.
DYNAMIC_LAYER_TYPE_MAPPING["loglinear_attention"] = FenwickLayer
STATIC_LAYER_TYPE_MAPPING["loglinear_attention"] = StaticFenwickLayer


class FenwickCache(Cache):
    """Cache of a whole [`LogLinearForCausalLM`]: one [`FenwickLayer`] per block.

    Args:
        config ([`LogLinearConfig`]): gives the number of layers.
        static (`bool`, defaults to `False`): fixed addresses, for compiled decoding (`cache_implementation="static"`).
        offloading (`bool`, defaults to `False`): keep the layers that do not run on the CPU. Needs a GPU.
    """

    def __init__(self, config, static: bool = False, offloading: bool = False):
        if offloading and not torch.accelerator.is_available():
            raise ValueError("`offloading` moves the cache from a GPU to the CPU, but this machine has no GPU.")
        layer_class = StaticFenwickLayer if static else FenwickLayer
        super().__init__(layers=[layer_class() for _ in range(config.num_hidden_layers)], offloading=offloading)

    @property
    def lengths(self) -> torch.Tensor | None:
        """Real tokens seen per row, `[B]`; `None` before the first forward pass."""
        state = self.layers[0].state
        return None if state is None else state.lengths

    def nbytes(self) -> int:
        """Bytes of all tensors of the cache."""
        return sum(layer.nbytes() for layer in self.layers)

    def __repr__(self):
        state = self.layers[0].state
        if state is None:
            return f"FenwickCache(layers={len(self.layers)}, empty)"
        return (
            f"FenwickCache(layers={len(self.layers)}, tokens={state.lengths.tolist()}, levels={state.levels.shape[1]}, "
            f"bytes={self.nbytes():,})"
        )


__all__ = ["FenwickCache", "FenwickLayer", "StaticFenwickLayer"]
