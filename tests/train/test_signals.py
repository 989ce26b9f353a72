"""Signals are heard once, raise only where asked to, and are given back."""

import os
import signal
import threading
import time

import pytest

from regard.train import Stopped, fit
from regard.train.signals import Interruption, Signals
from tests.train import small_run
from tests.train.small_run import Shuffled, Silence, Small, remains


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_is_noted_and_the_next_is_no_longer_ours(number):
    before = signal.getsignal(number)
    with Signals() as signals:
        assert signals.received == 0
        os.kill(os.getpid(), number)
        assert signals.received == number
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before


def test_signal_raises_at_once_where_asked_to():
    with Signals() as signals:
        with pytest.raises(Interruption), signals.at_once():
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interruption), signals.at_once():
            pytest.fail("a signal that has come already must not be forgotten")


def test_handlers_are_given_back_when_nothing_comes():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Signals():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_other_threads_train_without_listening():
    heard = []
    thread = threading.Thread(target=lambda: heard.append(Signals().__enter__().received))
    thread.start()
    thread.join()
    assert heard == [0]


def test_signal_during_an_evaluation_does_not_wait_for_its_end(scratch, uninterrupted):
    def endless(model):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    model, batches = Small(), Shuffled(small_run.data(), seed=small_run.RECIPE.seed)
    given = {"folder": scratch / "run", "files": small_run.FILES, "show": Silence()}
    began = time.monotonic()
    with pytest.raises(Stopped, match="stopped at step 3") as stopped:
        fit(model, batches, small_run.RECIPE, evaluate=endless, **given)
    assert time.monotonic() - began < 30
    assert stopped.value.code == 143
    assert stopped.value.signal is signal.SIGTERM
    assert model.training
    small_run.small(scratch / "run", resume=True)
    assert remains(scratch / "run") == uninterrupted
