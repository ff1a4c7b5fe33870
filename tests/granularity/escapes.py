"""Ways out of the evaluator, as rules that try them: routes from a rule to the interpreter, and what is done from there.

Each is real: with all walls switched off it succeeds. `python -m benchmarks.escapes` prints which walls hold each of them alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_nfp.granularity import worker

WALLS = ("language", "namespaces", "landlock", "limits", "seccomp", "audit")
SUCCESS = 4242
"""Rows of the tile that a rule answers whose way out worked."""
TIMEOUT_S = 20

WALK = '[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == "_wrap_close"][0].__init__.__globals__["sys"].modules'


@dataclass(frozen=True)
class Escape:
    """name; route: statements that bind `o` to the module os; before: the module around the rule; does: what is done with o."""

    name: str
    route: str = f"o = {WALK}['os']"
    does: str = "o.link(VICTIM, MARKER)"
    before: str = ""
    signature: str = "M"

    def source(self, scene: Scene) -> str:
        body = f"{textwrap.dedent(self.route)}\nok = True\n{textwrap.dedent(self.does)}\n"
        names = {"VICTIM": scene.victim, "MARKER": scene.marker, "PROCESS": scene.sleeper.pid, "PORT": scene.port}
        rule = "\n".join("    " + line for line in body.splitlines())
        text = f"{textwrap.dedent(self.before)}\ndef rule({self.signature}):\n{rule}\n    return {{'BLOCK_SIZE_M': {SUCCESS} if ok else 16}}\n"
        for name, value in names.items():
            text = text.replace(name, repr(str(value) if isinstance(value, Path) else value))
        return text


@dataclass
class Scene:
    """What an escape could harm: a file, a folder, a process, a port."""

    folder: Path
    sleeper: subprocess.Popen[bytes]
    listener: socket.socket

    @property
    def victim(self) -> Path:
        return self.folder / "victim"

    @property
    def marker(self) -> Path:
        return self.folder / "marker"

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    def state(self) -> object:
        """What must not change."""
        files = [
            (p.name, p.lstat().st_mode, p.lstat().st_mtime_ns, p.lstat().st_nlink)
            for p in sorted(self.folder.iterdir())
        ]
        text = self.victim.read_text() if self.victim.exists() else None
        shared = sorted(p.name for p in Path("/dev/shm").glob("nfp-*")) if Path("/dev/shm").is_dir() else []
        return files, text, self.sleeper.poll(), shared

    def close(self) -> None:
        self.sleeper.kill()
        self.sleeper.wait()
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        for left in Path("/dev/shm").glob("nfp-*"):
            left.unlink()


def scene(folder: Path) -> Scene:
    """A fresh one."""
    folder.mkdir()
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    listener = socket.create_server(("127.0.0.1", 0))
    made = Scene(folder, sleeper, listener)
    made.victim.write_text("secret")
    os.utime(made.victim, (1e9, 1e9))
    return made


def attempt(escape: Escape, folder: Path, off: Sequence[str] = ()) -> bool:
    """Whether the way out worked with these walls switched off: something changed, or the rule says that it did it."""
    made = scene(folder)
    try:
        before = made.state()
        question = {
            "origin": "index", "source": escape.source(made), "file": "rule.py", "entry": "rule", "texts": {},
            "device_name": "NVIDIA_H200", "compute_capability": [9, 0], "shared_memory_optin": 232448, "triton_version": "",
            "environment": {}, "arguments": {}, "counter": "M", "max_count": 1, "result": ["BLOCK_SIZE_M"],
        }  # fmt: skip
        request = {"shared": {}, "questions": [question], "seconds": 4, "trusted": ["index"]}
        own = folder.with_name(f"{folder.name}-own")
        own.mkdir()
        runner = Path(__file__).with_name("escape_worker.py")
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-W", "ignore", str(runner), str(worker.SANDBOX), ",".join(off)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=own, env={}, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(json.dumps(request).encode(), TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        made.sleeper.poll()
        return f"[{SUCCESS}, ".encode() in output or made.state() != before
    finally:
        made.close()
        shutil.rmtree(folder.with_name(f"{folder.name}-own"), ignore_errors=True)


GLOBALS = '["sys"].modules["os"]'

ROUTES = [
    Escape(
        "name of a field",
        "made = B() == B()\no = KEEP[0]",
        before="from dataclasses import dataclass, field\nKEEP = []\nF = field(default=1)\n"
        "@dataclass(init=False, repr=False)\nclass A:\n    x: int = F\n    k = KEEP\n"
        "def poison():\n    A\n    F.name = 'x, self.k.append(' + '_' + '_import_' + '_(\"os\"))'\n"
        "@dataclass(init=False, repr=False)\nclass B(A if poison() is None else A):\n    y: int = 2\n",
    ),
    Escape("subclasses of object"),
    Escape("globals of a stub", "o = torch.cuda.is_available.__globals__['os']"),
    Escape("class of a stub", "o = torch.cuda.__class__.__init__.__globals__['os']"),
    Escape(
        "live object of a stub", "o = current_platform.get_device_capability().__class__.__getattr__.__globals__['os']"
    ),
    Escape(
        "frame of a generator",
        "h = []\nk = (h[0].gi_frame.f_back.f_back.f_globals['os'] for _ in [1])\nh.append(k)\no = next(k)",
    ),
    Escape(
        "frame of a generator by getattr",
        "h = []\nk = (getattr(getattr(getattr(getattr(h[0], 'gi_' + 'frame'), 'f_' + 'back'), 'f_' + 'back'), 'f_' + 'globals')['os'] for _ in [1])\nh.append(k)\no = next(k)",
    ),
    Escape(
        "frame of a generator function",
        "h = []\ndef walk():\n    yield h[0].gi_frame.f_back.f_back.f_globals['os']\nk = walk()\nh.append(k)\no = next(k)",
    ),
    Escape(
        "frame of a coroutine",
        "h = []\nasync def walk():\n    h.append(h[0].cr_frame.f_back.f_back.f_globals['os'])\nk = walk()\nh.append(k)\ntry:\n    k.send(None)\nexcept Exception:\n    pass\no = h[1]",
    ),
    Escape(
        "frame of an asynchronous generator",
        "h = []\nasync def walk():\n    h.append(h[0].ag_frame.f_back.f_back.f_globals['os'])\n    yield 1\nk = walk()\nh.append(k)\ntry:\n    k.asend(None).send(None)\nexcept Exception:\n    pass\no = h[1]",
    ),
    Escape(
        "traceback of an exception",
        "try:\n    1 / 0\nexcept Exception as e:\n    o = e.__traceback__.tb_frame.f_back.f_globals['os']",
    ),
    Escape(
        "traceback bound by a class pattern",
        "try:\n    1 / 0\nexcept Exception as e:\n    match e:\n        case Exception(__traceback__=t):\n            o = t.tb_frame.f_back.f_globals['os']",
    ),
    Escape(
        "object of an AttributeError",
        "try:\n    torch.cuda.is_available.missing\nexcept Exception as e:\n    o = e.obj.__globals__['os']",
    ),
    Escape(
        "str that lies to getattr",
        "c = getattr((), S('__class__'))\no = [k for k in getattr(getattr(c, S('__base__')), S('__subclasses__'))() if getattr(k, S('__name__')) == '_wrap_close'][0]\no = getattr(getattr(o, S('__init__')), S('__globals__'))['sys'].modules['os']",
        before="class S(str):\n    def startswith(self, *a):\n        return False\n",
    ),
    Escape(
        "name built at run time",
        "c = getattr((), '__cl' + 'ass__')\no = [k for k in getattr(getattr(c, '__ba' + 'se__'), '__subcla' + 'sses__')() if k.__name__ == '_wrap_close'][0]\no = getattr(getattr(o, '__in' + 'it__'), '__glo' + 'bals__')['sys'].modules['os']",
    ),
    Escape("attribute of a class at module level", "o = A.x['os']", before=f"class A:\n    pass\nA.x = {WALK}\n"),
    Escape(
        "base of a class",
        "o = A().x()['os']",
        before=f"class B:\n    def x(self):\n        return KEEP[0]\nKEEP = []\nclass A(B if KEEP.append({WALK}) is None else B):\n    pass\n",
    ),
    Escape(
        "default of a field",
        "o = A().x",
        before=f"from dataclasses import dataclass\n@dataclass(eq=False)\nclass A:\n    x: object = {WALK}['os']\n",
    ),
    Escape("default of a parameter", "o = x['os']", signature=f"M, x={WALK}"),
    Escape(
        "decorator",
        "helped\no = KEEP[0]['os']",
        before=f"KEEP = []\n@(lambda cache: (KEEP.append({WALK}), cache)[1])\ndef helper():\n    return 1\nhelped = helper\n",
    ),
    Escape(
        "hook of a subclass",
        "made = B\no = A.kept['os']",
        before=f"class A:\n    kept = None\n    def __init_subclass__(cls):\n        A.kept = {WALK}\nclass B(A):\n    pass\n",
    ),
    Escape(
        "brackets of a class",
        "o = A[1]['os']",
        before=f"class A:\n    def __class_getitem__(cls, item):\n        return {WALK}\n",
    ),
    Escape(
        "descriptor",
        "o = B().x['os']",
        before=f"class A:\n    def __get__(self, one, kind):\n        return {WALK}\nclass B:\n    x = A()\n",
    ),
    Escape(
        "attribute hook",
        "o = A().anything['os']",
        before=f"class A:\n    def __getattr__(self, name):\n        return {WALK}\n",
    ),
    Escape(
        "finalizer",
        "a = A()\ndel a\no = KEEP[0]['os']",
        before=f"KEEP = []\nclass A:\n    def __del__(self):\n        KEEP.append({WALK})\n",
    ),
    Escape(
        "finalizer while an event is looked at",
        "for i in range(300):\n    a = A()\n    a.a = a\n    NamedTuple('N', [])\no = KEEP[0]['os']",
        before=f"from typing import NamedTuple\nKEEP = []\nclass A:\n    def __del__(self):\n        if not KEEP:\n            KEEP.append({WALK})\n",
    ),
    Escape(
        "special method by a call of Enum",
        f"A = Enum('A', {{'x': 1, '_' + '_getattr_' + '_': lambda self, name: {WALK}}})\no = A.x.anything['os']",
        before="from enum import Enum\n",
    ),
    Escape(
        "copy that reconstructs",
        "import dataclasses\ndataclasses.asdict(D(A()))\no = KEEP[0]['os']",
        before=f"from dataclasses import dataclass\nKEEP = []\nclass A:\n    def __deepcopy__(self, memo):\n        KEEP.append({WALK})\n@dataclass\nclass D:\n    x: object\n",
    ),
    Escape("global statement", f"def f():\n    global leak\n    leak = {WALK}\nf()\no = leak['os']"),
    Escape("builtins of the scope", "o = __builtins__['open'].__self__.__class__.open.__globals__['os']"),
    Escape("import of the scope", "o = __import__.__func__.__globals__['os']"),
    Escape("builder of classes", "o = __build_class__.__self__.__import__('os')"),
    Escape(
        "builtins of a library's function", "import functools\no = functools.lru_cache.__builtins__['__import__']('os')"
    ),
    Escape("module of enums", "import enum\no = enum.Enum.__class__.__new__.__globals__['sys'].modules['os']"),
    Escape("module of dataclasses", "import dataclasses\no = dataclasses.dataclass.__globals__['sys'].modules['os']"),
    Escape("module of typing", "import typing\no = typing.NamedTuple.__globals__['sys'].modules['os']"),
    Escape(
        "codecs behind json", "import json\no = json.loads.__globals__['codecs'].open.__globals__['sys'].modules['os']"
    ),
    Escape("module behind a path function", "import os\no = os.path.dirname.__globals__['os']"),
    Escape(
        "filters of warnings",
        "c = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'catch_warnings'][0]\no = c()._module.sys.modules['os']",
    ),
    Escape(
        "importer of built-in modules",
        "c = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'BuiltinImporter'][0]\no = c.load_module('posix')",
    ),
    Escape(
        "hook of imports",
        f"m = {WALK}\nb = m['builtins']\nclass_ = m['types'].SimpleNamespace\nfound = []\nm['sys'].meta_path.insert(0, class_(find_spec=lambda *a, **k: found.append(m['os'])))\ntry:\n    b.__import__('nothing_here')\nexcept Exception:\n    pass\no = found[0]",
    ),
    Escape(
        "other code for a function",
        "f = lambda x: x.real\nf.__code__ = f.__code__.replace(co_names=('__cl' + 'ass__',))\ng = lambda x: x.real\ng.__code__ = g.__code__.replace(co_names=('__ba' + 'se__',))\nh = lambda x: x.real()\nh.__code__ = (lambda x: x.real()).__code__.replace(co_names=('__subcla' + 'sses__',))\nk = [c for c in h(g(f(()))) if c.__name__ == '_wrap_close'][0]\no = k.__init__.__globals__['sys'].modules['os']",
    ),
    Escape(
        "method of object",
        "c = object.__getattribute__((), '__class__')\no = [k for k in c.__base__.__subclasses__() if k.__name__ == '_wrap_close'][0].__init__.__globals__['sys'].modules['os']",
    ),
    Escape("format string", "text = '{0.__globals__[os].sep}'.format(torch.cuda.is_available)", "ok = text == '/'"),
    Escape(
        "format string of a mapping",
        "text = '{f.__globals__[os].sep}'.format_map({'f': torch.cuda.is_available})",
        "ok = text == '/'",
    ),
    Escape("format in an f-string", "text = f'{torch.cuda.is_available.__globals__[\"os\"].sep}'", "ok = text == '/'"),
    Escape(
        "class of a value by type",
        "o = [k for k in type(()).__base__.__subclasses__() if k.__name__ == '_wrap_close'][0].__init__.__globals__['sys'].modules['os']",
    ),
]
"""From a rule to the module os; then the archive's trick of old: a hard link into a folder that Python reads."""

