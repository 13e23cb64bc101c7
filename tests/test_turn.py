"""The hand-over between threads: every message once, never two at a time, nobody waits for the holder."""

import threading

import pytest

from vivace.engine.turn import Turn


def test_messages_of_many_threads_run_once_and_one_at_a_time():
    turn, inside, counts = Turn(), threading.Lock(), {"messages": 0, "works": 0}

    def alone(kind):
        assert inside.acquire(blocking=False), "two at a time"
        counts[kind] += 1
        inside.release()
        return True

    def busy():
        for _ in range(300):
            turn.tell(lambda: alone("messages"))
            turn.run(lambda: alone("works"))

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts["messages"] == 1200
    assert counts["works"] > 0


def test_a_message_to_a_holder_waits_for_its_end_but_not_its_sender():
    turn, order = Turn(), []

    def work():
        turn.tell(lambda: order.append("message"))  # as the garbage collector might, in the same thread
        assert not turn.run(lambda: True)
        order.append("work")
        return False

    assert turn.run(work)  # the message counts as a change
    assert order == ["work", "message"]


def test_the_holder_may_deliver_in_the_midst_of_its_work():
    turn, order = Turn(), []

    def work():
        assert not turn.deliver()
        turn.tell(lambda: order.append("message"))
        assert turn.deliver()
        order.append("work")
        return False

    assert not turn.run(work)  # the work itself says whether anything changed
    assert order == ["message", "work"]


def test_messages_are_delivered_also_if_the_work_fails():
    turn, order = Turn(), []

    def work():
        turn.tell(lambda: order.append("message"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turn.run(work)
    assert order == ["message"]
    assert turn.run(lambda: True)


def test_ask_gives_the_answer_or_the_error():
    turn = Turn()
    assert turn.ask(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        turn.ask(lambda: 1 / 0)


def test_waiting_ends_with_the_next_change_only():
    turn = Turn()
    seen = turn.version
    assert not turn.run(lambda: False)  # nothing happened: nobody is woken
    assert turn.version == seen
    waiter = threading.Thread(target=turn.wait, args=(seen,))
    waiter.start()
    turn.run(lambda: True)
    waiter.join(60)
    assert not waiter.is_alive()
    turn.wait(seen)  # long past: returns at once
