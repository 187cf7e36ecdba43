"""Lock between captures and the device calls of other threads."""

from __future__ import annotations

import threading

from sd_ort.runtime.device_calls import DeviceCalls

LONG = 60


def test_a_capture_waits_for_sections_which_do_not_wait_for_each_other() -> None:
    calls, events = DeviceCalls(), []
    inside, leave = threading.Barrier(3), threading.Event()

    def open_session() -> None:
        with calls.section():
            inside.wait(LONG)
            leave.wait(LONG)
            events.append("opened")

    def capture() -> None:
        with calls.excluded():
            events.append("captured")

    threads = [threading.Thread(target=each) for each in (open_session, open_session)]
    for thread in threads:
        thread.start()
    inside.wait(LONG)  # both are in their sections
    threads.append(threading.Thread(target=capture))
    threads[-1].start()
    leave.set()
    for thread in threads:
        thread.join(LONG)
    assert events == ["opened", "opened", "captured"]


def test_a_section_waits_for_the_capture_of_another_thread() -> None:
    calls, events, begun = DeviceCalls(), [], threading.Event()

    def open_session() -> None:
        begun.set()
        with calls.section():
            events.append("opened")

    thread = threading.Thread(target=open_session)
    with calls.excluded():
        thread.start()
        begun.wait(LONG)
        thread.join(0.2)
        with calls.section():  # of the same thread
            events.append("captured")
    thread.join(LONG)
    assert events == ["captured", "opened"]
