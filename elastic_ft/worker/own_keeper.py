"""The keeper of this worker's node: dialled when the controller says so, used by the snapshots."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from elastic_ft.core.assignment import Keeper, WorkerId
from elastic_ft.core.commands import UseKeeper
from elastic_ft.keeper.keeper_client import DIAL_TIMEOUT_S, KeeperClient, KeeperGone
from elastic_ft.transport.tls import JobKey


class OwnKeeper:
    """Args:
    use: takes the newest keeper, in a thread of this.
    unkept: why there is none; called in the same thread.
    """

    def __init__(
        self,
        key: JobKey,
        worker: WorkerId,
        use: Callable[[KeeperClient], None],
        unkept: Callable[[str], None],
    ) -> None:
        self._key, self._worker, self._use, self._unkept = key, worker, use, unkept
        self._dialling = ThreadPoolExecutor(1, thread_name_prefix="use-keeper")
        self._dialled: Future[None] | None = None  # the newest keeper, to be used or not
        self._keeper: Keeper | None = None  # that one

    def use(self, message: UseKeeper) -> None:
        """Returns at once: what it waits for may be stopped. Told again, it is no news."""
        if message.keeper != self._keeper:
            self._keeper = message.keeper
            self._dialled = self._dialling.submit(self._dial, message.keeper)

    def _dial(self, keeper: Keeper) -> None:
        try:
            self._use(KeeperClient(keeper, self._key, self._worker))
        except KeeperGone as error:
            self._keeper = None
            self._unkept(str(error))

    def wait(self) -> None:
        """The first snapshot is to outlive this process. Raises what dialling did."""
        if self._dialled is not None and wait([self._dialled], DIAL_TIMEOUT_S).done:
            self._dialled.result()

    def close(self) -> None:
        self._dialling.shutdown(wait=False, cancel_futures=True)
