"""Multi-query associative recall (MQAR, the task of Zoology, arXiv 2312.04927): does a model find again what it was
told?

An example states k (key, value) pairs and later asks for the value of every key once:

    k1 v1 k2 v2 ... | x k2 x x x k1 x ...      at a key the model must output its value; x is random filler

Keys come from [1, V/2) and values from [V/2, V), all different within an example. The query of a pair stands at an
even offset from the end of the pairs, 2 * gap with gap drawn without replacement from p(gap) ~ (gap + 1)^(power -
1): most questions come soon, some late. Filler is drawn from the whole vocabulary, so it may repeat a key; the
first occurrence counts.

Run `python -m eval.mqar --preset configuration/mqar-quick.json` for the effect in minutes, `python -m eval.report`
for tables and plots.
"""

import dataclasses

import torch

from eval.experiment import main


@dataclasses.dataclass(frozen=True)
class MqarTask:
    """One setting of the task.

    Args:
        vocab_size: tokens; the lower half holds keys, the upper half values (default 256).
        length: tokens of an example (default 128), at least 4 * pairs.
        pairs: k, the number of pairs and of questions (default 32).
        power: exponent of the gap distribution (default 0.01, as in Zoology).
        curriculum: stages (until, pairs, length), `until` the share of the training at which a stage ends; after the
            last one the task itself.

    Raises ValueError if the pairs and their questions do not fit.
    """

    vocab_size: int = 256
    length: int = 128
    pairs: int = 32
    power: float = 0.01
    curriculum: tuple = ()

    def __post_init__(self):
        if not 1 <= self.pairs <= self.vocab_size // 2 - 1:
            raise ValueError(f"pairs is {self.pairs}; allowed is 1 to vocab_size/2 - 1 = {self.vocab_size // 2 - 1}")
        if self.length < 4 * self.pairs:
            raise ValueError(f"length is {self.length}; allowed is at least 4 * pairs = {4 * self.pairs}")

    @property
    def answers(self):
        return self.pairs

    @property
    def chance(self):
        """Accuracy of guessing among the values stated in the example."""
        return 1 / self.pairs

    @property
    def slots(self):
        """Places where a question may stand."""
        return (self.length - 2 * self.pairs) // 2

    def gap_weights(self, device=None):
        """Unnormalised p(gap) [slots]."""
        return torch.arange(1, self.slots + 1, device=device, dtype=torch.float32) ** (self.power - 1)

    def stage(self, progress):
        """The task at this share of the training."""
        for until, pairs, length in self.curriculum:
            if progress < until:
                return dataclasses.replace(self, pairs=pairs, length=length, curriculum=())
        return dataclasses.replace(self, curriculum=())

    def batch(self, count, generator):
        """Draw examples: ids [count, T], positions of the questions [count, k] and their answers [count, k], in the
        order of the pairs.
        """
        device, half = generator.device, self.vocab_size // 2
        keys = 1 + _distinct(torch.ones(half - 1, device=device), count, self.pairs, generator)
        values = half + _distinct(torch.ones(self.vocab_size - half, device=device), count, self.pairs, generator)
        gaps = _distinct(self.gap_weights(device), count, self.pairs, generator)
        ids = torch.randint(self.vocab_size, (count, self.length), device=device, generator=generator)
        ids[:, 0 : 2 * self.pairs : 2] = keys
        ids[:, 1 : 2 * self.pairs : 2] = values
        positions = 2 * self.pairs + 2 * gaps
        return ids.scatter_(1, positions, keys), positions, values


def _distinct(weights, count, picks, generator):
    """Draw `picks` of len(weights) items without replacement, [count, picks] in the order of drawing: the largest of
    log weight + Gumbel noise (Gumbel top-k).
    """
    uniform = torch.rand(count, len(weights), device=weights.device, generator=generator).clamp_(min=1e-30)
    return (weights.log() - (-uniform.log()).log()).topk(picks, dim=1).indices


def solve(task, ids):
    """The intended algorithm, by hand: for every token, the token after its first occurrence. ids [T] -> answers [T]."""
    after = {}
    for key, value in ids[: 2 * task.pairs].view(-1, 2).tolist():
        after.setdefault(key, value)
    return torch.tensor([after.get(token, 0) for token in ids.tolist()])


if __name__ == "__main__":
    main("mqar", MqarTask, __doc__)
