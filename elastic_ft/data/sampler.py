"""The order of samples alone, for whoever has a loop, processes and recovery of his own.

Which samples a step has is a function of the seed and the step (``core.batches``), so ranks may
come and go between any two steps: each sample is used once an epoch, in batches of the same size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic_ft.core.batches import DataOrder, deal, step_batch
from elastic_ft.errors import ConfigError


class DealtSteps:
    """Steps of so many micro-batches, of which each rank has a share.

    Attributes:
        step: that was committed last, 0 before the first.
    """

    def __init__(self, micro_batches: int) -> None:
        self._whole, self._dealt = micro_batches, range(micro_batches)
        self.step = 0

    def deal(self, rank: int, world_size: int) -> None:
        """From the next iterator on, this rank's share is that of such a world."""
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank: expected one of 0 to {world_size - 1}, found {rank}")
        if world_size > self._whole:
            raise ConfigError(
                f"world_size: {world_size} ranks have no micro-batch each of the {self._whole} of "
                "a step"
            )
        self._dealt = deal(self._whole, world_size)[rank]

    @property
    def micro_batches(self) -> int:
        """Of a step, on this rank."""
        return len(self._dealt)

    def commit(self) -> None:
        """The step after ``step`` is made, on all ranks."""
        self.step += 1


class ElasticSampler(DealtSteps):
    """A ``batch_sampler`` for any ``torch.utils.data.DataLoader``: this rank's micro-batches, step
    by step, from the one after ``step`` on.

        sampler = ElasticSampler(len(dataset), global_batch_size=64, micro_batch_size=4, seed=0)
        sampler.deal(rank, world_size)               # again, whenever the world is another
        loader = iter(DataLoader(dataset, batch_sampler=sampler))
        for _ in range(sampler.micro_batches):       # of a step; ranks may have one more or less
            micro = next(loader)
        sampler.commit()                             # with the optimizer's step

    A loader reads ahead: what counts is what was committed. Make its iterator anew after ``deal``
    and ``load_state_dict``.

    Args:
        samples: in the dataset.
        global_batch_size: samples of a step, over all ranks.
        steps: after which it ends; None: never.
    """

    def __init__(
        self,
        samples: int,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int = 0,
        steps: int | None = None,
    ) -> None:
        if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % micro_batch_size:
            raise ConfigError(
                f"global_batch_size: {global_batch_size} is no multiple of micro_batch_size, "
                f"{micro_batch_size}"
            )
        if samples < 1:
            raise ConfigError(f"samples: expected at least one, found {samples}")
        self._order, self._steps = DataOrder(seed, samples), steps
        self._global, self._micro = global_batch_size, micro_batch_size
        super().__init__(global_batch_size // micro_batch_size)

    def of_step(self, step: int) -> list[list[int]]:
        """The dataset's indices in each of this rank's micro-batches of ``step``, from 1."""
        batches = step_batch(self._order, step, self._global, self._micro, self._dealt)
        return [[self._order.dataset_index(sample) for sample in batch] for batch in batches]

    def epoch(self) -> int:
        """In which pass over the dataset the step after ``step`` begins, from 0."""
        return self.step * self._global // self._order.dataset_size

    def __iter__(self) -> Iterator[list[int]]:
        step = self.step
        while self._steps is None or step < self._steps:
            step += 1
            yield from self.of_step(step)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, **self._terms()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where the order would be another one."""
        expect_terms(self._terms(), state)
        self.step = int(state["step"])

    def _terms(self) -> dict[str, int]:
        return {
            "samples": self._order.dataset_size,
            "seed": self._order.seed,
            "global_batch_size": self._global,
        }


def expect_terms(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raises ConfigError where the samples that are left would be others than ``state``'s."""
    for name, value in own.items():
        if state[name] != value:
            raise ConfigError(
                f"{name}: the state is of a run with {state[name]}, this one has {value}: its "
                "samples would be others than those that are left"
            )
