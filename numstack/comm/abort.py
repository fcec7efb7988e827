"""One rank's uncaught exception ends all ranks: without this the others wait for it for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from types import TracebackType

from numstack.comm.world import World
from numstack.errors import NumstackError

# An error that all ranks make alike, such as a missing file, is for rank 0 to print: it ends the others meanwhile.
PRECEDENCE_S = 1.0


def abort_on_error(world: World) -> None:
    """From now on an uncaught exception, in any thread of any rank, is printed once and ends the whole job.

    An error that numstack raised on purpose is printed as one line, everything else with its traceback. The other ranks
    leave rank 0 a second to print and end the job, so that what all of them notice is said once. Standard
    output and error are flushed before MPI ends the other ranks. Call it first thing in a program; the exit code is 1.
    ``sys.exit`` is no exception: a rank that leaves by it is missed by the others at their next collective.

    Parameters
    ----------
    world : World
        Without MPI only threads are affected: their exceptions end the process as well.
    """

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        where = f" on rank {world.rank} of {world.size}" if world.size > 1 else ""
        if isinstance(error, NumstackError):
            text = f"error{where}: {error}\n"
        else:
            text = f"uncaught exception{where}:\n" + "".join(traceback.format_exception(kind, error, trace))
        if world.rank > 0:
            time.sleep(PRECEDENCE_S)
        sys.stdout.flush()
        sys.stderr.write(text)  # one write, so that lines of two ranks do not mix
        sys.stderr.flush()
        if world.mpi is not None:
            world.mpi.Abort(1)
        os._exit(1)  # a thread's exception would not end the process by itself

    def in_thread(args: threading.ExceptHookArgs) -> None:
        assert args.exc_value is not None
        end(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = end
    threading.excepthook = in_thread
