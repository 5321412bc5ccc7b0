"""Real signals in real processes: one request, earlier handlers, repeats, other threads, forks."""

import signal
import subprocess
import sys
from typing import Any

import pytest

from shardkeep.runs.preemption import parse_signals
from signals import START

PROGRAM = (
    START
    + """
import logging, os, signal, threading, time
from shardkeep.runs import preemption
from shardkeep.runs.agreement import Agreement
from shardkeep.runs.preemption import Signals
def send(name="SIGTERM"):
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(0)  # the handler runs between two instructions
agreement = Agreement("one")
"""
)


def run(script: str, ends: int = 0) -> list[str]:
    """What a program prints; `ends` is how it must end, -15 by SIGTERM."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == ends, done.stderr
    return done.stdout.splitlines()


def test_a_signal_leads_to_one_save_and_stop() -> None:
    printed = run("""
signals = Signals(("SIGTERM",), agreement.request)
print(signals.installed, agreement.enter())
send()
print(*agreement.enter())
print(agreement.enter(), threading.active_count())
""")
    assert printed == ["True None", "signal SIGTERM True", "None 1"]


def test_an_earlier_python_handler_is_called_too_and_is_back_after_the_close() -> None:
    printed = run("""
def mine(number, frame):
    print("mine", signal.Signals(number).name, frame is not None)
signal.signal(signal.SIGTERM, mine)
signals = Signals(("SIGTERM",), agreement.request)
send()
print(*agreement.enter())
signals.close()
signals.close()
print(signal.getsignal(signal.SIGTERM) is mine, signals.installed)
send()
print(agreement.enter())
""")
    assert printed == ["mine SIGTERM True", "signal SIGTERM True", "True False", "mine SIGTERM True", "None"]


@pytest.mark.parametrize("earlier", ["SIG_DFL", "SIG_IGN"])
def test_the_earlier_disposition_is_back_after_the_close(earlier: str) -> None:
    printed = run(
        f"""
signal.signal(signal.SIGTERM, signal.{earlier})
Signals(("SIGTERM", "SIGUSR1"), agreement.request).close()
print(signal.getsignal(signal.SIGTERM) is signal.{earlier}, flush=True)
send()
print("still here")
""",
        ends=-15 if earlier == "SIG_DFL" else 0,
    )
    assert printed == (["True"] if earlier == "SIG_DFL" else ["True", "still here"])


def test_a_handler_of_another_library_in_c_is_back_after_the_close() -> None:
    """Python does not know it, as it does not know JAX's own."""
    printed = run("""
import ctypes
libc = ctypes.CDLL(None)
libc.signal.restype = ctypes.c_void_p
libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: print("in C", number))
address = ctypes.cast(callback, ctypes.c_void_p).value
libc.signal(15, address)
signals = Signals(("SIGTERM",), agreement.request)
send()
print(*agreement.enter())
signals.close()
send()
print(libc.signal(15, None) == address)
""")
    assert printed == ["signal SIGTERM True", "in C 15", "True"]


def test_a_handler_that_was_installed_later_stays() -> None:
    printed = run("""
signals = Signals(("SIGTERM",), agreement.request)
def later(number, frame): print("later")
signal.signal(signal.SIGTERM, later)
signals.close()
send()
""")
    assert printed == ["later"]


def test_repeats_are_ignored_for_ten_seconds_and_later_ones_end_the_program() -> None:
    printed = run(
        """
print(preemption.REPEATS)
preemption.REPEATS = 0.5
signals = Signals(("SIGTERM",), agreement.request)
for _ in range(3):
    send()
print(*agreement.enter())
print(agreement.enter(), flush=True)
time.sleep(0.6)
send()
print("not here")
""",
        ends=-15,
    )
    assert printed == ["10.0", "signal SIGTERM True", "None"]


def test_a_later_repeat_ends_a_program_that_ignored_the_signal_before() -> None:
    printed = run(
        """
preemption.REPEATS = 0.0
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signals = Signals(("SIGTERM",), agreement.request)
send()
print("once", flush=True)
send()
""",
        ends=-15,
    )
    assert printed == ["once"]


