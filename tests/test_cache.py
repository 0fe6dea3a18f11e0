"""The Fenwick cache: whatever is done to it, it answers like a fresh forward pass over the tokens that are left in it."""

import copy
import os
import pickle

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from small_models import CHUNK, padded, random_tokens, small_model
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from eval.benchmarks.cache import LENGTHS, cache_bytes
from modeling_loglinear import FenwickCache, LogLinearState, loglinear_attention
from modeling_loglinear import cache_loglinear as module
from modeling_loglinear.attention_loglinear import state_levels

TOLERANCE = 1e-4
MODEL = small_model()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def new_cache(kind, model=MODEL):
    return {
        "fenwick": lambda: FenwickCache(model.config),
        "static": lambda: FenwickCache(model.config, static=True),
        "DynamicCache(config)": lambda: DynamicCache(config=model.config),
        "StaticCache(config)": lambda: StaticCache(config=model.config, max_cache_len=32),
        "DynamicCache()": DynamicCache,
    }[kind]()


KINDS = ("fenwick", "static", "DynamicCache(config)", "StaticCache(config)", "DynamicCache()")


def tensors_of(cache):
    return {
        (index, name): tensor.clone() for index, layer in enumerate(cache.layers) for name, tensor in layer.tensors().items()
    }


def assert_same_tensors(cache, expected):
    found = tensors_of(cache)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def fresh_logits(row, model=MODEL):
    """[tokens of the row, vocabulary] by a forward pass without a cache; `row` is a list of token ids."""
    return model(torch.tensor([row]), use_cache=False).logits[0]


class Conversation:
    """A cache beside the plain record of what is in it: per row a list of columns, each a token id or None for padding."""

    def __init__(self, kind, batch_size):
        self.cache = new_cache(kind)
        self.rows = [[] for _ in range(batch_size)]
        self.longest = 0  # columns ever seen
        self.record_start = None  # (columns, longest) at the last crop while the past is recorded

    @property
    def columns(self):
        return len(self.rows[0])

    def forward(self, ids, mask):
        """Appends columns ids [B, T]; checks the outputs of all of them, padding included."""
        past = [len([token for token in row if token is not None]) for row in self.rows]
        if self.recording and self.record_start is None:
            self.record_start = self.columns, self.longest
        logits = MODEL(ids, attention_mask=mask, past_key_values=self.cache).logits
        for index, row in enumerate(self.rows):
            row += [token if real else None for token, real in zip(ids[index].tolist(), mask[index].tolist())]
            tokens = [token for token in row if token is not None]
            expected = fresh_logits(tokens) if tokens else torch.zeros(1, logits.shape[-1])
            seen = past[index] + mask[index].cumsum(0)  # real tokens up to each column
            expected = torch.where((seen > 0)[:, None], expected[(seen - 1).clamp(min=0)], 0)
            assert (logits[index] - expected).abs().max() < TOLERANCE, (index, self.rows)
        self.longest = max(self.longest, self.columns)
        self.check_counters()

    @property
    def recording(self):
        return bool(self.cache.layers) and self.cache.layers[0].record_past

    def check_counters(self):
        assert int(self.cache.get_seq_length()) == self.columns
        lengths = [sum(token is not None for token in row) for row in self.rows]
        assert self.cache.layers[0].lengths.tolist() == lengths

    def extend(self, columns, seed, density):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(5, 97, (len(self.rows), columns), generator=generator)
        mask = (torch.rand(ids.shape, generator=generator) < density).long()
        self.forward(ids, mask)

    def decode(self, steps, seed, density):
        for step in range(steps):
            self.extend(1, seed + step, density)

    def crop(self, n):
        """A crop within reach removes columns; one beyond is refused and changes nothing."""
        plain = min(self.columns, CHUNK - (self.longest - self.columns))
        recorded = self.columns - self.record_start[0] if self.record_start else 0
        if n > max(plain, recorded):
            before = tensors_of(self.cache)
            with pytest.raises(ValueError, match=rf"`crop\(-{n}\)` reaches too far: at most {max(plain, recorded)} of"):
                self.cache.crop(-n)
            assert_same_tensors(self.cache, before)
            return
        self.cache.crop(-n)
        self.rows = [row[: len(row) - n] for row in self.rows]
        if n > plain:
            self.longest = max(self.record_start[1], self.columns)
        self.record_start = None
        if self.cache.layers and self.cache.layers[0].lengths is not None:
            self.check_counters()

    def record(self):
        self.cache.activate_past_recording()

    def choose(self, rows):
        self.record_start = None
        self.rows = [list(self.rows[index]) for index in rows]

    def reorder(self, seed):
        rows = torch.randint(len(self.rows), (len(self.rows),), generator=torch.Generator().manual_seed(seed))
        self.cache.reorder_cache(rows)
        self.choose(rows.tolist())

    def select(self, seed):
        keep = torch.rand(len(self.rows), generator=torch.Generator().manual_seed(seed)) < 0.6
        keep[seed % len(self.rows)] = True
        positions = keep.nonzero()[:, 0]
        self.cache.batch_select_indices(keep if seed % 2 else positions)
        self.choose(positions.tolist())

    def repeat(self, times):
        if len(self.rows) * times <= 4:
            self.cache.batch_repeat_interleave(times)
            self.choose([index for index in range(len(self.rows)) for _ in range(times)])

    def copied(self, how):
        """Goes on with a copy; the old one is used up on other tokens, which must not show in the copy."""
        old = self.cache
        self.cache = copy.deepcopy(old) if how == "deepcopy" else pickle.loads(pickle.dumps(old))
        if self.columns:
            MODEL(random_tokens(len(self.rows), 1, seed=7), past_key_values=old)
            MODEL(random_tokens(len(self.rows), 20, seed=7), past_key_values=old)

    def saved(self, folder):
        if self.columns:
            self.cache.save(folder / "cache.safetensors")
            self.cache = FenwickCache.load(folder / "cache.safetensors")
            self.record_start = None


