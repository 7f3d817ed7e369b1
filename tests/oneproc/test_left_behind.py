"""A thread that was left behind in a collective: the user's code in it never goes on."""

from __future__ import annotations

import threading

from elastic_ft.engines import left_behind
from elastic_ft.engines.left_behind import stays_inside

DEADLINE_S = 10.0


def test_it_never_comes_back_to_what_the_users_function_does_finally() -> None:
    collective, ended = threading.Event(), threading.Event()
    did: list[str] = []

    def steps() -> None:
        try:
            with stays_inside():
                assert collective.wait(DEADLINE_S)
                ended.set()
                raise RuntimeError("Connection closed by peer")
        finally:
            did.append("zero_grad")

    thread = threading.Thread(target=steps, daemon=True)
    thread.start()
    assert thread.ident is not None
    in_use: list[object] = ["what wraps the model"]
    left_behind.leave(thread.ident, in_use)
    collective.set()
    assert ended.wait(DEADLINE_S)
    thread.join(0.3)
    assert thread.is_alive() and not did and not in_use


def test_others_see_the_error() -> None:
    did: list[str] = []
    try:
        with stays_inside():
            raise RuntimeError("of the model's own")
    except RuntimeError:
        did.append("zero_grad")
    assert did
