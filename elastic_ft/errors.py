"""Every error elastic_ft raises on purpose, on one page.

ElasticError
├── UsageError            the user can fix it; one line, exit code 2, nothing was started
│   ├── ConfigError       a key of the job file: unknown, wrong type, impossible value
│   ├── DataError         data missing, empty, or not what the job says
│   │   └── DataDiffers   on this worker alone: the others agree on theirs
│   ├── ScriptDiffers     what this worker's script has lacks something that the others' have
│   ├── DeviceSick        this worker's GPU computes wrong: another machine must train
│   ├── StorageError      a URL that can't be reached, read or written (found before the start)
│   ├── NotOfContext      what a script asks of its context, and that has not (ctx.accumulate)
│   ├── ModelError        a model that can't be imported or built
│   │   └── BaseAway      the store of its weights does not answer now
│   └── CheckpointMismatch  a checkpoint of another model
├── JobFailed             the job ended; exit code 1; the message names the last good checkpoint
│   └── Superseded        another controller has the job now: this one ends, and deletes nothing
├── GroupBroken           a collective or a transfer broke: a peer is gone, or a newer
│                         generation has fenced this one (I1); the worker goes to its safe point
├── StateDamaged          a digest did not match: this source is refused, the next one tried (I5)
├── StateUnreadable       its bytes can't be had now: nothing is said of them, they are tried again
└── StoreFailed           an object-store operation failed after its bounded retries
"""

import re

_USER = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]*(?=@)")
_URL = re.compile(r"://\S*")
_QUERY = re.compile(r"\?[^\s'\"=/?]+=[^\s'\"]*")
_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Around what Gloo says: the line of its source, and where to look in general.
LOOKED_AT = 4000  # characters of what somebody else says: one line is made of it
_GLOO = re.compile(r"\[\S*/gloo/\S*:\d+\] |\. This is typically caused by a remote worker .*")


def redacted(text: str) -> str:
    """``text`` without what URLs in it must keep to themselves: user:password, and queries."""
    if "://" not in text:
        return text
    return _URL.sub(lambda url: _QUERY.sub("?***", url[0]), _USER.sub("***", text))


# What may be raised by reading JSON of somebody else, and making records of it.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


def one_line(error: BaseException, length_max: int = 300) -> str:
    """The type and message of ``error``, without what URLs in it must keep to themselves. What a
    store says is a sentence already."""
    message = _GLOO.sub("", harmless(error))
    if len(message) > length_max:
        message = message[:length_max] + "..."
    if isinstance(error, StoreFailed) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def harmless(said: object) -> str:
    """One line of text: no secrets of URLs, no colours, nothing else that a terminal would obey,
    and no marks that turn text around. Who shares a cluster reads why others' jobs have failed."""
    text = " ".join(_beginning(str(said)).split())
    if text.isprintable():
        return redacted(text)
    bare = "".join(filter(str.isprintable, text))  # what is put into a URL may hide its secrets
    if (kept := redacted(bare)) != bare:
        return kept
    return "".join(c if c.isprintable() else "?" for c in text)


def _beginning(said: str) -> str:
    """Without colours, and without a URL that is cut off: its secret may not be known as one."""
    text = _COLOURS.sub("", said[:LOOKED_AT])
    if len(said) <= LOOKED_AT:
        return text
    before, url, rest = text.rpartition("://")
    return f"{before if url and len(rest.split()) < 2 else text}..."


def printable(said: object, length_max: int = 200) -> str:
    """One line that any terminal takes: names are their writer's."""
    text = harmless(said)
    return text if len(text) <= length_max else f"{text[: length_max - 3]}..."


class ElasticError(Exception):
    """Base of every error raised on purpose. No secret of a URL is in its message."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redacted(str(message)))


class UsageError(ElasticError):
    """Something the user can fix. The message is one line: what was found, what was expected."""


class ConfigError(UsageError):
    """A bad key in the job file. The message starts with the key."""


class NotOfContext(UsageError, AttributeError):
    """A script asks its context for what that has not. The message says what to write instead."""


class DataError(UsageError):
    """Data that is missing, empty, or not of the declared format."""


class DataDiffers(DataError):
    """This worker reads other data than the others, who agree: it alone is at fault."""


class ScriptDiffers(UsageError):
    """This worker's script computes other losses than the others', who agree: it takes no part."""


class DeviceSick(UsageError):
    """This worker's device computes wrong, forgets, or does not answer: it takes no part."""


class StorageError(UsageError):
    """A URL that cannot be reached, read or written, found before the job starts."""


class ModelError(UsageError):
    """A model that cannot be imported or built."""


class BaseAway(ModelError):
    """Weights that a model begins with can't be read just now: nothing is said of them."""


class CheckpointMismatch(UsageError):
    """A checkpoint of another model; the message names the first tensors that differ."""


class JobFailed(ElasticError):
    """The job ended without completing. The message names the cause and the last checkpoint."""


class Superseded(JobFailed):
    """Another controller has taken over the run folder or the checkpoint URL; it has the job."""


class GroupBroken(ElasticError):
    """A collective, or the forming of a group, broke or was fenced by a newer generation (I1)."""


class StateDamaged(ElasticError):
    """Bytes whose digest differs from the recorded one, or that are not where they should be.

    Attributes:
        holder: who has the damaged bytes, as a source names it: a worker, a keeper, a URL.
        shard: the only one that is damaged there, if it is known.
        missing: the URL of the object that is not there, as this process sees the store.
    """

    def __init__(self, message: str, holder: str, shard: str = "", missing: str = "") -> None:
        super().__init__(message)
        self.holder, self.shard, self.missing = holder, shard, missing

    def __reduce__(self) -> tuple[type["StateDamaged"], tuple[str, str, str, str]]:
        return StateDamaged, (str(self), self.holder, self.shard, self.missing)


class StateUnreadable(ElasticError):
    """Bytes that can't be had: a store or keeper is unreachable, forbids it, or does not answer.

    Attributes:
        holder: as in StateDamaged.
        unread_by: the workers that could not, if others could; none: whoever tried.
    """

    def __init__(self, message: str, holder: str, unread_by: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.holder, self.unread_by = holder, unread_by

    def __reduce__(self) -> tuple[type["StateUnreadable"], tuple[str, str, tuple[str, ...]]]:
        return StateUnreadable, (str(self), self.holder, self.unread_by)


class StoreFailed(ElasticError):
    """An object-store operation failed after its bounded retries."""


class OutOfTime(StoreFailed):
    """Its time was over before all was done; the store did not fail."""


class Unpublishable(StoreFailed):
    """It can't be published, however often that is tried: it is not whole, or is another's."""
