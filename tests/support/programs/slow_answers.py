"""A process of `dipaco.base.bounded_process` that waits, or computes, as many seconds as it is asked to."""

import time

from dipaco.base.bounded_process import answer_lines


def answer(question):
    what, seconds = question
    if what == "wait":
        time.sleep(seconds)
    until_s = time.process_time() + seconds * (what == "compute")
    while time.process_time() < until_s:
        pass
    return what


if __name__ == "__main__":
    answer_lines(2**30, lambda first: (None, answer))
