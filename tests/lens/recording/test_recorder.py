"""A recorder keeps the calls and heads that were chosen, in call order, from any thread."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from regard import Alibi, Causal
from regard.lens import CaptureWarning, capture
from regard.lens.interception.kernel_call import KernelCall
from regard.lens.recording import recorder as recorder_module
from regard.lens.recording.observed import ObservedAttention
from regard.lens.recording.recorder import Recorder
from regard.lens.recording.store import Store
from regard.lens.terms.interpret import Interpreter
from regard.nn import Attention, KVCache
from tests.lens.sdpa_layers import B, D, H, Layer, N, Stack, tokens


def test_inference_mode_is_recorded():
    layer, x = Attention(D, H), tokens()
    with torch.inference_mode(), capture(layer) as tape:
        layer(x)
    assert not tape[0]._call.q.is_inference()
    assert torch.equal(tape[0].dense(), layer.weights(x).dense())


def test_queries_and_keys_are_cast_as_autocast_casts_them():
    layer, x = Layer(), tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), capture(layer) as tape:
        layer(x)
    assert tape[0]._call.q.dtype == torch.bfloat16


def test_layers_and_heads_can_be_chosen():
    model, x = nn.Sequential(*(Attention(D, H, kv_heads=2, bias=Alibi(H), mask=Causal()) for _ in range(3))), tokens()
    with torch.no_grad(), capture(model, layers=["0", "[2-9]"], heads=[2, 1]) as tape:
        model(x)
        truth = model[0].weights(x).dense()
    assert tape.layers == ["0", "2"]
    assert tape["0"]._call.q.shape[1] == 2
    assert torch.equal(tape["0"].dense(), truth[:, [2, 1]])


def test_a_head_that_the_layer_does_not_have_is_named():
    model = Layer()
    with (
        pytest.raises(IndexError, match=r"heads must be from 0 to 3 in '\(model\)', got heads=\[4\]"),
        capture(model, heads=[4]),
    ):
        model(tokens())


@pytest.mark.parametrize(
    "make", [Layer, lambda: Attention(D, H), lambda: nn.MultiheadAttention(D, H, batch_first=True)]
)
def test_gradients_of_outputs_are_kept_on_request(make):
    layer, x, target = make(), tokens(), tokens()
    with capture(layer, values=True, gradients=True) as tape:
        out = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
        (out * target).sum().backward()
    extras = tape.extras(0)
    joined = target @ extras.projection  # the gradient of the heads side by side
    assert (extras.gradient - joined.unflatten(-1, (H, -1)).transpose(1, 2)).abs().max() < 1e-5


def test_gradients_need_a_forward_pass_with_gradients():
    layer = Layer()
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"gradients=True needs.*torch.no_grad"),
        capture(layer, gradients=True),
    ):
        layer(tokens())


def test_a_tape_can_be_read_while_the_model_runs():
    layer, x = Attention(D, H, mask=Causal()).eval(), tokens()
    with torch.no_grad(), capture(layer) as tape:
        cache = KVCache()
        for n, part in enumerate(x.split(1, 1)):
            layer(part, cache=cache)
            assert tape[0].shape == (B, H, n + 1, n + 1)


def test_a_model_that_runs_in_several_threads_is_recorded_in_all():
    model, inputs = Stack(), [tokens(N, 1) for _ in range(12)]
    with capture(model) as tape, torch.no_grad(), ThreadPoolExecutor(4) as pool:
        list(pool.map(model, inputs))
    assert len(tape) == 3 * len(inputs)


def tensors():
    return torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)


def test_a_deferred_call_whose_keys_were_written_to_raises_when_read():
    interpreter = Interpreter(Store())
    recorder = Recorder(store=Store())
    for name in ("good", "bad"):
        q, k = tensors()
        assert recorder.can_defer(name, q, k)
        recorder.record_deferred(name, lambda q=q, k=k: interpreter.read(KernelCall(q=q, k=k, v=k)))
    k.add_(1)
    assert recorder.entries["good", 0].weights({}).shape == (1, 2, 5, 5)
    with pytest.raises(RuntimeError, match=r"shape \(1, 2, 5, 4\) was changed in place"):
        recorder.entries["bad", 0].weights({})


def test_only_whole_plain_tensors_of_a_first_call_are_deferred():
    recorder, (q, k) = Recorder(store=Store()), tensors()
    assert recorder.can_defer("x", q, k)
    assert not recorder.can_defer("x", q[:, :1], k)
    assert not recorder.can_defer("x", q.clone().requires_grad_(), k)
    assert not recorder.can_defer("x", q, k.clone().zero_())
    with torch.inference_mode():
        assert not recorder.can_defer("x", q + 1, k)
    with torch.autocast("cpu"):
        assert not recorder.can_defer("x", q, k)
    with recorder.generation():
        assert not recorder.can_defer("x", q, k)
    recorder.record("x", ObservedAttention(q, k, k), q)
    assert not recorder.can_defer("x", q, k)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"layers": ["x"]}, id="layers"),
        pytest.param({"heads": [0]}, id="heads"),
        pytest.param({"keep": ["entropy"]}, id="measures"),
        pytest.param({"values": True}, id="values"),
        pytest.param({"gradients": True}, id="gradients"),
        pytest.param({"store": Store(budget="1GB")}, id="budget"),
        pytest.param({"store": Store("cpu")}, id="device"),
    ],
)
def test_options_of_capture_switch_deferring_off(asked):
    assert not Recorder(**{"store": Store(), **asked}).can_defer("x", *tensors())


@pytest.mark.parametrize("error", [RuntimeError("no such shape"), KeyError("scale")])
def test_an_error_of_the_interpretation_does_not_stop_the_model(monkeypatch, error):
    model, x = nn.Sequential(Layer(), Layer()), tokens()
    expected, read, calls = model(x), Interpreter.read, []

    def fail_once(self, call):
        calls.append(call)
        if len(calls) == 1:
            raise error
        return read(self, call)

    monkeypatch.setattr(Interpreter, "read", fail_once)
    with pytest.warns(CaptureWarning, match="reading its arguments failed"), capture(model) as tape:
        assert torch.equal(model(x), expected)
    assert tape.layers == ["1"]
    (left_out,) = tape.unseen
    assert left_out.layer == "0"
    assert "report this as a bug" in left_out.reason


@pytest.mark.parametrize("error", [MemoryError("too much"), CaptureWarning("dense")])
def test_a_budget_and_warnings_made_errors_do_stop_it(monkeypatch, error):
    def fail(self, call):
        raise error

    monkeypatch.setattr(Interpreter, "read", fail)
    with pytest.raises(type(error)), capture(model := nn.Sequential(Layer())):
        model(tokens())


@pytest.mark.parametrize("most", [0, 2**18])
def test_keys_of_steps_are_compared_with_those_of_the_step_before(most, monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_COPIED_BYTES", most)
    whole = torch.randn(2, 3, 9, 4)
    keys = [whole[:, :, :n].clone() for n in (5, 6, 7, 9)]
    assert bool(recorder_module._are_prefixes(keys))
    assert bool(recorder_module._are_prefixes(keys[:2]))
    for step, key in ((0, 4), (1, 5), (2, 0), (3, 6)):
        changed = [k.clone() for k in keys]
        changed[step][1, 2, key, 0] += 1
        assert not bool(recorder_module._are_prefixes(changed))
    changed[3][1, 2, 6, 0] -= 1
    changed[3][:, :, 8] += 1  # the last keys belong to no earlier step
    assert bool(recorder_module._are_prefixes([*keys[:3], changed[3]]))
    assert not bool(recorder_module._are_prefixes(keys[::-1]))
