"""The same training, undisturbed, in this one process: ``reference.py STEPS`` prints its losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers.training import Training


def main() -> None:
    training, losses = Training(), []
    dealt, scale = range(training.job.batch.micro_batches), 1 / training.nominal_tokens
    for step in range(1, int(sys.argv[1]) + 1):
        total, tokens, _ = training.backward(training.model, step, dealt, lambda _: scale)
        training.clip()
        training.set_rate(step)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        losses.append(total / tokens)
    json.dump(losses, sys.stdout)


if __name__ == "__main__":
    main()