SEED = st.integers(0, 10**6)
DENSITY = st.sampled_from([1.0, 0.7, 0.2])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 3 * CHUNK), SEED, DENSITY),
        st.tuples(st.just("decode"), st.integers(1, 2 * CHUNK + 2), SEED, DENSITY),
        st.tuples(st.just("crop"), st.integers(0, CHUNK)),
        st.tuples(st.just("crop"), st.integers(CHUNK + 1, 3 * CHUNK)),
        st.tuples(st.just("record")),
        st.tuples(st.just("reorder"), SEED),
        st.tuples(st.just("select"), SEED),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("copied"), st.sampled_from(["deepcopy", "pickle"])),
        st.tuples(st.just("saved")),
    ),
    min_size=3,
    max_size=9,
)


@settings(derandomize=True, deadline=None, max_examples=40, database=None)
@given(kind=st.sampled_from(["fenwick", "static"]), batch_size=st.integers(1, 3), operations=OPERATIONS)
@example("fenwick", 2, [("record",), ("extend", 40, 1, 0.7), ("decode", 34, 2, 0.7), ("crop", 60), ("decode", 3, 3, 1.0)])
@example("static", 2, [("record",), ("decode", 34, 2, 0.7), ("extend", 40, 1, 0.7), ("crop", 60), ("crop", 9)])
@example("fenwick", 1, [("extend", 33, 1, 1.0), ("crop", 16), ("decode", 2, 1, 1.0), ("crop", 2), ("crop", 1)])
def test_any_sequence_of_operations(tmp_path_factory, kind, batch_size, operations):
    """Prefill, decoding, continuation, crop, reorder, select, repeat, copies and files, in any order on a ragged batch, with
    padding anywhere: all outputs equal those of the surviving tokens alone, and a crop beyond reach changes nothing."""
    conversation = Conversation(kind, batch_size)
    folder = tmp_path_factory.mktemp("cache")
    for name, *arguments in operations:
        getattr(conversation, name)(*([folder] if name == "saved" else arguments))
    conversation.decode(2, 0, 1.0)
    conversation.extend(CHUNK + 3, 1, 0.7)


# ----------------------------------------------------------------------------------------------------------- taking back


