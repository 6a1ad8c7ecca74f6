"""File descriptors: whether enough are left, and what to say where they are not."""

from __future__ import annotations

import errno
import os

from jurybox.protocol.errors import TooManyFiles


def exhausted(error: OSError) -> bool:
    """Whether this is the kernel's word for too many open files, of the process or of the whole machine."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def remedy() -> str:
    """How many files this process may have open, and what to do about it."""
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return "this process has too many files open: close some"
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process may have {soft} files open: close some, or raise the limit (ulimit -n 65536; "
        "systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536)"
    )


def require(count: int, purpose: str) -> None:
    """See that so many descriptors can be had; where they run out in its midst, libzmq ends the whole process.

    Raises:
        TooManyFiles: fewer are left.
    """
    if not hasattr(os, "eventfd"):
        return  # not Linux, where nothing is as cheap to try with
    taken: list[int] = []
    try:
        for _ in range(count):
            taken.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        if not exhausted(error):
            raise
        raise TooManyFiles(f"{purpose} takes {count} files, {len(taken)} can be had: {remedy()}") from error
    finally:
        for fd in taken:
            os.close(fd)


def raise_limit() -> int:
    """Let this process, and those it starts, have as many files open as the hard limit allows; gives how many."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
