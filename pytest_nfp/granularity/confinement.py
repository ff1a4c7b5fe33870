"""Walls around the process that runs foreign code. It puts them up before the first foreign line and can't remove them.

This file uses the standard library alone and imports nothing of this package: the worker loads it by its path. Linux
has all walls. Elsewhere the missing walls are named, with the reason.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

MEMORY_BYTES = 1 << 30
REQUIRED = ("landlock", "seccomp")
"""Code from a folder is not run without these walls."""

# prctl(2), unshare(2)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_NEW_USER, _NEW_MOUNTS, _NEW_NETWORK, _NEW_IPC, _NEW_NAMES = 0x10000000, 0x00020000, 0x40000000, 0x08000000, 0x04000000
_CAPABILITIES_V3 = 0x20080522

# landlock(7): the same numbers on every architecture.
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_LANDLOCK_VERSION = 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""By ABI: the number of rights over files. No right is given back: the worker may open nothing."""
_NETWORK_RIGHTS, _SCOPES = 0b11, 0b11
"""TCP bind and connect (from ABI 4 on); abstract sockets and signals (from ABI 6 on)."""

# seccomp(2)
_LOAD, _EQUAL, _AT_LEAST, _HAS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""A refused call gets EPERM. A call of another architecture ends the process."""
_NUMBER, _ARCHITECTURE = 0, 4
_PROT_EXEC = 4
_X32 = 0x40000000
_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "write": 1, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigreturn": 15, "sched_yield": 24, "mremap": 25,
            "madvise": 28, "exit": 60, "gettimeofday": 96, "getrusage": 98, "setrlimit": 160, "futex": 202, "restart_syscall": 219,
            "clock_gettime": 228, "clock_getres": 229, "exit_group": 231, "prlimit64": 302, "getrandom": 318,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "write": 64, "mmap": 222, "mprotect": 226, "munmap": 215, "brk": 214, "rt_sigreturn": 139, "sched_yield": 124, "mremap": 216,
            "madvise": 233, "exit": 93, "gettimeofday": 169, "getrusage": 165, "setrlimit": 164, "futex": 98, "restart_syscall": 128,
            "clock_gettime": 113, "clock_getres": 114, "exit_group": 94, "prlimit64": 261, "getrandom": 278,
        },
    ),
}  # fmt: skip
"""By machine: its audit number, and the calls that a rule needs for memory, time, its two output pipes and the exit."""


class Absent(Exception):
    """A wall that can't be put up here. The message is the reason."""


def confine(trusted: frozenset[CodeType], setter: object) -> dict[str, str]:
    """Put up all walls in their order, before the first foreign line runs.

    Returns by wall the reason why it is missing, or "" where it stands. trusted, setter: as for watch_events.
    """
    walls: dict[str, Callable[[], None]] = {
        "namespaces": leave_namespaces,
        "landlock": refuse_files,
        "limits": limit_resources,
        "seccomp": refuse_calls,
        "audit": lambda: watch_events(trusted, setter),
    }
    return {name: _reason(build) for name, build in walls.items()}


def _reason(build: Callable[[], None]) -> str:
    try:
        build()
    except (Absent, OSError, ValueError, AttributeError) as reason:
        return str(reason) or type(reason).__name__
    return ""


def leave_namespaces() -> None:
    """Leave the machine's network, shared memory and files: the root becomes the worker's own empty folder.

    Raises Absent, OSError.
    """
    if sys.platform != "linux":
        raise Absent(f"{sys.platform} has none")
    _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC | _NEW_NAMES)
    os.chroot(".")
    os.chdir("/")