@pytest.mark.parametrize("kind", ["fenwick", "static"])
def test_rollback_is_exact(kind):
    """Inside the current chunk a crop is bit-equal to never having seen the tokens; across chunk borders equal to rounding."""
    ids, other = random_tokens(2, 60), random_tokens(2, 30, seed=1)
    for start, stop, exact in ((41, 48, True), (41, 57, False), (48, 64, False)):
        cache = new_cache(kind)
        MODEL(ids[:, :start], past_key_values=cache)
        expected = copy.deepcopy(cache)
        for token in random_tokens(2, stop - start, seed=2).T:
            MODEL(token[:, None], past_key_values=cache)
        cache.crop(start - stop)
        for token in other.T:
            found = MODEL(token[:, None], past_key_values=cache).logits
            wanted = MODEL(token[:, None], past_key_values=expected).logits
            assert torch.equal(found, wanted) if exact else (found - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_past_can_be_undone_to_any_point(kind):
    """With `activate_past_recording` a prefill and single steps of several chunks can be undone anywhere, also to nothing;
    after `crop(0)` only the plain reach is left."""
    ids = random_tokens(1, 5 * CHUNK)
    for left in (0, 1, CHUNK, 2 * CHUNK + 5, 3 * CHUNK + 2):
        cache = new_cache(kind)
        if kind == "DynamicCache()":  # has no layers yet
            MODEL(ids[:, :1], past_key_values=cache)
            cache.reset()
        cache.activate_past_recording()
        MODEL(ids[:, : 3 * CHUNK], past_key_values=cache)
        for position in range(3 * CHUNK, 5 * CHUNK):
            MODEL(ids[:, position : position + 1], past_key_values=cache)
        cache.crop(left - 5 * CHUNK)
        assert int(cache.get_seq_length()) == left
        rest = MODEL(ids[:, left:], past_key_values=cache).logits
        assert (rest[0] - fresh_logits(ids[0].tolist())[left:]).abs().max() < TOLERANCE
        cache.crop(0)
        with pytest.raises(ValueError, match="reaches too far: at most 16 of 80 columns"):
            cache.crop(-CHUNK - 1)


def test_crop_takes_a_negative_number():
    """A positive number and more columns than there are get a clear error, also on an empty cache."""
    cache = FenwickCache(MODEL.config)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"`crop\(-1\)` reaches too far: at most 0 of 0 columns"):
        cache.crop(-1)
    MODEL(random_tokens(1, 5), past_key_values=cache)
    with pytest.raises(ValueError, match="takes minus the number of tokens to remove, but got 3"):
        cache.crop(3)
    with pytest.raises(ValueError, match="at most 5 of 5 columns"):
        cache.crop(-6)


# ----------------------------------------------------------------------------------------------------------- the interface


@pytest.mark.parametrize("kind", KINDS)
def test_library_interface(kind):
    """Every method that `generate()` and users call on a cache, for every way of making one; columns count once for all
    layers."""
    cache = new_cache(kind)
    assert cache.get_seq_length() == 0 and cache.batch_size == -1
    ids, mask = padded([random_tokens(20), random_tokens(9, seed=1)], "left")
    output = MODEL(ids, attention_mask=mask, past_key_values=cache)
    assert output.past_key_values is cache and output.cache is cache
    assert len(cache) == MODEL.config.num_hidden_layers and cache.batch_size == 2
    assert [int(cache.get_seq_length(index)) for index in range(2)] == [20, 20]
    assert cache.layers[1].leader.lengths.tolist() == [20, 9]
    length, offset = cache.get_mask_sizes(3, 0)
    assert (int(length), offset) == (23, 0)
    assert cache.get_max_length() == -1
    assert cache.is_compileable == ("static" in kind.lower()) and cache.is_croppable
    assert cache.is_sliding == [False, False]
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    cache.batch_select_indices(torch.tensor([0, 1]))
    assert cache.layers[0].lengths.tolist() == [9, 20]
    columns = cache.get_seq_length()
    cache.crop(-4)
    assert (int(columns), int(cache.get_seq_length())) == (20, 16)
    assert cache.layers[0].lengths.tolist() == [5, 16]
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    cache.activate_past_recording()
    assert cache.layers[1].record_past and not cache.is_compileable
    assert "tokens=[5, 16], levels=2, bytes=" in repr(cache)
    with pytest.raises(TypeError, match="it belongs to a LogLinear model"):
        cache.update(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4), 0)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    after_reset = MODEL(ids, attention_mask=mask, past_key_values=cache).logits
    assert torch.allclose(after_reset, output.logits, atol=1e-5)
    cache.reset()
    if not cache.layers[0].static:  # else the tensors stay as they are
        assert MODEL(ids[:1], past_key_values=cache).logits.shape[0] == cache.batch_size == 1


