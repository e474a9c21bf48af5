"""Users' functions and environments in threads of their own, and the event loops of this process."""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import cache, partial

NOT_TOOLS = ("reset", "get_reward")  # of an environment's methods


@cache
def event_loop(name: str = "users") -> asyncio.AbstractEventLoop:
    """The event loop of this name. All of the users' coroutines share one: a web service's client belongs to a loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def together(coroutines: Iterable[Coroutine]) -> Future:
    """Run these coroutines side by side, in the event loop of a thread that no user's coroutine can block."""

    async def gather() -> list:
        return await asyncio.gather(*coroutines)

    return asyncio.run_coroutine_threadsafe(gather(), event_loop("conversations"))


def is_async(function: Callable) -> bool:
    """Whether this is a coroutine function, or an object whose `__call__` is one."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


class UserThread:
    """A thread that calls a user's functions, one by one. A daemon: a process ends although a call does not."""

    def __init__(self):
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.works = False

    def begin(self, function: Callable, /, **arguments) -> Future:
        """Call a function in this thread, or a coroutine function in the users' event loop."""
        if is_async(function):

            async def call():  # so that wrong arguments are an error of the call
                return await function(**arguments)

            return _in_event_loop(call())
        if not self.works:  # a caller of coroutines needs no thread
            self.works = True
            threading.Thread(target=self._work, daemon=True).start()
        future = Future()
        self.jobs.put(partial(_run, partial(function, **arguments), future))
        return future

    def _work(self) -> None:
        while job := self.jobs.get():
            job()


def in_thread(function: Callable, /, **arguments) -> Future:
    """Call a function in a daemon thread of its own, or a coroutine function in the users' event loop."""
    thread = UserThread()
    future = thread.begin(function, **arguments)
    thread.jobs.put(None)  # it ends after the call
    return future


class Environment(UserThread):
    """The tools of one conversation at a time: functions and, if there is a `factory`, the methods of the instance that
    it makes. The instance has a thread of its own, since a database's connection belongs to one, and is there when the
    future `made` is done."""

    def __init__(self, factory: Callable | None, functions: list[Callable], pool: list["Environment"]):
        super().__init__()
        self.pool, self.lost, self.instance = pool, False, None  # lost: a call has not returned in time
        self.made = self.begin(self._make, factory=factory, functions=functions)

    def _make(self, factory: Callable | None, functions: list[Callable]) -> None:
        self.instance = _result(factory) if factory else None
        members = inspect.getmembers(type(self.instance), inspect.isfunction)  # of the class: no property is evaluated
        names = [name for name, _ in members if name not in NOT_TOOLS and not name.startswith("_")]
        self.methods = [getattr(self.instance, name) for name in names]
        self.tools = {tool.__name__: tool for tool in [*functions, *self.methods]}

    def release(self) -> None:
        """Let another conversation have this environment. If it is lost, end its thread instead."""
        if self.lost:
            self.jobs.put(None)
        else:
            self.pool.append(self)


def _result(call: Callable):
    """What a call returns or, if that is a coroutine, what it returns in the users' event loop."""
    result = call()
    return _in_event_loop(result).result() if inspect.iscoroutine(result) else result


def _in_event_loop(coroutine: Coroutine) -> Future:
    async def without_exit():  # which would end the loop of all others
        try:
            return await coroutine
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return asyncio.run_coroutine_threadsafe(without_exit(), event_loop())


def _run(call: Callable, future: Future) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(_result(call))
    except BaseException as error:  # an exit as well: the caller that waits gets it
        # An event loop passes on no exits and no StopIteration.
        passes = isinstance(error, Exception) and not isinstance(error, StopIteration)
        future.set_exception(error if passes else RuntimeError(f"{type(error).__name__}: {error}"))
