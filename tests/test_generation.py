"""Every way of generating: with the Fenwick cache each one writes what the model without a cache writes.

The cases of the library's own generation tests, and where they are here:

| case | test |
|---|---|
| greedy, with and without cache | test_greedy, test_without_cache |
| every kind of cache: unset, dynamic, static, `DynamicCache`, `StaticCache` | test_greedy |
| quantized, offloaded without a GPU, of another batch | test_refused_caches |
| left, right, mixed and scattered padding; rows that end early | test_ragged_batches, test_rows_that_end_early |
| sampling, `num_return_sequences` | test_sampling |
| beam search, beam sampling, `num_return_sequences` | test_beams, test_beams_of_a_ragged_batch |
| group beams, constrained beams, contrastive search, DoLa | test_modes_that_left_the_library |
| assisted decoding (other, same, sampled, long drafts, early exit), prompt lookup, its end of text | test_assisted_* |
| from `inputs_embeds` (greedy, beams, static cache, continued) | test_inputs_embeds |
| compiled, `fullgraph=True`, no recompilation | test_compiled_step_is_one_graph, test_compiled_generate |
| `logits_to_keep` | test_logits_to_keep |
| scores, logits, hidden states, dict outputs | test_outputs |
| continue from a returned cache, chat, padding inside the new piece | test_continue_*, test_chat |
| prefill in pieces (`prefill_chunk_size`), also after a cache | test_prefill_in_pieces* |
| longer than `max_position_embeddings`, default length | test_longer_than_max_position_embeddings |
| classifier-free guidance, custom generation loop, no prompt | test_other_entries |
| streaming, stopping, stop strings, pipeline | test_streaming, test_stopping, test_pipeline |
| steps replayed as a CUDA graph (every cache, beams, ragged rows, going on with a cache), its failure | test_replayed_* |
| static (compiled, replayed) and offloaded on a GPU | test_caches_on_a_gpu, test_an_offloaded_* |
| no step waits for the device | test_a_step_never_waits_* |
| `torch.inference_mode`, several threads | test_inference_mode, test_threads |
"""

import copy
import functools
import threading

import pytest
import torch
from small_models import CHUNK, padded, random_tokens, small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation import utils as generation_utils

from modeling_loglinear import FenwickCache, LogLinearForCausalLM, graph_loglinear, modeling_loglinear
from modeling_loglinear.cache_loglinear import FenwickLayer
from modeling_loglinear.modeling_loglinear import CACHE_NAME

MODEL = small_model()
DRAFT = small_model(seed=1, num_hidden_layers=1)
NEW = 2 * CHUNK + 5  # new tokens: across several chunk borders
ROWS = [random_tokens(n, seed=n) for n in (37, 5, 21)]


def greedy(row, new_tokens=NEW):
    """The definition: the most likely token of a forward pass over everything so far, `new_tokens` times."""
    return list(greedy_after(tuple(row.tolist()), new_tokens))


@functools.cache
def greedy_after(tokens, new_tokens):
    written = []
    with torch.no_grad():
        for _ in range(new_tokens):
            logits = MODEL(torch.tensor([[*tokens, *written]]), use_cache=False).logits
            written.append(logits[0, -1].argmax().item())
    return written


EXPECTED = [greedy(row) for row in ROWS]


def generate(input_ids, model=MODEL, **kwargs):
    """New tokens as lists."""
    kwargs = dict(do_sample=False, max_new_tokens=NEW) | kwargs
    return model.generate(input_ids, **kwargs)[:, input_ids.shape[1] :].tolist()


def assert_rows(ids, new_tokens, **kwargs):
    """The batch writes what single rows write, and the logits of every step are theirs, which sees more than the best token."""
    kwargs = dict(do_sample=False, max_new_tokens=new_tokens, return_dict_in_generate=True, output_logits=True) | kwargs
    output = MODEL.generate(ids, **kwargs)
    written, logits = output.sequences[:, ids.shape[1] :], torch.stack(output.logits, 1)
    assert written.tolist() == [expected[:new_tokens] for expected in EXPECTED]
    with torch.no_grad():
        for row, new, found in zip(ROWS, written, logits):
            expected = MODEL(torch.cat([row, new])[None], use_cache=False).logits[0, len(row) - 1 : -1]
            assert (found - expected).abs().max() < 1e-4


def both(input_ids=None, **kwargs):
    """The same call with and without a cache; also the two must agree."""
    torch.manual_seed(0)
    cached = MODEL.generate(input_ids, **kwargs)
    torch.manual_seed(0)
    uncached = MODEL.generate(input_ids, use_cache=False, **kwargs)
    assert torch.equal(cached, uncached)
    return cached


