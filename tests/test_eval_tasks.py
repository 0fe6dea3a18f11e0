"""The task generators of eval/: every property the papers' definitions promise, checked on drawn examples."""

import itertools
import math

import pytest
import torch

from eval import mqar, selective_copying
from eval.mqar import MqarTask
from eval.selective_copying import MARKER, NOISE, SelectiveCopyingTask
from eval.stacked import IGNORED, draw, stream_seed


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("length", "pairs"), [(16, 4), (64, 4), (128, 30), (65, 7)])
def test_mqar_layout(length, pairs):
    """Pairs stand in front; every key is asked once, after the pairs, at an even offset; the answer is its value."""
    ids, positions, answers = MqarTask(64, length, pairs).batch(50, generator())
    keys, values = ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2]
    assert ids.shape == (50, length) and positions.shape == answers.shape == (50, pairs)
    assert ids.min() >= 0 and ids.max() < 64
    assert torch.equal(ids.gather(1, positions), keys)
    assert torch.equal(answers, values)
    assert positions.min() >= 2 * pairs and positions.max() < length and not ((positions - 2 * pairs) % 2).any()
    for part in (keys, values, positions):
        assert all(len(set(row)) == pairs for row in part.tolist())


def test_mqar_vocabularies_are_disjoint():
    """Keys come from [1, V/2), values from [V/2, V), and both ranges are used up to their ends."""
    ids, _, answers = MqarTask(32, 32, 8).batch(500, generator())
    keys = ids[:, 0:16:2]
    assert set(keys.flatten().tolist()) == set(range(1, 16))
    assert set(answers.flatten().tolist()) == set(range(16, 32))


def chi_square(counts, expected):
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


