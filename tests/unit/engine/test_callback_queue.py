"""Callbacks from other threads run in the loop's thread: all of them, in order, and the descriptor becomes readable."""

import select
import threading
import time

from jurybox.server.engine.process import CallbackQueue


def readable(callbacks):
    return bool(select.select([callbacks], [], [], 0)[0])


def test_actions_of_many_threads_all_run_and_leave_nothing_readable():
    callbacks, done = CallbackQueue(), []

    def send(sender):
        for number in range(2000):
            callbacks.put(lambda number=number: done.append((sender, number)))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60
    while len(done) < 8000 and time.monotonic() < until:
        callbacks.run()
    for thread in threads:
        thread.join()
    assert not readable(callbacks)
    for sender in range(4):
        assert [number for who, number in done if who == sender] == list(range(2000))
    callbacks.close()


def test_an_action_may_leave_another():
    callbacks, done = CallbackQueue(), []
    callbacks.put(lambda: callbacks.put(lambda: done.append(1)))
    callbacks.run()
    assert readable(callbacks) and not done
    callbacks.run()
    assert done == [1] and not readable(callbacks)
    callbacks.close()