@pytest.fixture(scope="module")
def tokenizer():
    """One word per token: w0 ... w96; w0 pads on the left."""
    core = Tokenizer(models.WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", padding_side="left")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} w9 {% endfor %}"
    return tokenizer


def text(tokens):
    return " ".join(f"w{int(token)}" for token in tokens)


# ----------------------------------------------------------------------------------------------------------- greedy, caches


CACHES = {
    "unset": lambda: {},
    "dynamic": lambda: {"cache_implementation": "dynamic"},
    "static": lambda: {"cache_implementation": "static"},
    "FenwickCache": lambda: {CACHE_NAME: FenwickCache(MODEL.config)},
    "DynamicCache(config)": lambda: {CACHE_NAME: DynamicCache(config=MODEL.config)},
    "DynamicCache()": lambda: {CACHE_NAME: DynamicCache()},
    "StaticCache": lambda: {CACHE_NAME: StaticCache(config=MODEL.config, max_cache_len=8)},
}


@pytest.mark.parametrize("kind", CACHES)
def test_greedy(kind):
    """Greedy text of every kind of cache equals the definition; a cache that was given holds the tokens afterwards."""
    cache = CACHES[kind]()
    assert generate(ROWS[0][None], **cache) == [EXPECTED[0]]
    if CACHE_NAME in cache:
        assert int(cache[CACHE_NAME].get_seq_length()) == len(ROWS[0]) + NEW - 1
        assert cache[CACHE_NAME].layers[0].lengths.tolist() == [len(ROWS[0]) + NEW - 1]


def test_refused_caches():
    """`quantized` and, without a GPU, `offloaded` get a clear error; so does a cache of another batch size."""
    with pytest.raises((ValueError, ImportError), match="[Qq]uant"):
        generate(ROWS[0][None], cache_implementation="quantized")
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="this machine has no GPU"):
            generate(ROWS[0][None], cache_implementation="offloaded")
    cache = FenwickCache(MODEL.config)
    generate(ROWS[0][None], **{CACHE_NAME: cache})
    with pytest.raises(ValueError, match="`batch_size` is 1 in the cache and 2 here"):
        generate(random_tokens(2, 90), **{CACHE_NAME: cache})


@pytest.mark.parametrize("side", ["left", "right", "mixed"])
@pytest.mark.parametrize("implementation", [None, "static"])
def test_ragged_batches(side, implementation):
    """A batch of rows of different lengths, padded on any side, writes what the single rows write."""
    ids, mask = padded(ROWS, side)
    assert_rows(ids, NEW, attention_mask=mask, cache_implementation=implementation)


def test_scattered_padding():
    """Padding in the middle of the prompt, with and without a cache."""
    ids = torch.zeros(1, 60, dtype=torch.long)
    mask = torch.zeros_like(ids)
    place = torch.randperm(59, generator=torch.Generator().manual_seed(0))[: len(ROWS[0])].sort().values
    ids[0, place], mask[0, place] = ROWS[0], 1
    assert generate(ids, attention_mask=mask) == [EXPECTED[0]]
    assert generate(ids, attention_mask=mask, use_cache=False, max_new_tokens=5) == [EXPECTED[0][:5]]


@pytest.mark.parametrize("side", ["left", "mixed"])
def test_without_cache(side):
    """`use_cache=False` writes the same text, also for ragged batches."""
    ids, mask = padded(ROWS, side)
    assert_rows(ids, 8, attention_mask=mask, use_cache=False)


def test_rows_that_end_early():
    """A row that meets its end token is filled with padding, the others go on as if alone."""
    end = EXPECTED[1][6]
    ids, mask = padded(ROWS, "left")
    found = generate(ids, attention_mask=mask, eos_token_id=end, pad_token_id=0)
    for row, expected in zip(found, EXPECTED):
        stop = expected.index(end) + 1 if end in expected else len(expected)
        assert row == (expected[:stop] + [0] * NEW)[: len(row)]


# ----------------------------------------------------------------------------------------------------------- sampling, beams


def test_sampling():
    """With the same seed sampling draws the same text with and without a cache; `num_return_sequences` repeats rows."""
    ids, mask = padded(ROWS, "left")
    kwargs = dict(do_sample=True, temperature=0.7, top_k=20, max_new_tokens=20, attention_mask=mask)
    both(ids, **kwargs)
    several = both(ids, num_return_sequences=3, **kwargs)
    assert several.shape == (9, ids.shape[1] + 20) and len({tuple(row) for row in several.tolist()}) > 3


@pytest.mark.parametrize("do_sample", [False, True])
def test_beams(do_sample):
    """Beam search and beam sampling with several returned sequences equal those without a cache, and with a static one."""
    ids, mask = padded(ROWS[:2], "left")
    kwargs = dict(num_beams=3, num_return_sequences=2, do_sample=do_sample, max_new_tokens=20, attention_mask=mask)
    expected = both(ids, **kwargs)
    torch.manual_seed(0)
    assert torch.equal(MODEL.generate(ids, cache_implementation="static", **kwargs), expected)


def test_beams_of_a_ragged_batch():
    """Beams of a ragged batch are those of the single rows."""
    kwargs = dict(num_beams=4, length_penalty=0.0)
    expected = [generate(row[None], **kwargs)[0] for row in ROWS]
    ids, mask = padded(ROWS, "mixed")
    assert generate(ids, attention_mask=mask, **kwargs) == expected