def test_ctrl_c_may_be_one_of_the_signals() -> None:
    """The first does not raise KeyboardInterrupt; a later one does."""
    printed = run("""
preemption.REPEATS = 0.2
signals = Signals(("SIGINT",), agreement.request)
send("SIGINT")
print(*agreement.enter())
time.sleep(0.3)
try:
    send("SIGINT")
except KeyboardInterrupt:
    print("interrupted")
""")
    assert printed == ["signal SIGINT True", "interrupted"]


def test_off_the_main_thread_nothing_is_installed_and_a_warning_says_so() -> None:
    printed = run(
        """
import sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
made = []
thread = threading.Thread(target=lambda: made.append(Signals(("SIGTERM",), agreement.request)))
thread.start(); thread.join()
print(made[0].installed, signal.getsignal(signal.SIGTERM).name)
made[0].close()
agreement.request("run.stop()", stop=True)
print(*agreement.enter(), flush=True)
send()
""",
        ends=-15,
    )
    assert printed == [
        "WARNING the run was not created on the main thread, so SIGTERM cannot be handled: save and stop with "
        "run.stop()",
        "False SIG_DFL",
        "run.stop() True",
    ]


def test_after_a_close_on_another_thread_signals_are_only_passed_on() -> None:
    printed = run(
        """
signals = Signals(("SIGTERM",), agreement.request)
thread = threading.Thread(target=signals.close)
thread.start(); thread.join()
print("closed", flush=True)
send()
""",
        ends=-15,
    )
    assert printed == ["closed"]


@pytest.mark.parametrize(("earlier", "ends"), [("SIG_DFL", -15), ("SIG_IGN", 0)])
def test_a_forked_child_does_not_act_on_it(earlier: str, ends: int) -> None:
    printed = run(f"""
signal.signal(signal.SIGTERM, signal.{earlier})
signals = Signals(("SIGTERM",), agreement.request)
child = os.fork()
if child == 0:
    send()
    os._exit(0 if agreement.enter() is None else 7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), agreement.enter())
send()
print(*agreement.enter())
""")
    assert printed == [f"{ends} None", "signal SIGTERM True"]


def test_a_signal_at_any_point_of_a_call_is_met_by_it_or_by_the_next() -> None:
    """It arrives at every line of `enter` in turn."""
    printed = run("""
import sys
met = []
for at in range(8):
    signals = Signals(("SIGTERM",), agreement.request)
    left = at
    def trace(frame, event, _):
        global left
        if "agreement.py" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                send()
        return trace
    if at % 2:
        agreement.request("other", stop=False)
    sys.settrace(trace)
    first = agreement.enter()
    sys.settrace(None)
    second = agreement.enter()
    met.append([tuple(a) for a in (first, second) if a is not None])
    signals.close()
    assert agreement.enter() is None
print(sum(any("SIGTERM" in why for why, _ in one) for one in met), max(map(len, met)))
assert all(sum(why.count("SIGTERM") for why, _ in one) <= 1 for one in met)
""")
    (line,) = printed
    found, most = map(int, line.split())
    assert found >= 3
    assert most <= 2


@pytest.mark.parametrize(
    ("signals", "error", "message"),
    [
        ("SIGTERM", TypeError, r'must be a tuple of names, as \("SIGTERM",\), not \'SIGTERM\''),
        (15, TypeError, "must be a tuple of names"),
        (("TERM",), ValueError, "'TERM' is not a signal; use names such as"),
        ((4000,), ValueError, "4000 is not a signal"),
        (("SIGKILL",), ValueError, "no program can handle SIGKILL"),
    ],
)
def test_what_is_no_signal_is_an_error(signals: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_signals(signals)


def test_names_and_numbers_are_signals_each_once() -> None:
    assert parse_signals(("SIGTERM", signal.SIGUSR2, 15)) == [signal.SIGTERM, signal.SIGUSR2]
    assert parse_signals(()) == []