@pytest.mark.parametrize("power", [0.01, 0.5])
def test_mqar_first_gap_follows_the_power_law(power):
    """The gap drawn first has exactly p(gap) ~ (gap + 1)^(power - 1): chi-square below its 99.9 % point (15 degrees:
    37.7).
    """
    task = MqarTask(64, 48, 8, power)
    _, positions, _ = task.batch(20_000, generator(1))
    counts = torch.bincount((positions[:, 0] - 16) // 2, minlength=task.slots).tolist()
    weights = [(gap + 1) ** (power - 1) for gap in range(16)]
    expected = [20_000 * w / sum(weights) for w in weights]
    assert task.slots == 16
    assert chi_square(counts, expected) < 37.7


def test_mqar_gaps_together_are_drawn_without_replacement():
    """All ordered triples of 4 slots come as often as sequential drawing without replacement says (23 degrees, 99.9
    %: 49.7).
    """
    task = MqarTask(64, 14, 3, 0.3)
    _, positions, _ = task.batch(24_000, generator(2))
    drawn = [tuple(row) for row in ((positions - 6) // 2).tolist()]
    weights = [(gap + 1) ** (0.3 - 1) for gap in range(4)]

    def probability(triple):
        left, result = sum(weights), 1.0
        for gap in triple:
            result, left = result * weights[gap] / left, left - weights[gap]
        return result

    triples = list(itertools.permutations(range(4), 3))
    assert math.isclose(sum(map(probability, triples)), 1)
    assert chi_square([drawn.count(t) for t in triples], [24_000 * probability(t) for t in triples]) < 49.7


@pytest.mark.parametrize("task", [MqarTask(64, 128, 16), SelectiveCopyingTask(18, 128, 16)])
def test_streams_are_deterministic_and_disjoint(task):
    """A seed, a split and a block fix the examples; no other seed, split or block repeats one of them."""

    def rows(seed, split, block):
        return {tuple(row) for row in draw([task], [seed], split, block, 200, "cpu")[0][0].tolist()}

    train = rows(0, "train", 0)
    assert train == rows(0, "train", 0) and len(train) == 200
    for other in [(0, "test", 0), (0, "train", 1), (1, "train", 0), (1, "test", 0)]:
        assert not train & rows(*other)


def test_stream_seeds_do_not_collide():
    """Seeds 0 to 19, both splits and 2,000 blocks have 80,000 different stream seeds."""
    seeds = {stream_seed(s, split, b) for s in range(20) for split in ("train", "test") for b in range(2000)}
    assert len(seeds) == 80_000


def test_draw_stacks_tasks_of_different_size():
    """Runs of one task and seed share their data; tasks with fewer answers end in ignored targets."""
    small, large = MqarTask(64, 32, 2), MqarTask(64, 32, 8)
    ids, positions, targets = draw([small, large, small], [0, 0, 0], "train", 0, 5, "cpu")
    assert ids.shape == (3, 5, 32) and positions.shape == targets.shape == (3, 5, 8)
    assert torch.equal(ids[0], ids[2]) and not torch.equal(ids[0], ids[1])
    assert (targets[0, :, 2:] == IGNORED).all() and (targets[0, :, :2] != IGNORED).all()


def test_mqar_solver_is_perfect_and_guessers_are_at_chance():
    """Looking the key up answers everything; a value of the context is right 1 time in k, any value 2 / V of the time."""
    task = MqarTask(64, 128, 16)
    ids, positions, answers = task.batch(400, generator(3))
    solved = torch.stack([mqar.solve(task, row) for row in ids]).gather(1, positions)
    assert torch.equal(solved, answers)
    pick = torch.randint(16, answers.shape, generator=generator(4))
    of_context = (answers.gather(1, pick) == answers).float().mean().item()
    of_vocabulary = (torch.randint(32, 64, answers.shape, generator=generator(5)) == answers).float().mean().item()
    assert task.chance == 1 / 16
    assert abs(of_context - 1 / 16) < 0.01 and abs(of_vocabulary - 1 / 32) < 0.01


def test_mqar_curriculum_changes_the_stage():
    """The stages follow one another at their shares of the training; after the last one comes the task itself."""
    task = MqarTask(64, 128, 16, curriculum=((0.25, 4, 32), (0.5, 8, 64)))
    stages = [(task.stage(p).pairs, task.stage(p).length) for p in (0, 0.24, 0.25, 0.49, 0.5, 1)]
    assert stages == [(4, 32), (4, 32), (8, 64), (8, 64), (16, 128), (16, 128)]


@pytest.mark.parametrize(("fields", "message"), [((64, 15, 4), "length"), ((64, 128, 32), "pairs"), ((64, 16, 0), "pairs")])
def test_mqar_refuses_what_does_not_fit(fields, message):
    with pytest.raises(ValueError, match=message):
        MqarTask(*fields)


@pytest.mark.parametrize(("length", "memory"), [(32, 16), (64, 16), (100, 3)])
def test_selective_copying_layout(length, memory):
    """Exactly `memory` content tokens among noise, then as many markers, whose targets are the content in order."""
    task = SelectiveCopyingTask(18, length, memory)
    ids, positions, targets = task.batch(50, generator())
    body = ids[:, : length - memory]
    assert (ids[:, length - memory :] == MARKER).all() and (body != MARKER).all()
    assert positions[0].tolist() == list(range(length - memory, length))
    for row, wanted in zip(body, targets, strict=True):
        assert row[row != NOISE].tolist() == wanted.tolist()


def test_selective_copying_places_are_uniform():
    """Every place of the body holds content equally often (47 degrees, 99.9 %: 82.7; content is drawn without
    replacement, which only lowers it).
    """
    ids, _, targets = SelectiveCopyingTask(18, 64, 16).batch(5000, generator(6))
    counts = (ids[:, :48] >= 2).sum(0).tolist()
    assert chi_square(counts, [5000 / 3] * 48) < 82.7
    contents = torch.bincount(targets.flatten(), minlength=18)[2:].tolist()
    assert chi_square(contents, [5000] * 16) < 37.7


def test_selective_copying_solver_is_perfect_and_chance_is_one_in_content():
    task = SelectiveCopyingTask(18, 128, 16)
    ids, _, targets = task.batch(300, generator(7))
    assert all(torch.equal(selective_copying.solve(task, row), t) for row, t in zip(ids, targets, strict=True))
    guess = torch.randint(2, 18, targets.shape, generator=generator(8))
    assert task.chance == 1 / 16
    assert abs((guess == targets).float().mean().item() - 1 / 16) < 0.01


@pytest.mark.parametrize(
    ("fields", "message"), [((2, 64, 16), "vocab_size"), ((18, 31, 16), "memory"), ((18, 64, 0), "memory")]
)
def test_selective_copying_refuses_what_does_not_fit(fields, message):
    with pytest.raises(ValueError, match=message):
        SelectiveCopyingTask(*fields)
