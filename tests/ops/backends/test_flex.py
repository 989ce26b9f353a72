"""FlexAttention: what it objects to, which kernels it compiles, and when it tells the statistic."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.exc import InductorError

import regard as R
from regard.ops import dispatch
from regard.ops.backends import flex, reference, tiled
from regard.ops.call import Call
from tests.backends import flex_on_the_cpu
from tests.ops.inputs import qkv


def test_more_heads_than_a_grid_takes_are_an_objection_of_flex():
    x = torch.zeros(2**14, 4, 1, 16)
    assert "at most 65535 pairs of a batch row and a head" in " ".join(flex.plan(Call.of(x, x, x)))


def test_contexts_have_a_kernel_of_their_own_and_other_lengths_share_one(monkeypatch):
    monkeypatch.setattr(flex, "_compile_kind", lambda kind: kind)
    q = SimpleNamespace(device=torch.device("cuda"))

    def kernel(n_i, n_j, with_statistic=False):
        call = SimpleNamespace(q=q, score=R.Dot(), mask=R.Window(9), bias=None, offset=0, shape=(1, 1, n_i, n_j))
        return flex._attention(call, with_statistic)

    assert len({kernel(n, n) for n in (1024, 2048, 65536)} | {kernel(1024, 2048)}) == 4
    assert len({kernel(n, m) for n, m in ((1000, 1000), (3072, 3072), (512, 512), (1, 2048), (2048, 2000))}) == 1
    assert kernel(1024, 1024) != kernel(1024, 1024, with_statistic=True)


@pytest.mark.parametrize("normalize", [None, R.SinkSoftmax(torch.zeros(4))], ids=["softmax", "sinks"])
def test_flex_tells_the_statistic_only_where_it_is_asked_for(normalize, monkeypatch):
    asked = []
    real = flex._call_flex
    monkeypatch.setattr(flex, "_call_flex", lambda *given: asked.append(given[-1]) or real(*given))
    q, k, v = qkv()
    terms = {"mask": R.Causal() & R.Window(9), "normalize": normalize}
    with flex_on_the_cpu():
        call = Call.of(q, k, v, **terms)
        out, none = flex.plan(call).run()
        again, statistic = flex.plan(call.with_values(v)).run()
    want, exact = reference.plan(call).run()
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(again, want)
    torch.testing.assert_close(statistic, exact)
    assert asked == [normalize is not None, True]
    assert (none is None) is (normalize is None)


class TestWhatPyTorchCannotCompile:
    @pytest.fixture(autouse=True)
    def no_kernel(self, monkeypatch):
        """No kernel compiles for 5 features; tells how often one was asked for."""
        asked, real = [], flex._call_flex

        def compiled(q, *rest):
            asked.append(q.shape)
            if q.shape[-1] == 5:
                raise InductorError(RuntimeError("no valid configuration\nand much more"), None)
            return real(q, *rest)

        monkeypatch.setattr(flex, "_call_flex", compiled)
        monkeypatch.setattr(flex, "_FAILED", {})
        monkeypatch.setattr(dispatch, "order", lambda call: (flex, tiled))
        return asked

    def test_another_backend_runs_it_and_explain_says_why(self, no_kernel):
        q, k, v = qkv(d=5)
        terms = {"mask": R.Causal() & R.Window(9), "bias": R.Alibi(4)}
        want = R.attend(q, k, v, **terms, backend="reference")
        with flex_on_the_cpu():
            with pytest.warns(UserWarning, match=r"could not compile .*: no valid configuration\); slower"):
                torch.testing.assert_close(R.attend(q, k, v, **terms), want)
            torch.testing.assert_close(R.attend(q, k, v, **terms), want)  # without a warning, which is an error here
            assert len(no_kernel) == 1
            explained = R.explain(q, k, v, **terms)
            assert "could not compile it for this kind of call (RuntimeError: no valid configuration)" in explained
            q, k, v = qkv(d=4)
            want = R.attend(q, k, v, **terms, backend="reference")
            torch.testing.assert_close(R.attend(q, k, v, **terms), want)
        assert len(no_kernel) == 2

    def test_asked_for_by_name_it_is_an_error_that_names_the_next_step(self):
        q, k, v = qkv(d=5)
        with flex_on_the_cpu(), pytest.raises(ValueError, match=r"no valid configuration\); leave backend= out"):
            R.attend(q, k, v, bias=R.Alibi(4), backend="flex")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_wide_heads_in_float32_run_on_another_backend():
    q, k, v = (torch.randn(1, 2, 600, 192, device="cuda") for _ in range(3))
    for mask in (R.Window(50), R.Dilated(20, 2)):
        assert "in float32 its tiles fit" in R.explain(q, k, v, mask=mask)
        want = R.attend(q, k, v, mask=mask, backend="reference")
        torch.testing.assert_close(R.attend(q, k, v, mask=mask), want, atol=1e-4, rtol=1e-4)
