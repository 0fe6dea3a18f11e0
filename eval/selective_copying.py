"""Selective copying (the task of Mamba, arXiv 2312.00752): remember the tokens that matter, skip the noise, say them
again in order.

    . c . . a . . b . . . | ? ? ?     ->  c a b        content tokens at random places, noise between, one marker per
    content token at the end

Token 0 is noise, token 1 the marker, content tokens are 2 to V - 1 and may repeat. An example has `length` tokens,
markers included.

Run `python -m eval.selective_copying --preset configuration/selective-copying.json`, and `python -m eval.report`
for tables and plots.
"""

import dataclasses

import torch

from eval.experiment import main

NOISE, MARKER, CONTENT = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class SelectiveCopyingTask:
    """One setting of the task.

    Args:
        vocab_size: noise, marker and content tokens (default 18: 16 content tokens).
        length: tokens of an example (default 256), at least 2 * memory.
        memory: content tokens to remember (default 16).

    Raises ValueError if the content does not fit.
    """

    vocab_size: int = 18
    length: int = 256
    memory: int = 16

    def __post_init__(self):
        if self.vocab_size <= CONTENT:
            raise ValueError(f"vocab_size is {self.vocab_size}; allowed is at least {CONTENT + 1}")
        if not 1 <= self.memory <= self.length // 2:
            raise ValueError(f"memory is {self.memory}; allowed is 1 to length/2 = {self.length // 2}")

    @property
    def answers(self):
        return self.memory

    @property
    def chance(self):
        """Accuracy of guessing a content token."""
        return 1 / (self.vocab_size - CONTENT)

    def stage(self, progress):
        """The task does not change during the training."""
        return self

    def batch(self, count, generator):
        """Draw examples: ids [count, T], positions of the markers [count, M] and the content in order [count, M]."""
        device, body = generator.device, self.length - self.memory
        content = torch.randint(CONTENT, self.vocab_size, (count, self.memory), device=device, generator=generator)
        places = torch.rand(count, body, device=device, generator=generator).topk(self.memory, dim=1).indices.sort(1).values
        ids = torch.full((count, self.length), NOISE, device=device)
        ids.scatter_(1, places, content)
        ids[:, body:] = MARKER
        return ids, torch.arange(body, self.length, device=device).expand(count, -1), content


def solve(task, ids):
    """The intended algorithm, by hand: the tokens that are neither noise nor marker, in order. ids [T] -> [M]."""
    return ids[ids >= CONTENT]


if __name__ == "__main__":
    main("selective_copying", SelectiveCopyingTask, __doc__)
