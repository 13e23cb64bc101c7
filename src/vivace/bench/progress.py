"""How far a benchmark is: a bar on the terminal, and the count behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

Progress = Callable[[str, int, int], None]
"""Called when something has begun or is done: what is measured now, how much is done, how much there is."""

REDRAWS_HZ = 2
"""Few, because a redraw takes time from what is measured."""


class Count:
    """What has been done of ``total``, told to ``progress``."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self.total, self.done = progress, total, 0
        self._title = ""

    def begin(self, title: str) -> None:
        """From now on ``title`` is measured."""
        self._title = title
        self._tell()

    def advance(self) -> None:
        """One more is done."""
        self.done += 1
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._title, self.done, self.total)


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Progress]:
    """A bar on standard error; silent where that is no terminal."""
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        refresh_per_second=REDRAWS_HZ,
    ) as bar:
        task = bar.add_task("", total=None)

        def show(title: str, done: int, total: int) -> None:
            bar.update(task, description=title, completed=done, total=total)

        yield show
