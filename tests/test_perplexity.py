"""eval/perplexity.py against likelihoods that are worked out another way: by table, by hand, token by token."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

from eval.perplexity import Perplexity, main, strided_windows

START = 256
TEXTS = ["Le café est fermé.\nIl rouvre à neuf heures.", "ab", "A man, a plan, a canal: Panama. " * 3]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, numbered in the order of ByteLevel's alphabet, and a start token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<s>")


def llama(zero_head: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    if zero_head:
        torch.nn.init.zeros_(model.lm_head.weight)
    return model


class Bigram(PreTrainedModel):
    """Predicts the next token from a table of the present one. Its likelihoods need no context beyond one token."""

    config_class = PreTrainedConfig

    def __init__(self):
        super().__init__(PreTrainedConfig())
        self.table = torch.nn.Parameter(torch.randn(257, 257, generator=torch.Generator().manual_seed(1)))

    def forward(self, input_ids, use_cache=False):
        return CausalLMOutput(logits=self.table[input_ids])


def ids_of(tokenizer, text: str) -> list[int]:
    return [START, *tokenizer(text, add_special_tokens=False)["input_ids"]]


@settings(derandomize=True, database=None)
@given(length=st.integers(0, 60), window=st.integers(2, 20), data=st.data())
def test_windows_score_every_token_once_and_keep_their_context(length, window, data):
    stride = data.draw(st.integers(1, window - 1))
    tokens = list(range(length))
    windows = strided_windows(tokens, window, stride)
    assert [token for piece in windows for token in piece.tokens[-piece.scored :]] == tokens[1:]
    for number, piece in enumerate(windows):
        assert piece.scored < len(piece.tokens) <= window
        assert piece.tokens == list(range(piece.tokens[0], piece.tokens[-1] + 1))
        assert number == 0 or len(piece.tokens) - piece.scored >= window - stride


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(window=st.integers(2, 130), data=st.data())
def test_bigram_model_gives_its_table_for_any_window_stride_and_batch(tokenizer, window, data):
    model = Bigram()
    log_table = model.table.detach().double().log_softmax(-1)
    rows = [ids_of(tokenizer, text) for text in TEXTS]
    nll = -sum(log_table[a, b].item() for row in rows for a, b in zip(row, row[1:], strict=False))
    result = Perplexity().compute(
        predictions=TEXTS,
        model=model,
        tokenizer=tokenizer,
        window=window,
        stride=data.draw(st.integers(1, window - 1)),
        batch_size=data.draw(st.integers(1, 9)),
    )
    size = sum(len(text.encode("utf-8")) for text in TEXTS)
    words = sum(len(text.split()) for text in TEXTS)
    assert (result["tokens"], result["words"], result["bytes"]) == (size, words, size)
    assert result["perplexity"] == pytest.approx(math.exp(nll / size), rel=1e-5)
    assert result["word_perplexity"] == pytest.approx(math.exp(nll / words), rel=1e-4)
    assert result["bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-5)


def test_uniform_model_has_the_vocabulary_as_perplexity(tokenizer):
    result = Perplexity().compute(predictions=TEXTS, model=llama(zero_head=True), tokenizer=tokenizer)
    assert result["perplexity"] == pytest.approx(257, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(math.log2(257), rel=1e-5)


@pytest.mark.parametrize("window", [7, 64, 200])
def test_stride_one_gives_each_token_the_longest_context(tokenizer, window):
    """Against one forward pass per token."""
    model, row = llama(), ids_of(tokenizer, TEXTS[0])
    nll = 0.0
    with torch.no_grad():
        for position in range(1, len(row)):
            context = torch.tensor([row[max(0, position - window + 1) : position]])
            nll -= model(context).logits[0, -1].double().log_softmax(-1)[row[position]].item()
    result = Perplexity().compute(predictions=TEXTS[:1], model=model, tokenizer=tokenizer, window=window, stride=1)
    assert result["tokens"] == len(row) - 1
    assert result["perplexity"] == pytest.approx(math.exp(nll / (len(row) - 1)), rel=1e-4)


def test_default_window_comes_from_the_model(tokenizer):
    model = llama()
    explicit = Perplexity().compute(predictions=TEXTS, model=model, tokenizer=tokenizer, window=64, stride=32)
    assert Perplexity().compute(predictions=TEXTS, model=model, tokenizer=tokenizer) == explicit


def test_without_a_start_token_the_first_token_is_not_scored(tokenizer):
    startless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    assert Perplexity().compute(predictions=["abc"], model=Bigram(), tokenizer=startless, window=8)["tokens"] == 2
    with pytest.raises(ValueError, match="without a token to score"):
        Perplexity().compute(predictions=["a"], model=Bigram(), tokenizer=startless, window=8)


@pytest.mark.parametrize(("window", "stride", "named"), [(1, 1, "window=1"), (8, 8, "stride=8"), (8, 0, "stride=0")])
def test_windows_out_of_range_are_refused(window, stride, named):
    with pytest.raises(ValueError, match=named):
        strided_windows([1, 2, 3], window, stride)


def test_command_line_scores_a_saved_model_on_a_file(tokenizer, tmp_path, capsys):
    model, text = llama(), TEXTS[0] + "\n\nLast line without end"
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    printed = main(["--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "text.txt"), "--device", "cpu"])
    expected = Perplexity().compute(predictions=[text], model=model, tokenizer=tokenizer)
    assert {name: printed[name] for name in expected} == pytest.approx(expected)
    assert json.loads(capsys.readouterr().out) == printed


def test_a_missing_model_is_one_line_and_exit_status_1():
    """A path at which nothing is says so, instead of what is wrong with it as a name on the Hub."""
    with pytest.raises(SystemExit) as exit_:
        main(["--model", "./missing"])
    assert exit_.value.code == "error: model='./missing': there is no such folder."
