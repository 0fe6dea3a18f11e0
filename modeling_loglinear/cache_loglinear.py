"""The Fenwick cache: what every layer keeps between calls, O(chunk_size + log T) memory whatever the length.

A layer keeps a `LogLinearState` (the raw keys and values of the current and the previous chunk, and the blocks above) and the
raw inputs of its convolution, in a ring of the same length. Since both are raw, the newest chunk of tokens can be taken back.
"""

import json
import os
import uuid
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin

from .attention_loglinear import (
    LogLinearState,
    SpanPositions,
    advanced,
    empty_state,
    loglinear_attention,
    ring_update,
)

TENSORS = ("key", "value", "log_decay", "levels", "conv_ring")  # of every layer
COUNTERS = ("lengths", "merged_chunks", "columns", "rolled_back", "recent", "hidden_ring")  # of the leader
FILE_FORMAT = "loglinear-fenwick-cache-1"


class LayerSizes(NamedTuple):
    """What must be the same in every forward pass that shares a cache."""

    batch_size: int
    n_groups: int
    num_heads: int
    state_size: int
    head_dim: int
    num_levels: int
    chunk_size: int
    conv_dim: int


class _Record:
    """The tokens of one layer since the last `crop`, and what was there before them: enough to repeat a part of them."""

    def __init__(self, layer, copy):
        state, ring = layer.state, layer.conv_ring
        self.state = LogLinearState(*(tensor.clone() for tensor in state)) if copy else state
        self.conv_ring = ring.clone() if copy else ring
        self.tokens = []  # per forward pass: conv_inputs [B, T, conv_dim], (key, value, log_decay) [B, T, ...], real ones first
        if layer.leader is layer:
            self.rolled_back = layer.rolled_back + 0
            self.recent, self.hidden_ring = (None if x is None else x.clone() for x in (layer.recent, layer.hidden_ring))
            self.passes = []  # per forward pass: columns, mask [B, columns] or None, hidden states [B, T, D]

    def columns(self):
        return sum(columns for columns, *_ in self.passes)

    def first(self, keep):
        """The passes that hold the first `keep` columns, cut: (columns, mask, hidden states, real tokens [B]) of each."""
        passes = []
        for columns, mask, hidden_states in self.passes:
            columns = min(columns, keep)
            keep -= columns
            if columns:
                mask = None if mask is None else mask[:, :columns]
                real = torch.full_like(self.state.lengths, columns) if mask is None else mask.sum(1)
                passes.append((columns, mask, hidden_states, real))
        return passes