@pytest.mark.parametrize(
    "mode, kwargs",
    [
        ("GROUP_BEAM_SEARCH", dict(num_beams=4, num_beam_groups=2, diversity_penalty=1.0)),
        ("CONSTRAINED_BEAM_SEARCH", dict(num_beams=2, force_words_ids=[[5]])),
        ("CONTRASTIVE_SEARCH", dict(penalty_alpha=0.6, top_k=4)),
        ("DOLA_GENERATION", dict(dola_layers="high")),
    ],
)
def test_modes_that_left_the_library(mode, kwargs):
    """These modes are code from the Hub today; the library says so. If one comes back, this asks for its test."""
    repository = generation_utils.GENERATION_MODES_MAPPING[generation_utils.GenerationMode[mode]]
    assert "/" in repository, f"{mode} is in the library again: test it"
    with pytest.raises(ValueError, match="trust_remote_code"):
        generate(ROWS[0][None], **kwargs)


# ----------------------------------------------------------------------------------------------------------- assisted


STATIC_ASSISTED = CACHE_NAME == "cache"  # transformers 5.17 refuses a static cache here


@pytest.mark.parametrize("draft", ["other", "same", "long", "growing", "static"])
def test_assisted_decoding(draft):
    """A draft model changes the speed, never the text: one that is always wrong, one that is always right, drafts longer than
    the chunk that a cache can take back by itself."""
    assistant = small_model() if draft in ("same", "growing") else DRAFT
    assistant.generation_config.num_assistant_tokens = 99 if draft == "long" else 7
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic" if draft == "growing" else "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    kwargs = {"cache_implementation": "static"} if draft == "static" else {}
    if draft == "static" and not STATIC_ASSISTED:
        with pytest.raises(ValueError, match="Static cache"):
            generate(ROWS[0][None], assistant_model=assistant, **kwargs)
        return
    new_tokens = CHUNK + 8 if draft == "long" else NEW
    found = generate(ROWS[0][None], assistant_model=assistant, max_new_tokens=new_tokens, **kwargs)
    assert found == [EXPECTED[0][:new_tokens]]


def test_assisted_sampling_and_outputs():
    """Sampled assisted decoding runs; its returned cache goes on greedily and has stopped recording."""
    torch.manual_seed(0)
    kwargs = dict(do_sample=True, max_new_tokens=20, return_dict_in_generate=True, output_scores=True, output_logits=True)
    output = MODEL.generate(ROWS[0][None], assistant_model=DRAFT, **kwargs)
    assert len(output.scores) == len(output.logits) == 20
    cache = output.past_key_values
    assert not any(layer.record_past or layer.record for layer in cache.layers)
    row = output.sequences[0]
    assert generate(row[None], max_new_tokens=20, **{CACHE_NAME: cache}) == [greedy(row, 20)]


@pytest.mark.parametrize("left_padding", [0, 9])
def test_assisted_prompt_lookup(left_padding):
    """Prompt lookup on a text that repeats itself, with and without padding in front; it ends at the end token."""
    row = random_tokens(12, seed=3).repeat(4)
    ids = torch.cat([torch.zeros(left_padding, dtype=torch.long), row])[None]
    mask = torch.cat([torch.zeros(left_padding), torch.ones(len(row))])[None].long()
    expected = greedy(row, 40)
    kwargs = dict(attention_mask=mask, prompt_lookup_num_tokens=10, max_matching_ngram_size=2)
    assert generate(ids, max_new_tokens=40, **kwargs) == [expected]
    end = expected[11]
    found = generate(ids, max_new_tokens=40, eos_token_id=end, pad_token_id=0, **kwargs)
    assert found == [expected[: expected.index(end) + 1]]


def test_assisted_early_exit():
    """The first layer drafts for the whole model."""
    assert generate(ROWS[0][None], assistant_early_exit=1) == [EXPECTED[0]]
    assert MODEL.config.num_hidden_layers == 2


# ----------------------------------------------------------------------------------------------------------- inputs, outputs


def test_inputs_embeds():
    """Embeddings instead of token ids: greedy, ragged, beams, static, in one call or continued from a cache."""
    ids, mask = padded(ROWS, "left")
    embeds = MODEL.get_input_embeddings()(ids).detach()
    for kwargs in ({}, {"cache_implementation": "static"}):
        found = MODEL.generate(inputs_embeds=embeds, attention_mask=mask, do_sample=False, max_new_tokens=NEW, **kwargs)
        assert found.tolist() == EXPECTED
    kwargs = dict(attention_mask=mask, num_beams=3, do_sample=False, max_new_tokens=20)
    assert MODEL.generate(inputs_embeds=embeds, **kwargs).tolist() == generate(ids, **kwargs)
    row = MODEL.get_input_embeddings()(ROWS[0])[None].detach()
    kwargs = dict(do_sample=False, return_dict_in_generate=True)
    first = MODEL.generate(inputs_embeds=row, max_new_tokens=10, **kwargs)
    assert first.sequences.tolist() == [EXPECTED[0][:10]]
    longer = torch.cat([row, MODEL.get_input_embeddings()(first.sequences)], 1).detach()
    second = MODEL.generate(inputs_embeds=longer, max_new_tokens=NEW - 10, past_key_values=first.past_key_values, **kwargs)
    assert second.sequences.tolist() == [EXPECTED[0][10:]]


