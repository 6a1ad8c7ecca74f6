"""Workers in this process, to test the handling of their answers; any of them can be replaced."""

from __future__ import annotations

from jurybox.cluster.vector_env import LOST


class WorkersHere:
    def __init__(self, makers) -> None:
        self._makers = makers
        self._held = [make() for make in makers]
        self._lives = [0] * len(makers)
        self._dead: set[int] = set()
        self.restarts = 0
        self.asked: list[tuple[int, str]] = []
        self.unread = 0  # answers that nobody has taken

    def die(self, worker: int) -> None:
        """The loss is noticed at the next answer."""
        self._dead.add(worker)

    def life(self, worker: int) -> int:
        return self._lives[worker]

    def ask(self, worker: int, method: str, *arguments):
        self.asked.append((worker, method))
        self.unread += 1
        return worker, self._lives[worker], lambda: getattr(self._held[worker], method)(*arguments)

    def answer(self, asked):
        worker, life, do = asked
        self.unread -= 1
        if worker in self._dead:
            self._dead.discard(worker)
            self._held[worker] = self._makers[worker]()
            self._lives[worker] += 1
            self.restarts += 1
        return do() if life == self._lives[worker] else LOST

    def close(self) -> None:
        for held in self._held:
            held.close()
