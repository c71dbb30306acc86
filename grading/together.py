"""Many calls of `async def` functions at once: how many are open, how long each may take, when a server is given up.

The client of the verifier (parts/math/verifier.py) and rewards that are an `async def` (calls.py) wait in one event
loop, which has a thread of its own: there, a slow call can be cancelled, whatever it waits for.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from common.errors import describe

CONCURRENCY = 64  # calls of a process that are open at the same time
_starting = threading.Lock()


class GivenUp(Exception):
    """The call was not made, because those before it have failed."""


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class Together:
    """Makes calls of `async def` functions: at most `most` at once, each of at most `seconds`.

    After 2 · `most` failures in a row, the server is taken to be gone: no call is made until `failures` is set to 0.
    """

    def __init__(self, seconds: float, most: int = CONCURRENCY):
        with _starting:
            self.loop = _event_loop()
        self.seconds, self.most = seconds, most
        self.slots = asyncio.Semaphore(most)
        self.failures = 0  # calls since the last successful one, including those that are open
        self.last_error = ""

    def start(self, coroutine: Coroutine) -> Future:
        """Start a coroutine in the event loop, and return its future, for any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def __call__(self, function: Callable, *given: Any, **options: Any) -> Any:
        """Await `function(*given, **options)` when there is room for it. In the event loop only.

        Raises what the function raises, TimeoutError if it takes too long, and GivenUp if it is not called.
        """
        async with self.slots:
            if self.failures >= 2 * self.most:
                raise GivenUp(f"after {2 * self.most} failures in a row, the last: {self.last_error}")
            self.failures += 1
            limit = asyncio.timeout(self.seconds)
            try:
                async with limit:
                    result = await function(*given, **options)
            except BaseException as raised:  # noqa: BLE001 - it is raised again
                late = TimeoutError(f"no complete reply within {self.seconds:g} s (--verifier_timeout)")
                error = late if limit.expired() else raised
                self.last_error = describe(error)
                raise error from None
            self.failures = 0
            return result