def test_logits_to_keep():
    """`logits_to_keep` as a number and as positions gives those rows of all logits; prefill asks only for the last."""
    ids, mask = padded(ROWS, "mixed")
    with torch.no_grad():
        logits = MODEL(ids, attention_mask=mask).logits
        assert torch.allclose(MODEL(ids, attention_mask=mask, logits_to_keep=3).logits, logits[:, -3:], atol=1e-6)
        positions = torch.tensor([0, 20, 36])
        kept = MODEL(ids, attention_mask=mask, logits_to_keep=positions).logits
        assert torch.allclose(kept, logits[:, positions], atol=1e-6)
    assert generate(ids, attention_mask=mask, logits_to_keep=5) == EXPECTED


@pytest.mark.parametrize("num_beams", [1, 2])
def test_outputs(num_beams):
    """Scores, logits and hidden states of every step have the library's shapes and equal those without a cache."""
    ids, mask = padded(ROWS, "left")
    kwargs = dict(
        attention_mask=mask, do_sample=False, max_new_tokens=6, num_beams=num_beams,
        return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True,
    )  # fmt: skip
    cached, uncached = (MODEL.generate(ids, use_cache=use_cache, **kwargs) for use_cache in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences)
    B = 3 * num_beams
    assert len(cached.scores) == len(cached.logits) == len(cached.hidden_states) == 6
    for name in ("scores", "logits"):
        for one, two in zip(getattr(cached, name), getattr(uncached, name)):
            assert one.shape == (B, 97)
            assert torch.allclose(one, two, atol=1e-4)
    for step, (one, two) in enumerate(zip(cached.hidden_states, uncached.hidden_states)):
        assert [tuple(x.shape) for x in one] == [(B, ids.shape[1] if step == 0 else 1, 32)] * 3
        assert all(torch.allclose(x[:, -1], y[:, -1], atol=1e-4) for x, y in zip(one, two))
    assert cached.past_key_values.get_seq_length() == ids.shape[1] + 5 and uncached.past_key_values is None


# ----------------------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("implementation", [None, "static"])
def test_continue_from_returned_cache(implementation):
    """Text written in two calls, the second with the cache of the first, is that of one call; ragged and padded too."""
    ids, mask = padded(ROWS, "left")
    kwargs = dict(do_sample=False, return_dict_in_generate=True)
    first = MODEL.generate(ids, attention_mask=mask, max_new_tokens=20, cache_implementation=implementation, **kwargs)
    mask = torch.cat([mask, torch.ones(3, 20, dtype=torch.long)], 1)
    rest = dict(attention_mask=mask, past_key_values=first.past_key_values, max_new_tokens=NEW - 20)
    second = MODEL.generate(first.sequences, **rest, **kwargs)
    assert second.sequences[:, ids.shape[1] :].tolist() == EXPECTED


@pytest.mark.parametrize("side", ["left", "right", "mixed"])
@pytest.mark.parametrize("whole", [False, True])
def test_continue_with_padded_pieces(side, whole):
    """A second turn of different lengths, padded inside the conversation: what single rows write. The new turn is given alone
    or with everything before it, the mask always covers everything."""
    turns = [random_tokens(n, seed=100 + n) for n in (4, 19, 1)]
    ids, mask = padded(ROWS, side)
    cache = FenwickCache(MODEL.config)
    first = torch.tensor(generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6))
    assert first.tolist() == [row[:6] for row in EXPECTED]
    turn_ids, turn_mask = padded(turns, side)
    # The last new token is not in the cache yet: it opens the new piece.
    piece, piece_mask = torch.cat([first[:, -1:], turn_ids], 1), torch.cat([torch.ones(3, 1).long(), turn_mask], 1)
    past, past_mask = torch.cat([ids, first[:, :-1]], 1), torch.cat([mask, torch.ones(3, 5).long()], 1)
    new = torch.cat([past, piece], 1) if whole else piece
    found = generate(new, attention_mask=torch.cat([past_mask, piece_mask], 1), past_key_values=cache)
    for row, begin, turn, text in zip(ROWS, first, turns, found):
        assert text == greedy(torch.cat([row, begin, turn]))


