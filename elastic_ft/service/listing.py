"""Which jobs are listed: of some states, a page at a time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from elastic_ft.core.sharing.asks import ENDED, LIVE, JobId
from elastic_ft.errors import ConfigError
from elastic_ft.service.office import NotKnown
from elastic_ft.service.share_standing import ShareStanding

LIMIT_MAX = 1000  # jobs of a page
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
NAMES = {"all", "state", "limit", "after", "before"}


@dataclass(frozen=True, slots=True)
class JobListing:
    """Attributes:
    limit: jobs at most; None: all of them.
    after: a job: the first of those that were submitted later; "": the first of all.
    before: a job: the last of those that were submitted earlier; "": the last of all; None: it is
        ``after`` that counts.
    """

    states: frozenset[str] = frozenset(LIVE)
    limit: int | None = None
    after: JobId = ""
    before: JobId | None = None


def listing_of(query: Iterable[tuple[str, str]]) -> JobListing:
    """Of a request's names and values. Raises ConfigError. Names that mean nothing here are let
    pass, as they always were."""
    given: dict[str, list[str]] = {}
    for name, value in query:
        if name in NAMES:
            given.setdefault(name, []).append(value)
    states = {state for value in given.pop("state", ()) for state in value.split(",") if state}
    if unknown := sorted(states.difference(LIVE, ENDED)):
        raise ConfigError(
            f"state: expected some of {', '.join((*LIVE, *ENDED))}; found {unknown[0]!r:.80}"
        )
    last = {name: values[-1] for name, values in given.items()}
    if not states:
        states = {*LIVE, *ENDED} if flag("all", last.get("all", "")) else set(LIVE)
    after, before = last.get("after", ""), last.get("before")
    if "after" in last and before is not None:
        raise ConfigError("after, before: expected at most one of them")
    return JobListing(frozenset(states), _limit(last.get("limit")), after, before)


def flag(name: str, given: str) -> bool:
    """Of a request's value. Raises ConfigError."""
    if (said := given.lower()) in YES or said in NO:
        return said in YES
    raise ConfigError(f"{name}: expected 1 or 0, found {given!r:.80}")


def _limit(given: str | None) -> int | None:
    """Raises ConfigError."""
    if given is None:
        return None
    is_number = given.isascii() and given.isdecimal() and len(given) < 9
    if not is_number or not 1 <= int(given) <= LIMIT_MAX:
        raise ConfigError(f"limit: expected a number from 1 to {LIMIT_MAX}, found {given!r:.80}")
    return int(given)


def listed_jobs(
    standing: ShareStanding, listing: JobListing, may_read: Callable[[str], bool]
) -> tuple[list[JobId], bool]:
    """Jobs in the order of their submission, and whether there are more on that side.

    Raises NotKnown where the page is to begin at a job that there is not, or that ``may_read`` (of
    its queue) says nothing of.
    """
    for cursor in filter(None, (listing.after, listing.before)):
        if cursor not in standing.orders or not may_read(standing.wishes[cursor].queue):
            raise NotKnown(f"there is no job {cursor:.100}")
    found = (
        job
        for job in _in_order(standing, listing)
        if state_of(standing, job) in listing.states and may_read(standing.wishes[job].queue)
    )
    if listing.limit is None:
        jobs, more = list(found), False
    else:
        jobs = list(islice(found, listing.limit + 1))
        more = len(jobs) > listing.limit
        del jobs[listing.limit :]
    return (jobs if listing.before is None else jobs[::-1]), more


def _in_order(standing: ShareStanding, listing: JobListing) -> Iterator[JobId]:
    """From the cursor on; backwards if that is ``before``."""
    living = listing.states <= frozenset(LIVE)  # few among many that have ended
    names: Sequence[JobId] = list(standing.sharing.jobs if living else standing.orders)
    cursor, backwards = listing.before or listing.after, listing.before is not None
    if backwards:
        names = names[::-1]
    if not cursor:
        return iter(names)
    place = {job: number for number, job in enumerate(standing.orders)}
    at = place[cursor]
    return (job for job in names if (place[job] < at if backwards else place[job] > at))


def state_of(standing: ShareStanding, job: JobId) -> str:
    if (ended := standing.ended.get(job)) is not None:
        return str(ended.status)
    live = standing.job(job)
    return live.phase if live is not None else "queued"
