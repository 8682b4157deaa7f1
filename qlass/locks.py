"""One writer to a file or folder at a time: a lock beside it, named after its holder. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from environments import UserError

HELD: weakref.WeakValueDictionary[Path, Any] = weakref.WeakValueDictionary()  # this process's own


def only_writer(output: Path) -> Any:
    """Hold the lock of an output for as long as the file returned is open; it ends with the process, however that ends.

    UserError if another process holds it, with its id.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.with_name(f".{output.name}.lock")
    lock = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise UserError(f"{output}: process {holder} is writing it; wait for it, or name another --out") from None
    except OSError:  # a file system without locks
        pass
    if not path.exists() or path.stat().st_ino != os.fstat(lock.fileno()).st_ino:  # released in the meantime
        lock.close()
        return only_writer(output)
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    HELD[output.absolute()] = lock
    return lock


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """For as long as the block runs, unless this process has the lock already."""
    held = HELD.get(output.absolute())
    if held is not None and not held.closed:
        yield
        return
    lock = only_writer(output)
    try:
        yield
    finally:
        release(lock)


def release(lock: Any) -> None:
    if lock is not None:
        Path(lock.name).unlink(missing_ok=True)
        lock.close()