class FenwickLayer(CacheLayerMixin):
    """Cache of one layer: its part of a [`LogLinearState`] and `conv_ring` (`[B, 2 * chunk_size, conv_dim]`).

    All layers of a model have seen the same tokens, so the counters live in one of them, the `leader` (the first layer).
    *Columns* count positions of the input, padding included: `generate()` slices by them. `lengths` counts real tokens per
    row. The sizes are taken from the first forward pass.

    Its subclass [`StaticFenwickLayer`] keeps every tensor at its address and counts columns on the device, so that a compiled
    decoding step neither recompiles nor needs new memory.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False
    static = False

    def __init__(self, **kwargs):
        super().__init__()
        self.leader = self
        self.keeps_addresses = self.static  # new contents are written to the old tensors
        self.sizes: LayerSizes | None = None
        self.device = self.dtype = None
        self.record_past = False
        self.record: _Record | None = None
        # Of every layer:
        self.key = self.value = self.log_decay = self.levels = self.conv_ring = None
        # Of the leader:
        self.lengths = self.merged_chunks = None
        self.columns: int | torch.Tensor = 0
        self.rolled_back: int | torch.Tensor = 0  # columns below the most that were ever seen
        self.recent: torch.Tensor | None = None  # [B, C] which of the last C columns were real; None: all
        self.hidden_ring: torch.Tensor | None = None  # [B, 2C, D] final hidden states, the newest in the slots of the tail
        self.has_tokens = False
        self.interrupted = False  # whether only some layers have seen the last tokens
        self.repeated = None  # real tokens of the recorded passes that the last `crop` repeated, for the other layers

    @property
    def is_compileable(self) -> bool:
        return self.static and not self.record_past

    @property
    def state(self) -> LogLinearState | None:
        """The state of this layer's attention; `None` before the first forward pass."""
        if self.key is None:
            return None
        merged_chunks, lengths = self.leader.merged_chunks, self.leader.lengths
        if self.leader.device != self.device:
            merged_chunks, lengths = merged_chunks.to(self.device), lengths.to(self.device)
        return LogLinearState(self.key, self.value, self.log_decay, self.levels, merged_chunks, lengths)

    @property
    def started(self) -> bool:
        """Whether the cache may hold tokens; known without asking the device."""
        return self.leader.has_tokens

    @property
    def chunk_size(self) -> int:
        return self.sizes.chunk_size

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first forward pass."""
        return -1 if self.sizes is None else self.sizes.batch_size

    def __repr__(self):
        return f"{type(self).__name__}({_summary([self])})"

    def nbytes(self) -> int:
        """Bytes of all tensors of this layer, without those that `activate_past_recording` keeps."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    # ---------------------------------------------------------------------------------------------------- writing

    def lazy_initialization(self, B, G, H, N, P, L, chunk_size, conv_inputs) -> None:
        """Begins a forward pass: takes sizes, dtype and device from the first one, later checks that they are the same.

        Raises:
            ValueError: if the batch size, the model, the dtype or the device differs from that of the tokens in the cache.
        """
        sizes = LayerSizes(B, G, H, N, P, L, chunk_size, conv_inputs.shape[-1])
        if self.sizes is None:
            self._initialize(sizes, conv_inputs)
        elif (self.sizes, self.dtype, self.device) != (sizes, conv_inputs.dtype, conv_inputs.device):
            self._refuse(sizes, conv_inputs)
        if self.started and not torch.compiler.is_compiling():
            self._make_writable()
        self.leader.interrupted = True  # until `advance`
        if self.record_past and self.record is None:
            # One token is written in place, as is everything that keeps its address.
            self.record = _Record(self, copy=self.keeps_addresses or conv_inputs.shape[1] == 1)

    def _initialize(self, sizes, conv_inputs):
        B, G, H, N, P, L, chunk_size, conv_dim = sizes
        self.sizes, self.device, self.dtype = sizes, conv_inputs.device, conv_inputs.dtype
        if self.leader is self:
            self.merged_chunks, self.lengths = torch.zeros(2, B, dtype=torch.int64, device=self.device).unbind()
            if self.static:
                self.columns, self.rolled_back = (self.lengths.new_zeros(()) for _ in range(2))
                self.recent = self._all_real(chunk_size)
        if self.static or self.record_past:  # else the first forward pass brings them
            state = empty_state(B, G, H, N, P, L, chunk_size, self.dtype, self.device)
            self.key, self.value, self.log_decay, self.levels = state[:4]
            self.conv_ring = conv_inputs.new_zeros(B, 2 * chunk_size, conv_dim)
        self.is_initialized = True
        for tensor in self.tensors().values():
            self._keep_address(tensor)

    def _refuse(self, sizes, conv_inputs):
        names = (*LayerSizes._fields, "dtype", "device")
        cached = (*self.sizes, self.dtype, self.device)
        here = (*sizes, conv_inputs.dtype, conv_inputs.device)
        different = [f"`{name}` is {a} in the cache and {b} here" for name, a, b in zip(names, cached, here) if a != b]
        raise ValueError(f"`cache` does not fit this input: {', '.join(different)}. It comes from another batch or model.")

    def _make_writable(self):
        """Outside of inference mode, replaces tensors that were made in it."""
        if torch.is_inference_mode_enabled():
            return
        if any(torch.is_tensor(x) and x.is_inference() for x in (self.conv_ring, self.columns)):
            for name, tensor in self.tensors().items():
                setattr(self, name, self._keep_address(tensor.clone()))

    def conv_window(self, width: int) -> torch.Tensor:
        """The convolution inputs before the next token: [B, width, conv_dim], zeros before the first token."""
        R = self.conv_ring.shape[1]
        slot = (self.state.lengths[:, None] + torch.arange(-width, 0, device=self.conv_ring.device)) % R
        return self.conv_ring.gather(1, slot[..., None].expand(-1, -1, self.conv_ring.shape[-1]))

    def extend(self, state: LogLinearState, conv_inputs, positions: SpanPositions, tokens) -> None:
        """Many tokens per row: takes what is after them. The counters follow in `advance`.

        Args:
            state (`LogLinearState`): as returned by `loglinear_attention`.
            conv_inputs (`torch.Tensor` of shape `[B, T, conv_dim]`): inputs of the convolution, real tokens at the front.
            positions (`SpanPositions`): made from the counters before this forward pass.
            tokens (`tuple`): key, value and log_decay of these tokens.
        """
        self.note(conv_inputs, tokens)
        conv_ring = positions.update(self.conv_ring, conv_inputs)
        self._assign(conv_ring=conv_ring, key=state.key, value=state.value, log_decay=state.log_decay, levels=state.levels)

    def note(self, conv_inputs, tokens) -> None:
        """Keeps the tokens of a forward pass while the past is recorded; arguments as in `extend`."""
        if self.record is not None:
            self.record.tokens.append((conv_inputs, tokens))

    def advance(self, new_tokens, columns: int, mask: torch.Tensor | None, hidden_states: torch.Tensor, step=None) -> None:
        """Counts the tokens of a forward pass; called on the leader after all layers have written them.

        Args:
            new_tokens (`torch.Tensor` of shape `[B]` or `int`): real tokens.
            columns (`int`): columns.
            mask (`torch.Tensor` of shape `[B, columns]`, *optional*): which columns were real; `None`: all.
            hidden_states (`torch.Tensor` of shape `[B, T, D]`): final hidden states, real tokens at the front.
            step (`StepPositions`, *optional*): given if this was one token per row, written in place.
        """
        if self.record is not None:
            self.record.passes.append((columns, mask, hidden_states))
        if step is not None:
            step.write(self.hidden_ring, hidden_states[:, 0])
        else:
            size = 2 * self.chunk_size
            self._assign(hidden_ring=ring_update(self.hidden_ring, hidden_states, self.lengths, new_tokens, size))
        lengths, merged_chunks = advanced(self.lengths, self.merged_chunks, new_tokens, self.chunk_size)
        self._assign(lengths=lengths, merged_chunks=merged_chunks)
        if mask is not None or self.recent is not None:
            self._assign(recent=self._shifted(self.recent, [(columns, mask)]))
        self.count(columns)
        self.has_tokens, self.interrupted = True, False

    def _shifted(self, recent, passes):
        """`recent` [B, C] after more passes, each given by its columns and its mask."""
        masks = [(self.chunk_size, recent), *passes]
        return torch.cat([self._all_real(n) if mask is None else mask for n, mask in masks], 1)[:, -self.chunk_size :]

    def count(self, columns: int) -> None:
        """Counts columns: on the host, or on the device if the layer is static."""
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
        """Columns consumed, padding included; a tensor of no dimension in a static cache."""
        return self.leader.columns.clone() if self.leader.static and self.leader.sizes else self.leader.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns with the query, 0): what a mask over everything would measure."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no longest text."""
        return -1

    def last_hidden(self) -> torch.Tensor | None:
        """Of the leader: final hidden state of every row's last token, `[B, D]`, zeros in a row without tokens."""
        if self.hidden_ring is None:
            return None
        slot = (self.lengths - 1) % self.hidden_ring.shape[1]
        last = self.hidden_ring.gather(1, slot[:, None, None].expand(-1, 1, self.hidden_ring.shape[-1]))[:, 0]
        return torch.where((self.lengths > 0)[:, None], last, 0)

    def update(self, key_states, value_states, *args, **kwargs):
        raise TypeError(f"{type(self).__name__} keeps no growing keys and values: it belongs to a LogLinear model.")

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
        """Changes the rows of all tensors; what was recorded is forgotten."""
        self.record = None
        if self.sizes is None:
            return
        self._make_writable()
        mapped = {name: rows(tensor) for name, tensor in self.tensors().items() if tensor.dim()}
        batch_size = len(mapped["key"])
        if batch_size == self.batch_size:
            self._assign(**mapped)
        else:  # no address can be kept
            self.sizes = self.sizes._replace(batch_size=batch_size)
            for name, tensor in mapped.items():
                setattr(self, name, self._keep_address(tensor))

    def reset(self) -> None:
        """Forgets all tokens. A static cache keeps its tensors at their addresses, another one is free for any batch."""
        self.record, self.has_tokens, self.interrupted = None, False, False
        if self.static:
            self._make_writable()
            for name, tensor in self.tensors().items():
                tensor.fill_(name == "recent")
        else:
            self.sizes, self.columns, self.rolled_back, self.keeps_addresses = None, 0, 0, False
            for name in self.tensors():
                setattr(self, name, None)

    def offload(self) -> None:
        """Moves the tensors of this layer to the CPU; the counters stay."""
        self._move("cpu")

    def prefetch(self) -> None:
        """Moves the tensors of this layer back to their device."""
        self._move(self.device)

    def _move(self, device):
        if self.sizes is not None:
            for name in TENSORS:
                setattr(self, name, getattr(self, name).to(device, non_blocking=True))

    # ---------------------------------------------------------------------------------------------------- taking back

    def activate_past_recording(self) -> None:
        """From now on every forward pass since the last `crop` can be undone, however long, at the price of keeping it."""
        self.record_past = True

    def max_rollback(self) -> int:
        """Columns that `crop` can remove now."""
        leader = self.leader
        if leader.sizes is None:
            return 0
        reach = min(leader.chunk_size - int(leader.rolled_back), int(leader.columns))
        return reach if leader.record is None else max(reach, leader.record.columns())

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last columns, exactly: `crop(-n)` leaves what was there n columns before.

        Any point down to the longest length seen minus `chunk_size` can be reached; while the past is recorded also any point
        since the last `crop`, which is where the next record begins.

        Raises:
            ValueError: for a positive number and for one that reaches too far; the cache is then unchanged.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"`crop` takes minus the number of tokens to remove, but got {int(tokens_to_remove)}.")
        n = -int(tokens_to_remove)
        if self.sizes is not None:
            self._make_writable()
        if self.leader is self:
            self._crop_counters(n)
        record, self.record = self.record, None
        if self.leader.repeated is not None:
            self._repeat(record, self.leader.repeated)

    def _crop_counters(self, n):
        self.repeated = None
        if n > self.max_rollback():
            raise ValueError(
                f"`crop({-n})` reaches too far: at most {self.max_rollback()} of {int(self.columns)} columns can be removed "
                "now (the cache keeps one chunk of raw tokens; call `activate_past_recording()` before a forward pass to be "
                "able to undo all of it)."
            )
        if n == 0:
            return
        if n <= self.chunk_size - int(self.rolled_back):
            self._uncount(n)
        else:
            self._recount(n)

    def _uncount(self, n):
        """Takes n columns back: the rings still hold what was there before, so only the counters change."""
        removed = n
        if self.recent is not None:
            removed = self.recent[:, -n:].sum(1)
            self._assign(recent=torch.cat([self._all_real(n), self.recent[:, :-n]], 1))
        self._assign(lengths=self.lengths - removed)
        if self.static:
            self.columns.sub_(n)
            self.rolled_back.add_(n)
        else:
            self.columns -= n
            self.rolled_back += n

    def drop_padding(self, past: torch.Tensor) -> None:
        """Of the leader: takes back the last tokens of rows where `past` has padding instead.

        `generate()` goes on feeding a row that has ended before the others, and the mask of what follows calls that padding.

        Args:
            past (`torch.Tensor` of shape `[B, columns]`, bool): which columns so far were real.

        Raises:
            ValueError: if `past` is not what the cache has seen but for the last tokens of some rows, or if these are too many
                to be taken back; the cache is then unchanged.
        """
        past = past.to(self.device)
        removed = self.lengths - past.sum(1)
        if not removed.any():
            return
        C = self.chunk_size
        recent = self._all_real(C) if self.recent is None else self.recent
        wanted = torch.cat([recent[:, : max(0, C - past.shape[1])], past], 1)[:, -C:]
        dropped = recent & ~wanted
        out_of_order = wanted & (~recent | (dropped.cumsum(1) > 0))
        most, reach = int(removed.max()), C - int(self.rolled_back)
        if out_of_order.any() or (dropped.sum(1) != removed).any() or most > reach:
            raise ValueError(
                f"`attention_mask` has {past.sum(1).tolist()} tokens before the new ones where `cache` has read "
                f"{self.lengths.tolist()}. Only the last tokens of a row can become padding, at most {reach} of them now: pass "
                "the mask of what the cache was given, or the whole text without a cache."
            )
        self._make_writable()
        self.record = None
        self._assign(lengths=self.lengths - removed, recent=wanted)
        if self.static:
            self.rolled_back.add_(most)
        else:
            self.rolled_back += most

    def _recount(self, n):
        """Goes back to the begin of the record and on to n columns before its end; `_repeat` follows for the tensors."""
        record = self.record
        passes = record.first(record.columns() - n)
        self.repeated = [real for *_, real in passes]
        lengths, merged_chunks, hidden_ring = record.state.lengths, record.state.merged_chunks, record.hidden_ring
        if hidden_ring is None:
            hidden_ring = torch.zeros_like(self.hidden_ring)
        for _, _, hidden_states, real in passes:
            hidden_ring = ring_update(hidden_ring, hidden_states, lengths, real, 2 * self.chunk_size)
            lengths, merged_chunks = advanced(lengths, merged_chunks, real, self.chunk_size)
        self._assign(lengths=lengths, merged_chunks=merged_chunks, hidden_ring=hidden_ring)
        if self.recent is not None:
            self._assign(recent=self._shifted(record.recent, [(columns, mask) for columns, mask, *_ in passes]))
        kept = record.columns() - n
        if self.static:
            self.columns.sub_(n)
            self.rolled_back.copy_((record.rolled_back - kept).clamp(min=0))
        else:
            self.columns -= n
            self.rolled_back = max(0, record.rolled_back - kept)
        self.has_tokens = int(self.columns) > 0

    def _repeat(self, record, repeated):
        """Repeats the first passes of the record, with `repeated` real tokens [B] each, on what was there before them."""
        self.prefetch()
        state, conv_ring = record.state, record.conv_ring
        for real, (conv_inputs, (key, value, log_decay)) in zip(repeated, record.tokens):
            real = real.to(self.device)  # the leader may live on another one
            conv_ring = ring_update(conv_ring, conv_inputs, state.lengths, real, 2 * self.chunk_size)
            weights = log_decay.new_ones(1).expand(*log_decay.shape, self.sizes.num_levels)  # nobody reads the output
            _, state = loglinear_attention(
                key, key, value, log_decay, weights,
                chunk_size=self.chunk_size, initial_state=state, return_final_state=True, lengths=real,
            )  # fmt: skip
        self._assign(conv_ring=conv_ring, key=state.key, value=state.value, log_decay=state.log_decay, levels=state.levels)

    # ---------------------------------------------------------------------------------------------------- tensors

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of this layer by name."""
        tensors = {name: getattr(self, name) for name in TENSORS + COUNTERS}
        return {name: tensor for name, tensor in tensors.items() if torch.is_tensor(tensor)}

    def _assign(self, **tensors):
        """New contents, written to the old tensors if these keep their addresses; only a static layer insists on that."""
        in_place = self.static or self.keeps_addresses and not torch.is_grad_enabled()  # autograd may need the old ones
        for name, tensor in tensors.items():
            old = getattr(self, name)
            if old is None or not in_place:
                setattr(self, name, self._keep_address(tensor.clone() if self.keeps_addresses else tensor))
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

    Raises:
        ValueError: for `offloading` on a machine without a GPU.
    """

    def __init__(self, config, static: bool = False, offloading: bool = False):
        if offloading and not torch.accelerator.is_available():
            raise ValueError("`offloading` moves the cache from a GPU to the CPU, but this machine has no GPU.")
        super().__init__(layers=_make_layers(config.num_hidden_layers, static), offloading=offloading)

    @property
    def is_compileable(self) -> bool:
        """Whether a compiled step may use this cache: a static one that stays on its device."""
        return not self.offloading and super().is_compileable

    @property
    def lengths(self) -> torch.Tensor | None:
        """Real tokens seen per row, `[B]`; `None` before the first forward pass."""
        return self.layers[0].lengths

    def nbytes(self) -> int:
        """Bytes of all tensors of the cache, without those that `activate_past_recording` keeps."""
        return sum(layer.nbytes() for layer in self.layers)

    def __repr__(self):
        return f"{type(self).__name__}(layers={len(self.layers)}, {_summary(self.layers)})"

    # ---------------------------------------------------------------------------------------------------- files

    def save(self, path: str | os.PathLike) -> None:
        """Writes the cache to one safetensors file, for `load`; the file appears only when it is complete.

        What `activate_past_recording` keeps is not written.

        Args:
            path (`str` or `os.PathLike`): the file. Its folder must exist.

        Raises:
            ValueError: for a cache without tokens, or whose last forward pass failed midway.
        """
        leader = self.layers[0]
        if not leader.started:
            raise ValueError("`save` needs a cache with tokens, but this one is empty.")
        if leader.interrupted:
            raise ValueError("`save` needs a cache whose last forward pass came to its end, but that of this one failed.")
        tensors = {
            f"{index}.{name}": tensor.contiguous()
            for index, layer in enumerate(self.layers)
            for name, tensor in layer.tensors().items()
        }
        counters = {name: int(getattr(leader, name)) for name in ("columns", "rolled_back")}
        about = {"layers": len(self.layers), "static": leader.static, "sizes": leader.sizes._asdict(), **counters}
        path = os.fspath(path)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        with open(temporary, "xb") as file:
            mode = os.stat(file.fileno()).st_mode
        try:
            save_file(tensors, temporary, metadata={"format": FILE_FORMAT, "about": json.dumps(about)})
            os.chmod(temporary, mode)  # that of any new file; `save_file` lets only the owner read it
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike, device: str | torch.device = "cpu") -> "FenwickCache":
        """Reads a cache that `save` wrote. It belongs to the weights that made it: other weights of the same sizes cannot be
        told apart.

        Args:
            path (`str` or `os.PathLike`): the file.
            device (`str` or `torch.device`, defaults to `"cpu"`): where the model runs.

        Raises:
            OSError: if there is no such file.
            ValueError: if the file is damaged or no saved cache.
        """
        path = os.fspath(path)
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"`path` {path!r} is no safetensors file, or is damaged: {error}") from error
        if metadata.get("format") != FILE_FORMAT:
            raise ValueError(
                f"`path` {path!r} must be a cache saved by `FenwickCache.save` ({FILE_FORMAT}), "
                f"but its format is {metadata.get('format')!r}."
            )
        try:
            return cls._loaded(json.loads(metadata["about"]), tensors)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"`path` {path!r} is a damaged cache: {error!r}.") from error

    @classmethod
    def _loaded(cls, about, tensors):
        cache = cls.__new__(cls)
        Cache.__init__(cache, layers=_make_layers(about["layers"], about["static"]))
        leader = cache.layers[0]
        for layer in cache.layers:
            layer.leader, layer.sizes, layer.is_initialized = leader, LayerSizes(**about["sizes"]), True
        leader.columns, leader.rolled_back, leader.has_tokens = about["columns"], about["rolled_back"], True
        for name, tensor in tensors.items():
            index, name = name.split(".")
            layer = cache.layers[int(index)]
            setattr(layer, name, layer._keep_address(tensor))
        for layer in cache.layers:
            layer.device, layer.dtype = layer.conv_ring.device, layer.conv_ring.dtype
        return cache


def _make_layers(number, static):
    return [(StaticFenwickLayer if static else FenwickLayer)() for _ in range(number)]


def _summary(layers):
    leader = layers[0].leader
    if layers[0].state is None:
        return "empty"
    levels, nbytes = layers[0].levels.shape[1], sum(layer.nbytes() for layer in layers)
    return f"tokens={leader.lengths.tolist()}, levels={levels}, bytes={nbytes:,}"


__all__ = ["FenwickCache", "FenwickLayer", "StaticFenwickLayer"]