@pytest.mark.parametrize("implementation", [None, "static"])
def test_continue_after_rows_that_end_early(implementation):
    """The padding after a row's end has been fed to the model as well; the next turn's mask takes it back."""
    end = EXPECTED[1][6]
    ids, mask = padded(ROWS, "left")
    kwargs = dict(do_sample=False, return_dict_in_generate=True, cache_implementation=implementation)
    first = MODEL.generate(ids, attention_mask=mask, max_new_tokens=20, eos_token_id=end, pad_token_id=0, **kwargs)
    written = [expected[: expected.index(end) + 1 if end in expected[:20] else 20] for expected in EXPECTED]
    assert min(map(len, written)) < max(map(len, written))
    turn = random_tokens(3, 4, seed=8)
    real = [[1] * len(row) + [0] * (first.sequences.shape[1] - ids.shape[1] - len(row)) for row in written]
    mask = torch.cat([mask, torch.tensor(real), torch.ones_like(turn)], 1)
    new, cache = torch.cat([first.sequences, turn], 1), first[CACHE_NAME]
    wrong = mask.clone()
    wrong[2, ids.shape[1] - 3] = 0  # in the middle of what was read
    lengths = cache.layers[0].lengths.clone()
    with pytest.raises(ValueError, match="`attention_mask` has .* Only the last tokens of a row can become padding"):
        generate(new, attention_mask=wrong, **{CACHE_NAME: cache})
    assert torch.equal(cache.layers[0].lengths, lengths)
    found = generate(new, attention_mask=mask, **{CACHE_NAME: cache})
    for row, begin, more, text in zip(ROWS, written, turn, found):
        assert text == greedy(torch.cat([row, torch.tensor(begin), more]))


@pytest.mark.parametrize("missing", [0, 3])
def test_a_cache_that_covers_the_prompt(missing):
    """Nothing would be left to start from: the error says so, for the whole text and for new tokens without a mask."""
    cache = FenwickCache(MODEL.config)
    with torch.no_grad():
        MODEL(ROWS[0][None], **{CACHE_NAME: cache})
    given = ROWS[0][None, : len(ROWS[0]) - missing]
    with pytest.raises(ValueError, match=f"`input_ids` has {len(ROWS[0]) - missing} tokens and `cache` holds {len(ROWS[0])}"):
        MODEL.generate(given, do_sample=False, max_new_tokens=3, **{CACHE_NAME: cache})
    assert cache.get_seq_length() == len(ROWS[0])


def test_chat(tokenizer):
    """A chat of three turns with one cache: every turn passes the whole conversation and costs only the new part."""
    messages, cache = [], FenwickCache(MODEL.config)
    for turn in range(3):
        messages.append({"role": "user", "content": text(random_tokens(9 + turn, seed=turn))})
        inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        length = inputs["input_ids"].shape[1]
        answer = MODEL.generate(**inputs, past_key_values=cache, max_new_tokens=20, do_sample=False)[0, length:]
        assert answer.tolist() == greedy(inputs["input_ids"][0], 20)
        messages.append({"role": "assistant", "content": tokenizer.decode(answer)})


@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("size", [1, 7, CHUNK, 1000])
def test_prefill_in_pieces(implementation, size):
    """`prefill_chunk_size` of one token, odd, one chunk and more than the prompt: the same text, also of a ragged batch."""
    ids, mask = padded(ROWS, "mixed")
    assert_rows(ids, 10, attention_mask=mask, prefill_chunk_size=size, cache_implementation=implementation)


def test_prefill_in_pieces_after_a_cache():
    """Only what the cache does not hold is read, in pieces, the new text given alone or with the old."""
    ids, mask = padded(ROWS, "mixed")
    seen = ids.shape[1] - 15
    for new in (ids, ids[:, seen:]):
        cache = FenwickCache(MODEL.config)
        with torch.no_grad():
            MODEL(ids[:, :seen], attention_mask=mask[:, :seen], **{CACHE_NAME: cache})
        found = MODEL.generate(
            new, attention_mask=mask, do_sample=False, max_new_tokens=10, prefill_chunk_size=4, **{CACHE_NAME: cache}
        )
        assert found[:, new.shape[1] :].tolist() == [expected[:10] for expected in EXPECTED]
        assert cache.get_seq_length() == ids.shape[1] + 9


def test_longer_than_max_position_embeddings():
    """A prompt beyond `max_position_embeddings` (64) goes on without a limit: the default length is the library's 20 more."""
    row = random_tokens(150, seed=9)
    expected = greedy(row, 20)
    assert generate(row[None], max_new_tokens=20) == [expected]
    assert MODEL.generate(row[None], do_sample=False)[0, 150:].tolist() == expected
    assert MODEL.generate(row[None], do_sample=False, max_length=160)[0, 150:].tolist() == expected[:10]
    assert MODEL.config.max_position_embeddings == 64


def test_other_entries():
    """Classifier-free guidance (a second cache inside), a generation loop of the user's, and no prompt at all."""
    both(ROWS[0][None], guidance_scale=1.5, do_sample=False, max_new_tokens=12)
    both(ROWS[0][None], repetition_penalty=1.3, do_sample=False, max_new_tokens=12)

    def first_then_stop(model, input_ids, **kwargs):
        inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, cache=FenwickCache(model.config))
        return model(**inputs).logits[:, -1].argmax(-1)

    found = MODEL.generate(ROWS[0][None], custom_generate=first_then_stop, max_new_tokens=1)
    assert found.tolist() == EXPECTED[0][:1]
    assert MODEL.generate(do_sample=False, max_new_tokens=4)[0, 1:].tolist() == greedy(torch.tensor([1]), 4)


