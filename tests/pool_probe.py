"""What ``test_compile_ahead`` looks at: kernels that fail, hang and crash, in a process that may be forked."""

import json
import os
import signal
import sys
import time

from vivace.kernels.compile_pool import CompilePool


class Kernel:
    def __init__(self, name, work):
        self.name, self.compile = name, work


def fail():
    raise ValueError("no such tile")


def hang():
    time.sleep(60)


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def main() -> None:
    kernels = [Kernel("good", lambda: 7), Kernel("bad", fail), Kernel("slow", hang), Kernel("broken", crash)]
    heard = []
    pool = CompilePool(2, lambda kernel, made: f"{kernel.name} {made}", done=heard.append, timeout_s=0.5)
    for kernel in kernels:
        pool.add(kernel)
    outcomes = {o.kernel.name: (o.result, o.error, o.is_known) for o in pool.finish()}

    reader, writer = os.pipe()
    pool = CompilePool(1, lambda *_: None, stop=reader)
    pool.add(Kernel("slow", lambda: (os.close(writer), hang())))  # it is the parent's end that counts
    os.close(writer)
    stopped = False
    try:
        pool.finish()
    except InterruptedError:
        stopped = True
    try:
        os.waitpid(-1, os.WNOHANG)
        is_empty = False
    except ChildProcessError:  # none is left behind
        is_empty = True
    document = {"outcomes": outcomes, "heard": len(heard), "stopped": stopped, "is_empty": is_empty}
    document["torch"] = "torch" in sys.modules
    print(json.dumps(document))


if __name__ == "__main__":
    main()
