"""Command lines and errors for people: one line that says what is wrong, where, and what to do.

Every script's last line is `run(main, Config)`. A user's mistake (a missing file, a bad row, a flag that does not fit)
raises `UserError` and ends with its message and exit status 2, without a traceback; a bug keeps its traceback.
"""

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import tyro

from common.errors import RunStopped, UserError, WorkerLost


def run(main: Callable[[Any], None], config: type) -> None:
    """Parse the command line into `config`, call `main` with it, and turn expected errors into one line on stderr.

    Unknown flags are refused with the nearest known one named (exit status 2). Under torchrun only the first rank
    prints what concerns the command line, since every rank reads the same one; later errors carry their rank.
    """
    gc.freeze()  # what has been imported stays: not to be looked through at the end, which is 0.7 s sooner
    rank = int(os.environ.get("RANK", 0))
    words = sys.argv[1:]
    for i, word in enumerate(words):  # --resume alone means the newest checkpoint
        if word == "--resume" and (i + 1 == len(words) or words[i + 1].startswith("--")):
            words[i] = "--resume=newest"
    args = tyro.cli(config, args=words, use_underscores=True, console_outputs=rank == 0)
    try:
        try:
            main(args)
        except WorkerLost as error:
            raise RunStopped(f"{error} twice: is this machine out of memory? The same command goes on", 1) from None
    except KeyboardInterrupt:
        print("interrupted before anything was at stake", file=sys.stderr, flush=True)
        os._exit(130)
    except (UserError, RunStopped) as error:
        where = f"[rank {rank}] " if rank else ""
        print(f"{where}{'error: ' if isinstance(error, UserError) else ''}{error}", file=sys.stderr, flush=True)
        # Not sys.exit: after a rank-local error the other ranks wait in a collective that interpreter shutdown would
        # join; leaving at once lets torchrun end them.
        sys.stdout.flush()
        os._exit(2 if isinstance(error, UserError) else error.status)
