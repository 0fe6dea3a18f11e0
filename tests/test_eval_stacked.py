"""Stacked training does to every run what training it alone with PyTorch's own optimiser does."""

import copy

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from eval.mqar import MqarTask
from eval.stacked import BLOCK, Recipe, Run, Sizes, Stack, build_model, draw, prepare_step, train_stack

SIZES = Sizes(vocab_size=32, hidden_size=16, head_dim=8, state_size=8, chunk_size=16, max_position_embeddings=32)
RECIPE = Recipe(steps=6, batch_size=4, warmup=0.34, weight_decay=0.3, clip_norm=0.5)
MIXERS = ("linear", "mlp_softplus", "mlp_softmax", "fixed", "transformer")


def alone(model, run, recipe):
    """The same training with torch.optim.AdamW, one run, plain forward over all positions."""
    named = list(model.named_parameters())
    decayed = [p for n, p in named if p.ndim >= 2 and "lambda_head" not in n]
    others = [p for n, p in named if not (p.ndim >= 2 and "lambda_head" not in n)]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=run.learning_rate, betas=(recipe.beta1, recipe.beta2))
    ids, positions, targets = draw([run.task], [run.seed], "train", 0, BLOCK * recipe.batch_size, "cpu")
    for step in range(recipe.steps):
        rows = slice(step, None, BLOCK)
        logits = model(input_ids=ids[0, rows]).logits
        picked = logits.gather(1, positions[0, rows, :, None].expand(-1, -1, logits.shape[-1]))
        loss = torch.nn.functional.cross_entropy(picked.flatten(0, 1), targets[0, rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), recipe.clip_norm)
        for part in optimizer.param_groups:
            part["lr"] = run.learning_rate * recipe.rate(step)
        optimizer.step()
    return model


@pytest.mark.parametrize("mixer", MIXERS)
def test_stacked_training_equals_training_alone(mixer):
    """Two runs in one stack, with different seeds, tasks and learning rates, end at the weights that each reaches
    alone.
    """
    runs = [Run(mixer, MqarTask(32, 32, 4), 1e-2, 0), Run(mixer, MqarTask(32, 32, 8), 3e-3, 1)]
    models = [build_model(mixer, SIZES, run.seed) for run in runs]
    stack = Stack([copy.deepcopy(model) for model in models], "cpu")
    outcome = train_stack(runs, stack, RECIPE, points=3)
    for row, run, model in zip(outcome.weights, runs, models, strict=True):
        start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        wanted = torch.nn.utils.parameters_to_vector(alone(model, run, RECIPE).parameters()).detach()
        assert (row - wanted).norm() < 2e-3 * (wanted - start).norm()


def test_diverging_run_leaves_the_others_alone():
    """A run whose weights become NaN changes nothing in its neighbour."""
    good = Run("transformer", MqarTask(32, 32, 4), 1e-3, 0)
    bad = Run("transformer", MqarTask(32, 32, 4), float("nan"), 0)

    def train(runs):
        return train_stack(runs, Stack([build_model(r.mixer, SIZES, r.seed) for r in runs], "cpu"), RECIPE).weights

    both = train([good, bad])
    assert both[1].isnan().any()
    torch.testing.assert_close(both[0], train([good, good])[0])


def test_rate_warms_up_and_ends_near_zero():
    recipe = Recipe(steps=100, warmup=0.1)
    rates = [recipe.rate(step) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1 and max(rates) == 1
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False)) and 0 < rates[99] < 0.001


def test_evaluation_counts_right_answers_and_does_not_train():
    """Accuracy and loss of a stack are those of the model alone on the same examples."""
    runs = [Run("transformer", MqarTask(32, 32, 4), 1e-3, seed) for seed in (0, 1)]
    stack = Stack([build_model(run.mixer, SIZES, run.seed) for run in runs], "cpu")
    loss, accuracy = stack.evaluate(stack.initial, [run.task for run in runs], [0, 1], 64)
    for i, run in enumerate(runs):
        ids, positions, targets = (
            torch.cat([draw([run.task], [run.seed], "test", piece, 32, "cpu")[part][0] for piece in (0, 1)])
            for part in range(3)
        )
        logits = stack.model(stack.initial[i])(input_ids=ids).logits
        picked = logits.gather(1, positions[..., None].expand(-1, -1, 32))
        wanted = torch.nn.functional.cross_entropy(picked.flatten(0, 1), targets.flatten())
        torch.testing.assert_close(loss[i], wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(accuracy[i], (picked.argmax(-1) == targets).float().mean())


def test_unknown_mixer_is_refused():
    with pytest.raises(ValueError, match="mixer is 'mamba9'"):
        build_model("mamba9", SIZES)


@pytest.mark.parametrize("mixer", ["mlp_softplus", "transformer"])
def test_traced_step_is_the_step_on_other_data(mixer):
    """Recorded on one batch and run on the next, with other weights: no number of the first batch stays in it."""
    runs = [Run(mixer, MqarTask(32, 32, 4), 1e-2, seed) for seed in (0, 1)]
    stack = Stack([build_model(run.mixer, SIZES, run.seed) for run in runs], "cpu")
    batches = [draw([run.task for run in runs], [0, 1], "train", block, 4, "cpu") for block in (0, 1)]
    first, second = torch.zeros_like(stack.initial), torch.zeros_like(stack.initial)
    step, rate = stack.step(RECIPE), torch.tensor([1e-2, 3e-3])
    traced = prepare_step(step, "traced", stack.initial, first, second, rate, torch.tensor(1.0), *batches[0])
    later = (stack.initial * 1.1, first + 0.1, second + 0.2, rate / 2, torch.tensor(7.0), *batches[1])
    for found, wanted in zip(traced(*later), step(*later), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_prepared_step_with_wrong_gradients_is_refused():
    """A step whose record differs from what it does later (here by a counter in Python) raises, and is not used."""
    calls = []

    def step(weights, first):
        calls.append(0)
        return weights, weights * len(calls)

    with pytest.raises(RuntimeError, match="the traced step differs from the eager one by 0.5"):
        prepare_step(step, "traced", torch.ones(2, 3), torch.ones(2, 3))


def test_evaluation_and_training_read_every_position_of_a_text():
    """As many positions as tokens means all, in order: the same loss as with the positions picked one by one."""
    stack = Stack([build_model("linear", SIZES, 0)], "cpu")
    ids = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16).expand(2, -1)
    whole, _ = stack.loss(stack.initial[0], ids, positions, ids)
    most, _ = stack.loss(stack.initial[0], ids, positions[:, :15], ids[:, :15])
    last, _ = stack.loss(stack.initial[0], ids, positions[:, 15:], ids[:, 15:])
    torch.testing.assert_close(whole, (15 * most + last) / 16)
