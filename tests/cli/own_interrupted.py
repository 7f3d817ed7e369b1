"""Ctrl-C in the middle of a step, as in a notebook, whose next cell goes on.

Argument: "step": in the function of a step; "attempt": in the block of one, before its optimizer
steps; "late": after it; "script": in the function of a step, and nobody catches it; "stuck": the
same, and again while the script ends, with a controller that does nothing any more. "stands",
"closes": nobody interrupts it, and its controller stands still at the script's last step, or ends
never. "idle": it ends before its first batch.
"""

import os
import signal
import sys
import threading

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_ft
from elastic_ft.controller.controller import Controller
from elastic_ft.training import alone

WHAT, AT, LAST = sys.argv[1], 3, 6
signal.signal(signal.SIGINT, signal.default_int_handler)  # as a terminal has it, and `&` has not

ctx = elastic_ft.init(steps=LAST, batch={"global_batch_size": 4, "micro_batch_size": 2})
if WHAT == "idle":
    sys.exit()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=2)
model, optimizer, loader = ctx.prepare(model, optimizer, loader)
left = []


def body(batch):
    for (x,) in batch:
        ctx.backward(-model(x).sum(), len(x))
    if WHAT == "attempt":
        interrupt(batch)
    optimizer.step()
    optimizer.zero_grad()
    if WHAT != "attempt":
        interrupt(batch)


def interrupt(batch):
    if batch.number == LAST and WHAT in ("stands", "closes"):
        alone.STANDS_S = alone.END_TIMEOUT_S = 1.0
        name = "_turn" if WHAT == "stands" else "_close"
        setattr(Controller, name, lambda controller: threading.Event().wait())
    if WHAT in ("stands", "closes"):
        return
    if batch.number == AT and not left:
        left.append(batch.number)
        if WHAT == "stuck":
            again_once_it_ends()
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # it comes between two of these, where it may
            torch.linalg.svd(torch.ones(9, 9))


def again_once_it_ends():
    """Whoever asks the controller to stop waits for it."""
    asked = threading.Event()
    Controller._turn = lambda controller: threading.Event().wait()
    Controller.stop = lambda controller, reason: asked.set()

    def interrupt_again():
        asked.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_again, daemon=True).start()


train_step = ctx.step(body)


def cell():
    for batch in loader:
        if WHAT in ("attempt", "late"):
            with ctx.attempt() as attempt:
                body(attempt.batch)
        else:
            train_step(batch)


try:
    cell()
except KeyboardInterrupt:
    if WHAT in ("script", "stuck"):
        raise
    print("left, the last step made is", ctx.latest.number)
    cell()
print("weight", round(model.weight.item(), 3))
