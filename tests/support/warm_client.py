"""What stands in for a cold Python: `warm_client.py SOCKET` and the words that `python` would be given (see warm.py).

Its descriptors, environment and folder are the other process's; it hands signals on and ends as that one does, which
does not outlive it. It is started for each, so it imports next to nothing.
"""

import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
else:  # without what those import
    import _signal as signal
    import _socket as socket

RELAYED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def inherited() -> list[int]:
    found: list[int] = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            found += [number] if os.get_inheritable(number) else []
        except OSError:  # that of the listing itself
            continue
    return found


def main(path: str, *words: str) -> int:
    files = inherited()
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    ignored = [number for number in RELAYED if signal.getsignal(number) == signal.SIG_IGN]
    told = marshal.dumps((words, dict(os.environb), os.getcwdb(), files, ignored))
    descriptors = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
    server.sendmsg([len(told).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    server.sendall(told)
    for number in RELAYED:
        if number not in ignored:
            signal.signal(number, lambda number, _: server.send(bytes([number])))
    code = int.from_bytes(server.recv(4), "big", signed=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