LIBC = f"o = {WALK}['ctypes'].CDLL(None)"
BUILTINS = f"m = {WALK}\no = m['os']\nb = m['builtins']"
DEEDS = [
    Escape("symbolic link", does="o.symlink(VICTIM, MARKER)"),
    Escape("folder", does="o.mkdir(MARKER)"),
    Escape("removal", does="o.unlink(VICTIM)"),
    Escape("renaming", does="o.rename(VICTIM, MARKER)"),
    Escape("mode", does="o.chmod(VICTIM, 0o600)"),
    Escape("time", does="o.utime(VICTIM, (1, 1))"),
    Escape("cut", does="o.truncate(VICTIM, 1)"),
    Escape("pipe with a name", does="o.mkfifo(MARKER)"),
    Escape("new file", does="o.open(MARKER, o.O_CREAT | o.O_WRONLY)"),
    Escape("reading a file", does="ok = o.read(o.open(VICTIM, 0), 6) == b'secret'"),
    Escape("reading by open", BUILTINS, "ok = m['io'].open(VICTIM).read() == 'secret'"),
    Escape("looking at a file", does="ok = o.stat(VICTIM).st_size == 6"),
    Escape("looking into a folder", does="ok = 'victim' in o.listdir(VICTIM.rpartition('/')[0])"),
    Escape(
        "environment of the parent", does="ok = len(o.read(o.open('/proc/' + str(o.getppid()) + '/environ', 0), 9)) > 0"
    ),
    Escape("memory of its own by /proc", does="ok = o.open('/proc/self/mem', o.O_RDWR) >= 0"),
    Escape("fork", does="ok = o.fork() > 0"),
    Escape("program", does="o.execv('/bin/sh', ['sh', '-c', 'ln ' + VICTIM + ' ' + MARKER])"),
    Escape(
        "spawned program",
        does="o.waitpid(o.posix_spawn('/bin/sh', ['sh', '-c', 'ln ' + VICTIM + ' ' + MARKER], {}), 0)",
    ),
    Escape("shell", does="ok = o.system('ln ' + VICTIM + ' ' + MARKER) == 0"),
    Escape("signal", does="o.kill(PROCESS, 9)\nok = True"),
    Escape("connection", BUILTINS, "s = b.__import__('_socket')\nc = s.socket(2, 1)\nc.connect(('127.0.0.1', PORT))"),
    Escape("port", BUILTINS, "s = b.__import__('_socket')\nc = s.socket(2, 1)\nc.bind(('127.0.0.1', 0))\nc.listen()"),
    Escape("pair of sockets", BUILTINS, "s = b.__import__('_socket')\ns.socketpair()"),
    Escape("pipe", does="o.pipe()"),
    Escape("memory file", does="o.memfd_create('x')"),
    Escape("thread", BUILTINS, "ok = b.__import__('_thread').start_new_thread(len, ((),)) > 0"),
    Escape(
        "pickle",
        BUILTINS,
        "b.__import__('pickle').loads(b'cposix\\nlink\\n(V' + VICTIM.encode() + b'\\nV' + MARKER.encode() + b'\\ntR.')",
    ),
    Escape(
        "finalizer of a weak reference",
        BUILTINS,
        "w = b.__import__('weakref')\nf = lambda: 0\nw.finalize(f, o.link, VICTIM, MARKER)\nf = None\nok = False",
    ),
    Escape("link by libc", LIBC, "ok = o.link(VICTIM.encode(), MARKER.encode()) == 0"),
    Escape("fork by libc", LIBC, "ok = o.fork() > 0"),
    Escape("tracing", LIBC, "ok = o.ptrace(16, PROCESS, None, None) == 0"),
    Escape("shared memory", LIBC, "ok = o.shm_open(b'/nfp-escape', 66, 384) >= 0"),
    Escape("memory of another process", LIBC, "ok = o.process_vm_readv(PROCESS, None, 0, None, 0, 0) == 0"),
    Escape(
        "memory that is executed",
        f"m = {WALK}\no = m['ctypes'].CDLL(None)\no.mmap.restype = m['ctypes'].c_long",
        "ok = o.mmap(None, 4096, 7, 34, -1, 0) > 0",
    ),
    Escape("io_uring", LIBC, "ok = o.syscall(425, 1, b'\\0' * 120) >= 0"),
    Escape(
        "memory without an event",
        f"c = {WALK}['ctypes']\nto = c.create_string_buffer(2)\nc.memmove(to, b'x', 1)",
        "ok = to.value == b'x'",
    ),
    Escape(
        "another module's globals",
        f"m = {WALK}\nh = []\nn = m['types'].SimpleNamespace(__annotations__={{'x': '(h.append(id(h)), int)[1]'}})\n"
        "m['typing'].get_type_hints(n, m['typing'].__dict__, {'h': h})",
        "ok = h[0] > 0",
    ),
    Escape("priority", does="o.setpriority(0, 0, 5)"),
    Escape("handler of a signal", BUILTINS, "b.__import__('_signal').signal(24, 1)"),
    Escape(
        "limit taken back",
        BUILTINS,
        "r = b.__import__('resource')\nr.setrlimit(r.RLIMIT_CORE, (0, r.getrlimit(r.RLIMIT_CORE)[1]))\nr.setrlimit(r.RLIMIT_CPU, (999, -1))",
    ),
    Escape("root of the files", does="o.chroot('/')"),
]
"""What is done with the module os, or with what is loaded beside it."""

ESCAPES = [*ROUTES, *DEEDS]
