"""Parse the command line and report expected errors in one line.

Every script ends with `run(main, parse(Config))` or, if it takes plugins, with `launch`. A user's mistake (a missing
file, a bad row, an invalid flag) raises `UserError`: the script prints the error's message without a traceback and
exits with status 2. For a bug, the traceback is printed.
"""

import errno
import gc
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import tyro

from common import console, plugins
from common.errors import RunStopped, UserError, WorkerLost

T = TypeVar("T")
BAD_PATH = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.ENOSPC)


def parse(config: type[T], arguments: list[str] | None = None) -> T:
    """Parse `arguments`, or the command line, into `config`. Invalid flags, and variables that `check_launcher`
    refuses, end the script with status 2 and a message; the message about flags comes from rank 0 only."""
    try:
        check_launcher()
        arguments = sys.argv[1:] if arguments is None else arguments
        for i, argument in enumerate(arguments):  # --resume without a value means the newest checkpoint
            if argument == "--resume" and (i + 1 == len(arguments) or arguments[i + 1].startswith("--")):
                arguments[i] = "--resume=newest"
        prints = console.is_main() and not {"-h", "--help"} & set(arguments)
        return tyro.cli(config, args=arguments, use_underscores=True, console_outputs=prints)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as stopped:
        importlib.import_module("common.usage").explain(config, arguments or [], stopped.code)
        raise


def check_launcher() -> None:
    """Raise UserError unless torchrun's variables, which number the processes, are all unset or fit together.

    Variables that another or an earlier launcher has set would make a process wait for others that never start, or
    train alone and print nothing. MASTER_ADDR and MASTER_PORT may be set without the others, as on many clusters.
    """
    processes = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {name: os.environ[name] for name in (*processes, "MASTER_ADDR", "MASTER_PORT") if name in os.environ}
    if not given.keys() & set(processes):
        return
    try:
        rank, size, port = (int(given[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_rank, local_size = int(given.get("LOCAL_RANK", 0)), int(given.get("LOCAL_WORLD_SIZE", size))
        fits = 0 <= rank < size and 0 <= local_rank < local_size <= size and 0 < port < 2**16 and given["MASTER_ADDR"]
    except (KeyError, ValueError):  # one is missing, or no number
        fits = False
    if not fits:
        says = ", ".join(f"{name}={value}" for name, value in given.items())
        raise UserError(
            f"the environment says {says}, which does not fit together: start the processes with torchrun, or unset "
            "RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE to start only one"
        )


def as_arguments(flags: dict[str, Any]) -> list[str]:
    """Return `flags` as arguments: a list repeats its flag, True has no value, and False becomes --no_NAME."""
    items = [(name, item) for name, value in flags.items() for item in (value if isinstance(value, list) else [value])]
    switches = {True: "--", False: "--no_"}
    return [switches[item] + name if isinstance(item, bool) else f"--{name}={item}" for name, item in items]


def run(main: Callable[[T], None], args: T) -> None:
    """Call `main` with the parsed `args` and print expected errors as one line on stderr, prefixed with the rank."""
    gc.freeze()  # keeps the garbage collector from scanning imported modules at exit, which saves 0.7 s
    try:
        main(args)
        if "torch" in sys.modules:  # it takes seconds to import
            from common import distributed

            distributed.shutdown()
        return
    except (Exception, KeyboardInterrupt) as error:
        if not (expected := _in_one_line(error)):
            raise
        message, status = expected
    rank = int(os.environ.get("RANK", 0))
    print(console.printable(f"[rank {rank}] {message}" if rank else message), file=sys.stderr, flush=True)
    # Do not use sys.exit here: after an error on one rank, the other ranks wait in a collective, and interpreter
    # shutdown would wait for that collective too. Exiting at once lets torchrun end the other ranks.
    sys.stdout.flush()
    os._exit(status)


def _in_one_line(error: BaseException) -> tuple[str, int] | None:
    """Return the message and the exit status for an expected error; None for a bug."""
    match error:
        case KeyboardInterrupt():
            return "interrupted before there was anything to save", 130
        case WorkerLost():
            return f"{error} twice: is this machine out of memory? Run the same command again to resume", 1
        case RunStopped():
            return str(error), error.status
        case UserError():
            return f"error: {error}", 2
        case ImportError() if (error.name or "").split(".")[0] == "parts" and not error.path:
            missing = error.name.replace(".", "/")
            return f"error: this needs {missing}, which is not here: restore it, or leave out what asks for it", 2
        case OSError() if error.errno in BAD_PATH:
            file = f"{str(error.filename)[:200]!r}: " if error.filename else ""
            return f"error: {file}{error.strerror}; choose another path", 2
        case RuntimeError() if "torch" in sys.modules:
            from common import distributed

            return distributed.explain(error)
    return None


def launch(name: str, config: type | None = None, add_defaults: Callable[[list[str]], list[str]] = list) -> NoReturn:
    """Import the plugins, parse the flags, call `main` of the module `name`, and exit.

    The module is imported by its name, although it also runs as `__main__`, so that a plugin that imports it reaches
    the tables of this run. If its `Config` is given as `config`, wrong flags are reported before its slow import.
    `add_defaults` may put arguments before those of the command line, which take precedence.
    """

    def start(arguments: list[str]) -> None:
        modules = [plugins.load(file) for file in plugins.find(arguments, getattr(config, "output", ""))]
        flags = config or importlib.import_module(name).Config
        if modules:
            from parts.plugins import launch_with

            launch_with(modules, name, flags, add_defaults, arguments)
        else:
            args = parse(flags, add_defaults(arguments))
            importlib.import_module(name).main(args)

    run(start, sys.argv[1:])
    sys.exit(0)  # with None, torchrun --run_path would wait