def refuse_files() -> None:
    """Landlock: refuse all access to files and ports.

    No file may be opened, made, linked, renamed, cut or removed. No port may be bound or reached. Raises Absent,
    OSError.
    """
    if sys.platform != "linux":
        raise Absent(f"{sys.platform} has no Landlock")
    abi = _libc().syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    if abi < 1:
        raise Absent(f"the kernel has no Landlock ({os.strerror(ctypes.get_errno())})")
    rights = struct.pack(
        "QQQ",
        (1 << _FILE_RIGHTS.get(abi, 16)) - 1,
        _NETWORK_RIGHTS if abi >= 4 else 0,
        _SCOPES if abi >= 6 else 0,
    )
    rights = rights[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    rules = _libc().syscall(_LANDLOCK_CREATE, rights, ctypes.c_size_t(len(rights)), 0)
    if rules < 0:
        raise _error("landlock_create_ruleset")
    try:
        _no_new_privileges()
        if _libc().syscall(_LANDLOCK_RESTRICT, rules, 0):
            raise _error("landlock_restrict_self")
    finally:
        os.close(rules)


def limit_resources() -> None:
    """Allow no new file, process or core dump, no byte written to a file, no privilege, and MEMORY_BYTES of memory.

    Raises ValueError, OSError.
    """
    limits = {"RLIMIT_AS": MEMORY_BYTES, "RLIMIT_NOFILE": 0, "RLIMIT_NPROC": 0, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    for name, most in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            resource.setrlimit(kind, (most, most))
    if sys.platform == "linux":
        # The capabilities of root would lift the limits.
        header, none = struct.pack("II", _CAPABILITIES_V3, 0), bytes(24)
        _call("capset", header, none)
        _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
        # The worker ends with its parent, even if the parent is killed.
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def refuse_calls() -> None:
    """seccomp: refuse every system call that is not in _CALLS. Raises Absent, OSError."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _CALLS:
        raise Absent(f"no filter is known for {sys.platform} on {machine}")
    program = call_filter(machine)
    # struct sock_fprog: a length, and a pointer to the instructions.
    instructions = ctypes.create_string_buffer(program, len(program))
    given = struct.pack("HP", len(program) // 8, ctypes.addressof(instructions))
    _no_new_privileges()
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, given, 0, 0)


def call_filter(machine: str) -> bytes:
    """The seccomp filter of a machine, as BPF instructions of 8 bytes."""
    architecture, numbers = _CALLS[machine]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for name, number in numbers.items():
        allowed = [*_ARGUMENTS.get(name, []), (_RETURN, 0, 0, _ALLOW)]
        program += [(_EQUAL, 0, len(allowed), number), *allowed]
    program.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _low(argument: int) -> tuple[int, int, int, int]:
    """Load the lower half of a call's argument. Both machines are little-endian."""
    return _LOAD, 0, 0, 16 + 8 * argument


_REFUSED = (_RETURN, 0, 0, _REFUSE)
_NO_CODE = [_low(2), (_HAS, 0, 1, _PROT_EXEC), _REFUSED]
_OWN_CPU_LIMIT = [(_EQUAL, 1, 0, 0), _REFUSED]
_ARGUMENTS: dict[str, list[tuple[int, int, int, int]]] = {
    # Only to the output and the error pipe.
    "write": [_low(0), (_EQUAL, 2, 0, 1), (_EQUAL, 1, 0, 2), _REFUSED],
    # Only memory that has no file behind it and is not executable.
    "mmap": [*_NO_CODE, _low(4), (_EQUAL, 1, 0, 0xFFFFFFFF), _REFUSED],
    "mprotect": _NO_CODE,
    # Only the processor time of a question, which the worker sets for itself: RLIMIT_CPU is 0.
    "setrlimit": [_low(0), *_OWN_CPU_LIMIT],
    "prlimit64": [_low(0), *_OWN_CPU_LIMIT, _low(1), *_OWN_CPU_LIMIT],
}
"""By call: instructions that check its arguments. They refuse the call, or fall through to the instruction that allows
it."""


def watch_events(trusted: frozenset[CodeType], setter: object) -> None:
    """Add an audit hook that ends the process at the first event that no rule needs.

    trusted: functions that make code and look at frames for a rule, such as those of dataclasses. The code that they
    make is not trusted. setter: the function that may set the processor time. Both are given as code objects: a rule
    can give its own code the globals of another function, but not the code of another. ctypes is taken away, because it
    writes to memory without an event.
    """
    leave, write, frame_of, refuse = os._exit, os.write, sys._getframe, 70
    attributes = ("object.__getattr__", "object.__setattr__", "object.__delattr__")
    makers = frozenset(("builtins.id", "compile", "exec", "sys._getframe", *attributes))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        # The hook's own looks at a frame and at its code are events too, and harmless. No flag marks them: a finalizer
        # that runs while the flag is set would profit by it.
        if event == "object.__getattr__" and arguments[1] == "f_code":
            return
        if event == "sys._getframe" and arguments[0].f_code is own:
            return
        caller = frame_of(0).f_back
        if caller is not None:
            if event in makers and caller.f_code in trusted:
                return
            if event == "resource.setrlimit" and caller.f_code is setter:
                return
        write(2, f"the rule raised the event {event}, which no rule needs\n".encode())
        leave(refuse)

    own = hook.__code__
    for name in [n for n in sys.modules if n.partition(".")[0] in ("ctypes", "_ctypes")]:
        vars(sys.modules.pop(name)).clear()
    sys.addaudithook(hook)


def codes_of(names: Iterable[object]) -> frozenset[CodeType]:
    """The code of functions, of the methods of classes, and of everything that is defined inside them."""
    codes: set[CodeType] = set()
    visited: set[int] = set()
    pending = list(names)
    while pending:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, CodeType):
            codes.add(value)
            pending.extend(c for c in value.co_consts if isinstance(c, CodeType))
        elif isinstance(value, type):
            pending.extend(vars(value).values())
        elif isinstance(value, FunctionType):
            pending.append(value.__code__)
            pending.append(getattr(value, "__wrapped__", None))
        else:
            # Methods, caches and properties hold the function that they stand for.
            held = ("__func__", "__wrapped__", "fget", "func")
            pending.extend(vars(type(value)).get(h) and getattr(value, h, None) for h in held)
    return frozenset(codes)


def _no_new_privileges() -> None:
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    function = getattr(_libc(), name)
    given = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    if function(*given):
        raise _error(name)


def _error(name: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{name}: {os.strerror(number)}")
