"""Work that Ctrl-C ends cleanly although it cannot be interrupted, such as a compilation.

It runs in a second thread, so that the first one always hears Ctrl-C, writes down what was reached and leaves.
"""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_NAME = "zerojax-work"
_T = TypeVar("_T")


def call(work: Callable[[Callable[..., None]], _T], tell: Callable[..., None]) -> _T:
    """``work(tell)`` in a second thread; returns or raises what it does.

    After Ctrl-C nothing is told any more: the work ends when it next tries to.

    >>> told = []
    >>> call(lambda tell: tell("half") or "done", told.append), told
    ('done', ['half'])
    """
    lock, interrupted, outcome = threading.Lock(), threading.Event(), concurrent.futures.Future()

    def tell_in_turn(*values: Any):
        with lock:  # Ctrl-C waits until a line is whole
            if interrupted.is_set():
                raise KeyboardInterrupt
            tell(*values)

    def run():
        try:
            outcome.set_result(work(tell_in_turn))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name=_NAME, daemon=True)
    thread.start()
    try:
        concurrent.futures.wait([outcome])  # Thread.join, interrupted, takes the thread for ended in Python 3.11
    except KeyboardInterrupt:
        with lock:
            interrupted.set()
        raise
    thread.join()
    return outcome.result()


def running() -> bool:
    """Whether work still runs that Ctrl-C left behind; an ordinary exit would tear down the interpreter under it.

    >>> running()
    False
    """
    return any(thread.name == _NAME and thread.is_alive() for thread in threading.enumerate())
