"""The one door: whatever runs on a device passes through ``submit``."""

from numstack.device.work import Work


def submit(work: Work) -> None:
    """Hand ``work`` to its stream, with the device's observers before and after.

    Returns as soon as the work is enqueued. On the CPU's default stream it is finished by then.
    """
    stream = work.stream
    observers = stream.device.observers
    if not observers:
        stream.execute(work)
        return
    for observer in observers:
        observer.before(work)
    stream.execute(work)
    for observer in observers:
        observer.after(work)
