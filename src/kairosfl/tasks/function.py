"""Functions that make the task of a deployment, as its apps call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from kairosfl.errors import UserError
from kairosfl.tasks.task import Task

MakeTask = Callable[[int | None], Task]


def for_client(function: Callable[..., Any]) -> MakeTask:
    """A function as Flower's apps call it: with `client` if it takes that; None is the server.

    Args:
        function: Returns a `Task`; called with a client's id by keyword, by position, or without.
    """
    parameters = inspect.signature(function).parameters
    required = [name for name, entry in parameters.items() if entry.default is entry.empty]

    def make(client: int | None) -> Task:
        if "client" in parameters:
            task = function(client=client)
        elif required:
            task = function(client)
        else:
            task = function()
        if not isinstance(task, Task):
            raise UserError(
                f"{function.__name__}() returned a {type(task).__name__}; "
                "a deployment needs a Task."
            )
        return task

    return make