def test_repr_says_tokens_levels_and_bytes():
    """`repr` of an empty and of a used cache; the bytes are those of all tensors."""
    cache = FenwickCache(MODEL.config)
    assert repr(cache) == "FenwickCache(layers=2, empty)"
    MODEL(random_tokens(2, 20), past_key_values=cache)
    nbytes = sum(tensor.nbytes for tensor in tensors_of(cache).values())
    assert repr(cache) == f"FenwickCache(layers=2, tokens=[20, 20], levels=2, bytes={nbytes:,})"
    assert repr(cache.layers[1]).startswith("FenwickLayer(tokens=[20, 20], levels=2, bytes=")


def test_offloading_needs_a_gpu(monkeypatch):
    """`offloading=True` on a machine without a GPU gets a clear error."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match="this machine has no GPU"):
        FenwickCache(MODEL.config, offloading=True)


def test_static_equals_dynamic_and_keeps_addresses():
    """A static cache gives the same numbers and never moves a tensor: prefill, steps, masks, reorder, crop, reset."""
    dynamic, static = FenwickCache(MODEL.config), FenwickCache(MODEL.config, static=True)
    ids, mask = padded([random_tokens(40), random_tokens(23, seed=1)], "mixed")
    addresses = None

    def both(*pieces, **kwargs):
        nonlocal addresses
        for piece in pieces:
            found, wanted = (MODEL(piece, past_key_values=cache, **kwargs).logits for cache in (static, dynamic))
            assert torch.allclose(found, wanted, atol=1e-6)
        now = [tensor.data_ptr() for layer in static.layers for tensor in layer.tensors().values()]
        addresses = addresses or now
        assert now == addresses

    def at_both(method, *arguments):
        for cache in (static, dynamic):
            getattr(cache, method)(*arguments)

    both(ids, attention_mask=mask)
    both(*random_tokens(20, 2, 1, seed=2))
    both(random_tokens(2, 1, seed=3), attention_mask=torch.tensor([[1], [0]]))
    at_both("reorder_cache", torch.tensor([1, 0]))
    at_both("crop", -7)
    both(random_tokens(2, 33, seed=4))
    at_both("reset")
    both(ids, attention_mask=mask)


@pytest.mark.parametrize("kind", ["fenwick", "DynamicCache(config)", "static"])
def test_cache_from_inference_mode(kind):
    """A cache filled in `torch.inference_mode` goes on outside of it: steps, pieces, reset, crop, other rows."""
    ids = random_tokens(1, 60)
    expected = fresh_logits(ids[0].tolist())
    for action in ("step", "piece", "crop", "reset", "reorder", "repeat"):
        cache = new_cache(kind)
        with torch.inference_mode():
            MODEL(ids[:, :40], past_key_values=cache)
        done = {"crop": 37, "reset": 0}.get(action, 40)
        if action == "crop":
            cache.crop(-3)
        elif action == "reset":
            cache.reset()
        elif action == "reorder":
            cache.reorder_cache(torch.tensor([0]))
        elif action == "repeat":
            cache.batch_repeat_interleave(2)
            MODEL(random_tokens(2, 1), past_key_values=cache)
            cache.crop(-1)
            cache.batch_select_indices(torch.tensor([1]))
        steps = ids[:, done:].split(1 if action in ("step", "crop") else 60, dim=1)
        found = torch.cat([MODEL(step, past_key_values=cache).logits for step in steps], 1)[0]
        assert (found - expected[done:]).abs().max() < TOLERANCE


def test_a_row_without_new_tokens_keeps_its_cache():
    """Padding in one row, in a step or a longer piece, leaves everything of that row as it was, bit for bit."""
    cache = FenwickCache(MODEL.config)
    MODEL(random_tokens(2, 37), past_key_values=cache)

    def row_one():
        state = cache.layers[1].state
        tail = torch.arange(int(state.merged_chunks[1]) * CHUNK, int(state.lengths[1])) % (2 * CHUNK)
        rings = (state.key, state.value, state.log_decay, cache.layers[1].conv_ring, cache.layers[0].hidden_ring)
        read = int(state.merged_chunks[1]) > 0
        return [ring[1, tail] for ring in rings] + [state.levels[1, 0]] * read + [state.merged_chunks[1], state.lengths[1]]

    before = [tensor.clone() for tensor in row_one()]
    mask = torch.tensor([[1], [0]])
    for columns in (1, 5, 40, *[1] * 20):
        MODEL(random_tokens(2, columns, seed=columns), attention_mask=mask.expand(2, columns), past_key_values=cache)
    assert all(torch.equal(a, b) for a, b in zip(before, row_one(), strict=True))


def test_gradients_through_a_cache():
    """With gradients on, a one-token forward does not overwrite what the backward pass needs."""
    with torch.enable_grad():
        ids = random_tokens(1, 30)
        cache = FenwickCache(MODEL.config)
        logits = [MODEL(piece, past_key_values=cache).logits for piece in ids.split([28, 1, 1], dim=1)]
        found = torch.autograd.grad(torch.cat(logits, 1).sum(), MODEL.backbone.embeddings.weight)[0]
        whole = MODEL(ids, use_cache=False).logits.sum()
        expected = torch.autograd.grad(whole, MODEL.backbone.embeddings.weight)[0]
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


def test_gradients_after_replayed_steps():
    """A cache whose tensors have kept their addresses, as for a CUDA graph, still gives a piece what its gradient needs."""
    cache, ids = FenwickCache(MODEL.config), random_tokens(1, 70)
    for layer in cache.layers:
        layer.keeps_addresses = True
    MODEL(ids[:, :30], past_key_values=cache)
    with torch.enable_grad():
        logits = [MODEL(piece, past_key_values=cache).logits for piece in ids[:, 30:].split([20, 19, 1], dim=1)]
        torch.cat(logits, 1).sum().backward()
    assert (torch.cat(logits, 1)[0] - fresh_logits(ids[0].tolist())[30:]).abs().max() < TOLERANCE
    assert MODEL.backbone.embeddings.weight.grad.isfinite().all()
    MODEL.zero_grad()


@pytest.mark.parametrize("kind", ["fenwick", "static"])
def test_a_pass_that_fails_midway(kind, tmp_path):
    """Some layers have then seen its tokens and others not: the cache says so instead of going on; an empty one is as new."""
    cache, ids = new_cache(kind), random_tokens(2, 40)

    def failing(ids):
        def fail(*_):
            raise torch.OutOfMemoryError("no memory left")

        hook = MODEL.backbone.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            MODEL(ids, past_key_values=cache)
        hook.remove()

    failing(ids[:, :7])
    MODEL(ids, past_key_values=cache)
    for piece in (random_tokens(2, 33), random_tokens(2, 1)):
        failing(piece)
        with pytest.raises(ValueError, match="`cache` was left by a forward pass that did not come to its end"):
            MODEL(piece, past_key_values=cache)
        with pytest.raises(ValueError, match="whose last forward pass came to its end"):
            cache.save(tmp_path / "cache")
        cache.reset()
        found = MODEL(ids, past_key_values=cache).logits
        assert (found - MODEL(ids, use_cache=False).logits).abs().max() < TOLERANCE


# ----------------------------------------------------------------------------------------------------------- wrong caches


def test_cache_of_another_batch_or_model_is_refused():
    """Batch size, sizes, dtype, depth and foreign caches: an error that names what differs, and the cache is unharmed."""
    cache = FenwickCache(MODEL.config)
    ids = random_tokens(2, 20)
    MODEL(ids, past_key_values=cache)
    before = tensors_of(cache)

    def refused(message, model, ids, cache=cache):
        with pytest.raises(ValueError, match=message):
            model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=message):
            model(ids[:, :1], past_key_values=cache)

    refused("`batch_size` is 2 in the cache and 3 here", MODEL, random_tokens(3, 4))
    refused("`state_size` is 8 in the cache and 16 here", small_model(state_size=16), ids)
    refused("`num_heads` is 4 in the cache and 2 here, `head_dim`", small_model(num_heads=2, head_dim=32), ids)
    refused("`num_levels` is 7 in the cache and 8 here", small_model(max_position_embeddings=128), ids)
    refused("`chunk_size` is 16 in the cache and 32 here", small_model(chunk_size=32), ids)
    refused("`dtype` is torch.float32 in the cache and torch.bfloat16 here", small_model().bfloat16(), ids)
    refused("2 layers, but this model has 3", small_model(num_hidden_layers=3), ids)
    assert_same_tensors(cache, before)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=97)
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    refused("`cache` is a DynamicCache, but must be", MODEL, ids, llama(ids).past_key_values)
    refused("`cache` is a tuple, but must be", MODEL, ids, ((ids, ids),))
    with pytest.raises(TypeError, match="it belongs to a LogLinear model"):
        llama(ids, past_key_values=cache)


# ----------------------------------------------------------------------------------------------------------- reuse and files


@pytest.mark.parametrize("kind", ["fenwick", "static", "DynamicCache(config)"])
def test_prefix_reuse(kind):
    """A cache copied after a system prompt, one row or repeated to a batch, gives what full prompts give."""
    prefix = random_tokens(45)
    suffixes = [random_tokens(n, seed=n) for n in (3, 21, 12)]
    cache = new_cache(kind)
    MODEL(prefix[None], past_key_values=cache)
    before = tensors_of(cache)
    expected = [fresh_logits([*prefix.tolist(), *suffix.tolist()])[45:] for suffix in suffixes]
    for suffix, wanted in zip(suffixes, expected):
        found = MODEL(suffix[None], past_key_values=copy.deepcopy(cache)).logits[0]
        assert (found - wanted).abs().max() < TOLERANCE
    batch = copy.deepcopy(cache)
    batch.batch_repeat_interleave(3)
    for side in ("left", "right"):
        ids, mask = padded(suffixes, side)
        found = MODEL(ids, attention_mask=mask, past_key_values=copy.deepcopy(batch)).logits
        for row, wanted in enumerate(expected):
            assert (found[row, mask[row] > 0] - wanted).abs().max() < TOLERANCE
    assert_same_tensors(cache, before)


@pytest.mark.parametrize("kind", ["fenwick", "static"])
def test_saved_cache_is_the_same(kind, tmp_path):
    """`load(save(cache))` has every tensor and counter, also after a crop and with padding, and a text path works."""
    cache = new_cache(kind)
    ids, mask = padded([random_tokens(40), random_tokens(9, seed=1)], "mixed")
    MODEL(ids, attention_mask=mask, past_key_values=cache)
    cache.crop(-3)
    cache.save(str(tmp_path / "a"))
    loaded = FenwickCache.load(str(tmp_path / "a"))
    assert_same_tensors(loaded, tensors_of(cache))
    assert repr(loaded) == repr(cache) and loaded.is_compileable == cache.is_compileable
    assert loaded.layers[0].max_rollback() == cache.layers[0].max_rollback() == CHUNK - 3
    piece = random_tokens(2, 5, seed=3)
    assert torch.equal(MODEL(piece, past_key_values=loaded).logits, MODEL(piece, past_key_values=cache).logits)
    with pytest.raises(ValueError, match="`batch_size` is 2 in the cache and 1 here"):
        MODEL(piece[:1], past_key_values=FenwickCache.load(tmp_path / "a"))
    (tmp_path / "plain").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode  # who may read a new file may read it
    half = small_model().bfloat16()
    cache = new_cache(kind, half)
    half(ids, attention_mask=mask, past_key_values=cache)
    cache.save(tmp_path / "half")
    loaded = FenwickCache.load(tmp_path / "half")
    assert torch.equal(half(piece, past_key_values=loaded).logits, half(piece, past_key_values=cache).logits)


def test_wrong_files(tmp_path, monkeypatch):
    """No file, a text, a damaged file and foreign safetensors: a clear error each; a failed `save` leaves the old file."""
    cache = FenwickCache(MODEL.config)
    with pytest.raises(ValueError, match="`save` needs a cache with tokens"):
        cache.save(tmp_path / "empty")
    MODEL(random_tokens(1, 20), past_key_values=cache)
    path = tmp_path / "cache"
    cache.save(path)
    content = path.read_bytes()
    with pytest.raises(OSError):
        FenwickCache.load(tmp_path / "missing")
    with pytest.raises(OSError):
        cache.save(tmp_path / "no folder" / "cache")
    for name, wrong in (("text", b"some text, no tensors"), ("half", content[: len(content) // 2]), ("nothing", b"")):
        (tmp_path / name).write_bytes(wrong)
        with pytest.raises(ValueError, match="is no safetensors file, or is damaged"):
            FenwickCache.load(tmp_path / name)
    save_file({"weight": torch.zeros(2)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match=r"must be a cache saved by `FenwickCache.save` \(loglinear-fenwick-cache-1\)"):
        FenwickCache.load(tmp_path / "foreign")

    for about in ("{", '{"layers": 1, "static": false, "sizes": {}}'):
        save_file({"weight": torch.zeros(2)}, tmp_path / "damaged", {"format": module.FILE_FORMAT, "about": about})
        with pytest.raises(ValueError, match="is a damaged cache"):
            FenwickCache.load(tmp_path / "damaged")

    def full_disk(tensors, file, metadata):
        with open(file, "wb") as stream:
            stream.write(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(module, "save_file", full_disk)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError, match="disk full"):
        cache.save(path)
    assert path.read_bytes() == content and sorted(os.listdir(tmp_path)) == before


# ----------------------------------------------------------------------------------------------------------- size


def test_bytes_grow_by_at_most_a_level_per_doubling():
    """A cache made for 1k, 4k, 16k, 64k and 1M tokens has at most one level more per doubling, and a model with L levels no
    more than L blocks of state, however long the text."""
    by_length = {length: cache_bytes(length) for length in LENGTHS}
    for shorter, longer in zip(LENGTHS, LENGTHS[1:]):
        doublings = (longer - 1).bit_length() - (shorter - 1).bit_length()
        (small, level), (large, _) = by_length[shorter], by_length[longer]
        assert 0 < large - small <= doublings * level
    levels = (max(LENGTHS) - 1).bit_length() + 1
    tail = by_length[1_000][0] - state_levels(11, 64) * by_length[1_000][1]
    assert all(nbytes - tail <= levels * level for nbytes, level in by_length.values())


def test_bytes_do_not_grow_with_the_text():
    """Real runs of a model with 7 levels, from 100 to 3200 tokens in pieces: the same bytes, those of its empty cache."""
    cache = FenwickCache(MODEL.config)
    sizes = set()
    for tokens in (100, 100, 200, 400, 800, 1600):
        MODEL(random_tokens(1, tokens), past_key_values=cache)
        sizes.add(cache.nbytes())
    assert cache.lengths.tolist() == [3200] and len(sizes) == 1


def test_a_million_tokens():
    """1,000,000 tokens through the operator in pieces of 2^16: the state keeps its size, and queries at the end recall the
    first token and everything else as the formula says, summed directly in float64."""
    T, piece, L, N, P = 1_000_000, 1 << 16, 15, 2, 2
    generator = torch.Generator().manual_seed(0)
    k, q = (torch.randn(1, T, 1, N, generator=generator) for _ in range(2))
    v = torch.randn(1, T, 1, P, generator=generator)
    v[0, 0] = 1000.0  # what is to be recalled
    g = -torch.rand(1, T, 1, generator=generator) * 2e-6
    weights = torch.rand(1, T, 1, L, generator=generator)
    state, outputs, sizes = None, [], set()
    for start in range(0, T, piece):
        tokens = [x[:, start : start + piece] for x in (q, k, v, g, weights)]
        output, state = loglinear_attention(*tokens, initial_state=state, return_final_state=True)
        outputs.append(output)
        sizes.add(sum(tensor.nbytes for tensor in state))
    assert len(sizes) == 1 and isinstance(state, LogLinearState) and state.lengths.tolist() == [T]
    outputs = torch.cat(outputs, 1)[0, :, 0].double()
    j = torch.arange(T)
    total = g[0, :, 0].double().cumsum(0)
    for i in (70_000, 524_288, 777_777, T - 1):
        level = torch.frexp((i ^ j[: i + 1]).double()).exponent.long().clamp(max=L - 1)
        weight = weights[0, i, 0].double()[level] * (total[i] - total[: i + 1]).exp()
        terms = (weight * (k[0, : i + 1, 0].double() @ q[0, i, 0].double()))[:, None] * v[0, : i + 1, 0].double()
        expected = terms.sum(0)
        assert terms[0].abs().max() > 1.0  # the first token is in it
        assert (outputs[i] - expected).abs().max() < 1e-4 * terms.abs().sum(0).max()
        assert (outputs[i] - expected).abs().max() < 0.05 * terms[0].abs().max()
