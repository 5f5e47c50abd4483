"""Loops that numba compiles for this CPU, kept on disk and loaded without numba.

To import numba and to read what it keeps itself takes some 0.4 s at each start. LLVM, which numba
compiles with, loads a loop in milliseconds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, cast

from vllm_module.kernels.matmul.torch_threads import functions_of_threads, tell_numba
from vllm_module.kernels.once import Once

P = ParamSpec("P")
_KERNELS = Path(__file__).parents[1]
# A loop is made of functions of these files.
TEXTS = (*sorted(_KERNELS.glob("*/compiled_*.py")), Path(__file__).with_name("torch_threads.py"))
_NAME = "vllm_module_loop"
# Sums may be taken in any order. Infinities and NaN stay what they are.
_OPTIONS: dict[str, Any] = {
    "error_model": "numpy",
    "boundscheck": False,
    "fastmath": {"contract", "reassoc", "nsz"},
}
# Modules of numba that are libraries in C, and how LLVM's names of their functions begin.
_LIBRARIES = {"numba.core.runtime._nrt_python": "NRT_", "numba._helperlib": "numba_"}
_DIGEST = 32  # bytes
_PATIENCE = 60.0  # seconds to wait for another process that compiles a loop
_LOOK = 0.02  # seconds between two looks whether it has ended
_one_at_a_time = threading.Lock()


def _written() -> bytes:
    """Return a digest of the texts that loops are made of."""
    return hashlib.sha256(b"".join(text.read_bytes() for text in TEXTS)).digest()


# As they are when they are imported: a file may be edited before a loop of it is compiled.
_WRITTEN = _written()


class Loop(NamedTuple):
    """A loop: the address of a function of C, which is given an address, and LLVM's engine.

    The function is there as long as the engine.
    """

    address: int
    engine: Any


def compiled(make: Callable[P, Any]) -> Callable[P, Loop]:
    """Make a function that returns a loop in Python one that returns it compiled.

    The loop is a function of an integer, which has only global functions and numbers that follow
    from the arguments of ``make`` as closures. Each loop is compiled once on a machine, in some
    seconds, and again when one of :data:`TEXTS`, a version or the processor changes.

    Raises:
        ImportError: numba is not installed, no folder can be written in which loops are kept, or
            torch's threads are not those of OpenMP.

    """

    def loop(*arguments: Any) -> Loop:
        with _one_at_a_time:
            return _loop(make, arguments)

    # Others have its address.
    return cast(Callable[P, Loop], functools.update_wrapper(Once(loop), make))


def _loop(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Loop:
    if find_spec("numba") is None:
        raise ModuleNotFoundError("No module named 'numba'", name="numba")
    if os.environ.get("NUMBA_DISABLE_JIT", "0").strip() not in ("", "0"):
        raise ImportError("numba compiles nothing: NUMBA_DISABLE_JIT is set")
    from llvmlite import binding

    for name, address in functions_of_threads().items():
        binding.add_symbol(name, address)
    about = [make.__module__, make.__qualname__, repr(arguments), *_compiler()]
    own = hashlib.sha256(repr(about).encode())
    name = f"{make.__name__}-{own.hexdigest()[:16]}.loop"
    own.update(_WRITTEN)  # not in the name: what was compiled of older texts is written over
    if (found := _kept(name, own.digest())) is not None:
        return found
    writable = next(filter(_can_be_written, _folders()), None)
    if writable is None:
        raise ImportError(  # compiling for seconds at each start would cost more than it gains
            "loops that numba compiles for this CPU are kept on disk, and no folder can be "
            f"written ({', '.join(map(str, _folders()))}): set NUMBA_CACHE_DIR to one"
        )
    with _one_process(writable / f"{name}.lock"):
        if (found := _kept(name, own.digest())) is not None:  # another one has compiled it
            return found
        needed, code = _compile(make(*arguments))
        _write(writable / name, own.digest(), needed, code)
    return _load(needed, code)


def _kept(name: str, own: bytes) -> Loop | None:
    """Return a loop that some folder has."""
    for folder in _folders():
        if kept := _read(folder / name, own):
            with suppress(LookupError):  # of another numba
                return _load(*kept)
    return None


@contextmanager
def _one_process(path: Path) -> Iterator[None]:
    """Have one process at a time in this block: ranks that start together compile a loop once.

    One that is stopped there, or a file system without locks, keeps nobody from going on.
    """
    import fcntl

    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        yield
        return
    end = time.monotonic() + _PATIENCE
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):
            path.unlink()


def _compiler() -> Iterator[str]:
    """Yield what a compiled loop depends on beside its text."""
    yield from (sys.implementation.cache_tag, version("numba"), version("llvmlite"))
    yield from processor()
    settings = (each for each in os.environ.items() if each[0].startswith("NUMBA_"))
    yield from sorted("=".join(each) for each in settings if each[0] != "NUMBA_CACHE_DIR")


@functools.cache
def processor() -> tuple[str, str]:
    """Return LLVM's name of the processor that loops are compiled for, and its features.

    They are this processor's, unless numba's variables name others.
    """
    from llvmlite import binding

    name = os.environ.get("NUMBA_CPU_NAME") or binding.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES", "" if name.lower() == "generic" else None)
    return name, binding.get_host_cpu_features().flatten() if features is None else features


def _folders() -> list[Path]:
    """Return where loops are kept, as numba chooses: where its variable says, here, or at home."""
    if own := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(own)]
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    at_home = [home / "vllm_module" / "loops"] if home.is_absolute() else []  # there may be none
    return [Path(__file__).parent / "__pycache__", *at_home]


def _can_be_written(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.access(folder, os.W_OK | os.X_OK)


def _read(path: Path, own: bytes) -> tuple[list[str], bytes] | None:
    """Return the names that a kept loop needs, and its code, unless it is another or damaged.

    It is run, so a file of another user, or one that others may write, is not read.
    """
    try:
        # To open a pipe would wait for whoever writes into it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            is_own = about.st_uid in (0, os.geteuid()) and not about.st_mode & 0o022
            if not is_own or not stat.S_ISREG(about.st_mode):
                return None
            kept = file.read()
    except OSError:
        return None
    if kept[:_DIGEST] != hashlib.sha256(own + kept[_DIGEST:]).digest():
        return None
    names, _, code = kept[_DIGEST:].partition(b"\n")
    return json.loads(names), code


def _write(path: Path, own: bytes, needed: Iterable[str], code: bytes) -> None:
    """Keep a loop; other processes see all of it or nothing."""
    kept = json.dumps([*needed]).encode() + b"\n" + code
    # A full disk, or another user's file where its folder is everybody's: it is compiled again.
    with suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder, path.name)
        new.touch(mode=0o600)
        new.write_bytes(hashlib.sha256(own + kept).digest() + kept)
        new.replace(path)


def _compile(function: Callable[..., None]) -> tuple[list[str], bytes]:
    """Return the names that a loop needs, and its code."""
    from llvmlite import binding
    from numba import cfunc, types

    tell_numba()
    done = cfunc(types.void(types.int64), **_OPTIONS)(function)
    module = binding.parse_assembly(done.inspect_llvm().replace(done.native_name, _NAME))
    declared = (each for each in (*module.functions, *module.global_variables))
    names = (each.name for each in declared if each.is_declaration)
    needed = [name for name in names if not name.startswith("llvm.")]
    return needed, _machine().emit_object(module)


def _load(needed: Iterable[str], code: bytes) -> Loop:
    """Load a loop. Raises ``LookupError`` if a name that it needs is not there."""
    from llvmlite import binding

    # LLVM finds what the process has loaded once there is an engine.
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())

    def missing() -> list[str]:  # LLVM ends the process if there is one
        return [name for name in needed if not binding.address_of_symbol(name)]

    if missing():
        with suppress(ImportError, AttributeError):
            for module, begin in _LIBRARIES.items():
                for name, address in _library(module).c_helpers.items():
                    binding.add_symbol(begin + name, address)
    if missing():  # numba has them elsewhere, and tells LLVM of them before it compiles
        from numba.core.registry import cpu_target
        from numba.core.runtime.nrt import rtsys

        rtsys.initialize(cpu_target.target_context)
    if names := missing():
        raise LookupError(f"{names}: not there")
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Loop(engine.get_function_address(_NAME), engine)


def _library(name: str) -> Any:
    """Import a module that is a library in C, without numba, which finds the same one later."""
    if (module := sys.modules.get(name)) is not None:
        return module
    first, *folders, _ = name.split(".")
    root = find_spec(first)
    places = [] if root is None else root.submodule_search_locations or []
    spec = PathFinder.find_spec(name, [str(Path(each, *folders)) for each in places])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def _machine() -> Any:
    """Return what compiles for this processor, with numba's settings for code in this process.

    Each engine needs its own, which it frees.
    """
    from llvmlite import binding

    with suppress(RuntimeError):  # newer ones need none of it, and refuse it
        binding.initialize()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    name, features = processor()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(
        cpu=name,
        features=features,
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )
