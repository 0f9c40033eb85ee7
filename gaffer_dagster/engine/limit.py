"""A time limit on what has none of its own, such as a resolver, or a server that drips its answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def within(limit: timedelta, ask: Callable[[], T], name: str) -> T:
    """What `ask` returns or raises. Raises `TimeoutError` where that takes longer: it is left to itself, in a thread of
    that name which does not keep the process alive."""
    answers: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(),))
        except BaseException as error:
            answers.put(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        answer = answers.get(timeout=limit.total_seconds())
    except Empty:
        raise TimeoutError from None
    if isinstance(answer, BaseException):
        raise answer
    return answer[0]