def test_inference_mode():
    """Inside `torch.inference_mode`, and going on outside with the cache from inside."""
    kwargs = dict(do_sample=False, return_dict_in_generate=True)
    with torch.inference_mode():
        first = MODEL.generate(ROWS[0][None], max_new_tokens=20, **kwargs)
    rest = MODEL.generate(first.sequences.clone(), past_key_values=first.past_key_values, max_new_tokens=NEW - 20, **kwargs)
    assert rest.sequences[0, len(ROWS[0]) :].tolist() == EXPECTED[0]


def test_threads():
    """One model, several threads that generate at once: everyone gets the own text, and the config stays as it was."""
    found = [None] * len(ROWS)

    def work(index):
        found[index] = generate(ROWS[index][None])[0]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(ROWS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == EXPECTED and MODEL.config.max_position_embeddings == 64


# ----------------------------------------------------------------------------------------------------------- around generate


def test_streaming(tokenizer):
    """`TextIteratorStreamer` hands out the words while they are generated in a thread."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    kwargs = dict(inputs=ROWS[0][None], streamer=streamer, max_new_tokens=12, do_sample=False)
    thread = threading.Thread(target=MODEL.generate, kwargs=kwargs)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces).split() == text(EXPECTED[0][:12]).split() and len(pieces) > 2


def test_stopping():
    """A stopping criterion of the user's and stop strings end the text where they say."""

    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= len(ROWS[0]) + 9)

    assert generate(ROWS[0][None], stopping_criteria=StoppingCriteriaList([After()])) == [EXPECTED[0][:9]]
    bytes_model = small_model(vocab_size=256, pad_token_id=None)
    core = Tokenizer(models.BPE({byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    whole = generate(ROWS[0][None], model=bytes_model)[0]
    place, stop = next((place, one) for place, one in enumerate(map(tokenizer.decode, [[t] for t in whole])) if one.isascii())
    found = generate(ROWS[0][None], model=bytes_model, stop_strings=[stop], tokenizer=tokenizer)[0]
    assert found == whole[: place + 1]


def test_pipeline(tokenizer):
    """`pipeline("text-generation")`: a single text, a batch of different lengths, and a chat."""
    writer = pipeline("text-generation", model=MODEL, tokenizer=tokenizer)
    kwargs = dict(max_new_tokens=12, do_sample=False, return_full_text=False)
    expected = [text(row[:12]) for row in EXPECTED]
    assert writer(text(ROWS[0]), **kwargs)[0]["generated_text"].strip() == expected[0]
    batch = writer([text(row) for row in ROWS], batch_size=3, **kwargs)
    assert [one[0]["generated_text"].strip() for one in batch] == expected
    chat = [{"role": "user", "content": text(ROWS[1])}]
    answer = writer(chat, **kwargs)[0]["generated_text"]
    assert answer.strip() == text(greedy(torch.cat([ROWS[1], torch.tensor([9])]), 12))


# ----------------------------------------------------------------------------------------------------------- compiled


class Graphs:
    """A backend for `torch.compile` that counts graphs and runs them as they are."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def test_compiled_step_is_one_graph():
    """With a static cache the decoding step is one graph (`fullgraph=True`), never compiled again: not as the text grows over
    chunk borders and levels, nor for other lengths of the rows, a crop between, a second text in the same or in a new cache,
    with or without padding."""
    graphs = Graphs()
    torch._dynamo.reset()
    step = torch.compile(MODEL.forward, backend=graphs, fullgraph=True)
    with torch.no_grad():
        for rows, padding in ((ROWS, "mixed"), ([ROWS[1], ROWS[2], ROWS[0]], "left"), ([ROWS[2]] * 3, "none")):
            if padding != "left":  # there the first cache is used again
                cache = FenwickCache(MODEL.config, static=True)
            cache.reset()
            ids, mask = padded(rows, padding)
            token = MODEL(ids, attention_mask=mask, past_key_values=cache).logits[:, -1:].argmax(-1)
            found = [token]
            for index in range(NEW - 1):
                if index == 12:
                    cache.crop(-5)
                    found = found[:-5]
                    token = found[-1]
                token = step(input_ids=token, past_key_values=cache).logits.argmax(-1)
                found.append(token)
            expected = [EXPECTED[[len(one) for one in ROWS].index(len(row))] for row in rows]
            assert torch.cat(found, 1).tolist() == [row[: len(found)] for row in expected]
    assert graphs.count == 1


@pytest.mark.slow
def test_compiled_generate():
    """`generate()` with a static cache and a step compiled by inductor writes the same text."""
    torch._dynamo.reset()
    model = small_model()
    plain = model.forward
    compiled = torch.compile(plain, fullgraph=True)

    def forward(input_ids=None, **kwargs):
        return (compiled if input_ids.shape[1] == 1 else plain)(input_ids=input_ids, **kwargs)

    ids, mask = padded(ROWS, "left")
    output = []
    with torch.no_grad():
        cache = FenwickCache(model.config, static=True)
        token = forward(input_ids=ids, attention_mask=mask, past_key_values=cache).logits[:, -1:].argmax(-1)
        for _ in range(NEW):
            output.append(token)
            token = forward(input_ids=token, past_key_values=cache).logits.argmax(-1)
    assert torch.cat(output, 1).tolist() == EXPECTED


# ----------------------------------------------------------------------------------------------------- replayed steps


class StandInGraph:
    """What a CUDA graph does, on a CPU: recording runs nothing, replaying repeats the tensor work and no Python."""

    replaying = False
    recorded = replayed = 0

    def __init__(self, function):
        self.function, self.output = function, torch.zeros(0)
        StandInGraph.recorded += 1

    def replay(self):
        StandInGraph.replaying, StandInGraph.replayed = True, StandInGraph.replayed + 1
        output = self.function()
        StandInGraph.replaying = False
        self.output.resize_(output.shape).copy_(output)


@pytest.fixture
def stand_in(monkeypatch):
    def recorded(function):
        graph = StandInGraph(function)
        return graph, graph.output

    def count(layer, columns):
        if layer.static or not StandInGraph.replaying:
            counted(layer, columns)

    counted = FenwickLayer.count
    monkeypatch.setattr(FenwickLayer, "count", count)
    monkeypatch.setattr(graph_loglinear, "_recorded", recorded)
    monkeypatch.setattr(modeling_loglinear, "can_record", lambda model: True)
    monkeypatch.setattr(StandInGraph, "recorded", 0)
    monkeypatch.setattr(StandInGraph, "replayed", 0)
    return StandInGraph


@pytest.mark.parametrize("kwargs", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_replayed_steps(stand_in, kwargs):
    """Ragged rows, each generate() with one recording; the first step ran eagerly, all others were replayed."""
    input_ids, mask = padded(ROWS, "mixed")
    assert generate(input_ids, attention_mask=mask, **kwargs) == EXPECTED
    assert (stand_in.recorded, stand_in.replayed) == (1, NEW - 2)


def test_replayed_steps_of_ones_own_loop(stand_in):
    """`replaying` does for a loop of one's own what `generate()` does; a step that asks for more than logits runs eagerly."""
    text = random_tokens(60)
    cache = FenwickCache(MODEL.config)
    with torch.no_grad(), MODEL.replaying():
        MODEL(text[None, :40], **{CACHE_NAME: cache})
        logits = [MODEL(token[None, None], **{CACHE_NAME: cache}).logits.clone() for token in text[40:]]
        assert (stand_in.recorded, stand_in.replayed) == (1, 19)
        output = MODEL(text[None, :1], output_hidden_states=True, **{CACHE_NAME: cache})
        assert stand_in.replayed == 19 and len(output.hidden_states) == MODEL.config.num_hidden_layers + 1
        expected = MODEL(text[None], use_cache=False).logits[:, 40:]
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)


def test_a_loop_of_the_users_is_not_replayed(stand_in):
    """Whoever writes a loop for `custom_generate` may keep the outputs of its steps; and a model that a logits processor runs
    meanwhile is not taken for the one that generates."""
    kept = []

    def loop(model, input_ids, **kwargs):
        cache = FenwickCache(model.config)
        for token in input_ids[:, :20].split([10] + [1] * 10, 1):
            kept.append(model(token, **{CACHE_NAME: cache}).logits)
        return input_ids

    class OtherModel(LogitsProcessor):
        cache = FenwickCache(DRAFT.config)

        def __call__(self, input_ids, scores):
            kept.append(DRAFT(input_ids[:, -1:], **{CACHE_NAME: self.cache}).logits)
            return scores

    with torch.no_grad():
        MODEL.generate(ROWS[0][None], custom_generate=loop, max_new_tokens=1)
        expected = MODEL(ROWS[0][None, :20], use_cache=False).logits
        torch.testing.assert_close(torch.cat(kept, 1), expected, rtol=1e-4, atol=1e-4)
        assert stand_in.recorded == 0
        kept.clear()
        assert generate(ROWS[0][None], logits_processor=LogitsProcessorList([OtherModel()])) == [EXPECTED[0]]
        read = torch.tensor([[ROWS[0][-1], *EXPECTED[0][:-1]]])
        torch.testing.assert_close(torch.cat(kept, 1), DRAFT(read, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_replayed_beams(stand_in):
    """Beams reorder the cache in place between two steps; what is written is the same."""
    expected = generate(ROWS[0][None], num_beams=3)
    recorded = stand_in.recorded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_loglinear, "can_record", lambda model: False)
        assert generate(ROWS[0][None], num_beams=3) == expected
    assert stand_in.recorded == recorded == 1


def test_replayed_steps_after_a_cache(stand_in):
    """The cache of one generate() goes on in the next, first with several tokens, and counts its columns right."""
    output = MODEL.generate(ROWS[0][None], do_sample=False, max_new_tokens=20, return_dict_in_generate=True)
    cache = output[CACHE_NAME]
    assert cache.get_seq_length() == len(ROWS[0]) + 19
    more = torch.cat([output.sequences, ROWS[1][None]], 1)
    copied = copy.deepcopy(cache)
    written = [MODEL.generate(more, do_sample=False, max_new_tokens=NEW, **{CACHE_NAME: c})[0] for c in (cache, copied)]
    expected = more[0].tolist() + greedy(more[0])
    assert written[0].tolist() == written[1].tolist() == expected
    assert cache.get_seq_length() == len(expected) - 1
    cache.crop(-5)
    with torch.no_grad():
        logits = MODEL(torch.tensor([expected[-6:]]), **{CACHE_NAME: cache}).logits
        wanted = MODEL(torch.tensor([expected]), use_cache=False).logits[:, -6:]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_replayed_steps_of_a_draft(stand_in):
    """A cache that records its past is never replayed; afterwards it is, as before."""
    assert generate(ROWS[0][None], prompt_lookup_num_tokens=3) == [EXPECTED[0]]
    assert stand_in.replayed == 0


def test_a_step_that_cannot_be_recorded(stand_in, monkeypatch, caplog):
    """Then it runs eagerly, with a warning, and writes the same."""

    def refuse(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph_loglinear, "_recorded", refuse)
    graph_loglinear.logger.addHandler(caplog.handler)
    try:
        assert generate(ROWS[0][None]) == [EXPECTED[0]]
    finally:
        graph_loglinear.logger.removeHandler(caplog.handler)
    assert "could not be recorded as a CUDA graph: operation not permitted" in caplog.text


# ----------------------------------------------------------------------------------------------------------- on a GPU


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@needs_gpu
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "compile_config": CompileConfig()},
        {"cache_implementation": "offloaded"},
    ],
    ids=["dynamic", "static", "compiled", "offloaded"],
)
def test_caches_on_a_gpu(kwargs):
    """Plain and static (replayed), compiled, offloaded: every step's logits equal a forward pass over the written text."""
    model = small_model(state_size=16).cuda()
    ids, mask = (x.cuda() for x in padded(ROWS, "left"))
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )
    mask = torch.cat([mask, mask.new_ones(3, NEW)], 1)
    with torch.no_grad():
        expected = model(output.sequences, attention_mask=mask, use_cache=False).logits[:, ids.shape[1] - 1 : -1]
    found = torch.stack(output.logits, 1)
    assert (found - expected).abs().max() < 2e-2 * expected.abs().max()


