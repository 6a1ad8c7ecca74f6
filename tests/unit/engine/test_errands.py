"""Actions from other threads reach the loop's: all of them, in order, and the file says so."""

import select
import threading
import time

from jurybox.server.engine.process import Errands


def readable(errands):
    return bool(select.select([errands], [], [], 0)[0])


def test_actions_of_many_threads_all_run_and_leave_nothing_readable():
    errands, done = Errands(), []

    def send(sender):
        for number in range(2000):
            errands.put(lambda number=number: done.append((sender, number)))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60
    while len(done) < 8000 and time.monotonic() < until:
        errands.run()
    for thread in threads:
        thread.join()
    assert not readable(errands)
    for sender in range(4):
        assert [number for who, number in done if who == sender] == list(range(2000))
    errands.close()


def test_an_action_may_leave_another():
    errands, done = Errands(), []
    errands.put(lambda: errands.put(lambda: done.append(1)))
    errands.run()
    assert readable(errands) and not done
    errands.run()
    assert done == [1] and not readable(errands)
    errands.close()