@needs_gpu
@torch.no_grad()
def test_an_offloaded_cache_may_be_read_at_once():
    """A copy made right after a forward pass is the cache: what goes to the CPU has arrived by then."""
    model = small_model(state_size=16).cuda()
    cache = FenwickCache(model.config, offloading=True)
    model(random_tokens(256, 500).cuda(), past_key_values=cache)
    copied = copy.deepcopy(cache)
    torch.cuda.synchronize()
    for layer, other in zip(cache.layers, copied.layers):
        assert layer.levels.device.type == "cpu"
        for name, tensor in layer.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), name


def test_a_static_cache_is_compiled_only_on_request(monkeypatch):
    """Where steps are recorded, the library compiles only with a `compile_config`; elsewhere it decides alone."""
    monkeypatch.setattr(GenerationMixin, "_valid_auto_compile_criteria", lambda *_: True)
    asked = GenerationConfig(compile_config=CompileConfig())
    token = graph_loglinear.RUNNING.set(graph_loglinear.DecodeGraph(MODEL.backbone))
    try:
        assert not MODEL._valid_auto_compile_criteria({}, GenerationConfig())
        assert MODEL._valid_auto_compile_criteria({}, asked)
    finally:
        graph_loglinear.RUNNING.reset(token)
    assert MODEL._valid_auto_compile_criteria({}, GenerationConfig())


@needs_gpu
def test_a_step_never_waits_for_the_device():
    """An eager step, also one where a chunk is merged, makes no call that waits for the GPU."""
    model = small_model(state_size=16).cuda()
    cache = FenwickCache(model.config)
    tokens = random_tokens(3, NEW).cuda().split(1, dim=1)
    with torch.no_grad():
        model(random_tokens(3, 40).cuda(), past_key_values=cache)
        for token in tokens:
            model(token, past_key_values=cache)  # compiles the kernels
        torch.cuda.set_sync_debug_mode("error")
        try:
            for token in tokens:
                model(token, past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_generation_class():
    """The model says that its cache can be rolled back and that its step compiles into one graph."""
    assert not LogLinearForCausalLM._is_stateful and LogLinearForCausalLM._can_compile_fullgraph
    assert MODEL.can_generate()
