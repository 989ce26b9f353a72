"""The loop against loops written out by hand, and everything a run promises besides being resumed."""

import csv
import json
import math
import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from regard.nn import Loss
from regard.train import (
    Constant,
    Cosine,
    InverseSquareRoot,
    Linear,
    NonFiniteError,
    Plateau,
    Recipe,
    ResourceError,
    Shuffled,
    Silence,
    fit,
)
from tests.train.small_run import FILES, RECIPE, VOCABULARY, Small, data, remains, small

D = torch.float64


class Quiet(Silence):
    """Keeps what it hears."""

    def __init__(self):
        self.reports, self.lines = [], []

    def advance(self, report):
        self.reports.append(report)

    def say(self, line):
        self.lines.append(line)

    @property
    def losses(self):
        return [report.loss for report in self.reports]


class Plain(Small):
    """Without dropout or noise."""

    def __init__(self, dtype=D):
        super().__init__(dtype)
        self.dropout = nn.Identity()

    def loss(self, tokens, forcing=None):
        was, self.training = self.training, False
        loss = super().loss(tokens)
        self.training = was
        return loss


class InOrder(Shuffled):
    """The batches as they come, each epoch."""

    def __iter__(self):
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.epoch, self.position = self.epoch + 1, 0


def train(folder, model, batches, recipe, **given):
    shown = given.pop("show", Quiet())
    outcome = fit(model, batches, recipe, folder=folder, show=shown, **given)
    return outcome, shown


def rows(path):
    with open(path, newline="") as file:
        return [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]


def by_hand(model, batches, steps, recipe):
    """A plain PyTorch loop: the mean over the targets that are not padding."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps)
    losses = []
    for step in range(steps):
        tokens = batches[step % len(batches)]
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min((step + 1) / 5, math.sqrt(5 / (step + 1)))
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("dtype", "tolerance"), [(D, 1e-12), (torch.float32, 1e-5)])
def test_first_twenty_steps_are_those_of_a_loop_written_by_hand(scratch, dtype, tolerance):
    recipe = Recipe(steps=20, rate=InverseSquareRoot(0.05, warmup=5), weight_decay=0.1, clip=0.5)
    ours, theirs = Plain(dtype), Plain(dtype)
    _, shown = train(scratch / "run", ours, InOrder(data()), recipe)
    expected = by_hand(theirs, data(), 20, recipe)
    assert shown.losses == pytest.approx(expected, rel=tolerance)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("accumulate", [2, 3, 5])
def test_accumulated_batches_are_the_joined_batch(scratch, accumulate):
    """Sizes and padding differ, so the mean of means would be another number."""
    batches = data(15)
    width = max(batch.shape[1] for batch in batches)
    wide = [nn.functional.pad(batch, (0, width - batch.shape[1])) for batch in batches]
    process_group = [torch.cat(wide[n : n + accumulate]) for n in range(0, 15, accumulate)]
    recipe = Recipe(steps=12, rate=Constant(0.05))
    parts, whole = Plain(), Plain()
    _, split = train(scratch / "parts", parts, InOrder(batches), replace(recipe, accumulate=accumulate))
    _, once = train(scratch / "whole", whole, InOrder(process_group), recipe)
    assert split.losses == pytest.approx(once.losses, rel=1e-12)
    for a, b in zip(parts.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_last_step_of_an_epoch_takes_what_is_left(scratch):
    recipe = Recipe(epochs=3, accumulate=4)
    outcome, shown = train(scratch / "run", Plain(), Shuffled(data(9)), recipe)
    assert (outcome.step, outcome.epoch, outcome.reason) == (9, 3, "epochs")
    assert [report.steps for report in shown.reports] == [9] * 9


def test_scalar_losses_are_averaged(scratch):
    class Line(nn.Linear):
        def loss(self, batch):
            return (self(batch) - 1).square().mean()

    torch.manual_seed(0)
    batches = [torch.randn(4, 3, dtype=D) for _ in range(2)]
    ours, theirs = Line(3, 1).to(D), Line(3, 1).to(D)
    theirs.load_state_dict(ours.state_dict())
    train(scratch / "run", ours, InOrder(batches), Recipe(steps=1, accumulate=2, clip=None, rate=Constant(0.1)))
    loss = (theirs.loss(batches[0]) + theirs.loss(batches[1])) / 2
    loss.backward()
    torch.optim.AdamW(theirs.parameters(), lr=0.1, betas=(0.9, 0.98), eps=1e-9, weight_decay=0).step()
    assert torch.allclose(ours.weight, theirs.weight, rtol=1e-12)


def test_learning_rate_goes_on_where_it_was(scratch):
    recipe = Recipe(steps=14, rate=Cosine(0.1, steps=14, warmup=5), log_every=1, save_every=4)
    train(scratch / "run", Plain(), Shuffled(data()), replace(recipe, steps=7))
    _, shown = train(scratch / "run", Plain(), Shuffled(data()), recipe, resume=True)
    assert [report.rate for report in shown.reports] == [recipe.rate(step) for step in range(8, 15)]
    assert [row["rate"] for row in rows(scratch / "run" / "log.csv")] == [recipe.rate(step) for step in range(1, 15)]
    assert shown.lines == [
        f"resuming from {scratch / 'run' / 'step-00000007'}",
        "the recipe differs from that of the checkpoint: steps was 7 and is 14",
        f"ended after 14 steps by steps; best: {scratch / 'run' / 'step-00000014'}",
    ]


def test_log_holds_the_mean_loss_since_the_row_before(scratch):
    recipe = Recipe(steps=6, log_every=3)
    _, shown = train(scratch / "run", Plain(), InOrder(data(6)), recipe)
    counts = [(batch[:, 1:] != 0).sum().item() for batch in data(6)]
    for row, part in zip(rows(scratch / "run" / "log.csv"), (slice(0, 3), slice(3, 6)), strict=True):
        total = sum(loss * count for loss, count in zip(shown.losses[part], counts[part], strict=True))
        assert row["loss"] == pytest.approx(total / sum(counts[part]), rel=1e-12)


def test_evaluation_leaves_no_trace_in_training(scratch):
    """It draws from every generator, switches modes and is made more or less often."""
    often, never = scratch / "often", scratch / "never"
    steady = replace(RECIPE, rate=Constant(0.05))
    small(often, recipe=replace(steady, evaluate_every=1))
    fit(Small(), Shuffled(data(), seed=3), steady, folder=never, files=FILES, show=Silence())
    weights = "step-00000024/model.safetensors"
    assert (often / weights).read_bytes() == (never / weights).read_bytes()


def test_modes_of_modules_come_back_after_an_evaluation(scratch):
    model, seen = Plain(), []
    model.train()

    def evaluate(model):
        model.hidden.train()
        seen.append((model.training, model.out.training, torch.is_grad_enabled()))
        return {"loss": 1.0}

    fit(model, Shuffled(data()), Recipe(steps=2, evaluate_every=1), folder=scratch, evaluate=evaluate, show=Silence())
    assert seen == [(False, False, False)] * 2
    assert all(module.training for module in model.modules())


def scripted(scores):
    """An evaluation that gives these scores, one after the other."""
    left = iter(scores)
    return lambda model: {"loss": next(left)}


@pytest.mark.parametrize(
    ("better", "scores", "step", "best"),
    [
        ("lower", [5.0, 4.0, 4.0, 4.5, 1.0], 4, 2),
        ("higher", [5.0, 6.0, 6.0, 5.5, 9.0], 4, 2),
        ("lower", [5.0, math.nan, math.inf, 4.5, 4.6, 4.7, 1.0], 3, 1),
        ("higher", [math.nan, 1.0, -math.inf, 2.0, 1.0, 1.5], 6, 4),
    ],
)
def test_training_stops_when_nothing_better_comes(scratch, better, scores, step, best):
    recipe = Recipe(steps=50, evaluate_every=1, patience=2, better=better, keep=1)
    outcome, _ = train(scratch, Plain(), Shuffled(data()), recipe, evaluate=scripted(scores))
    assert (outcome.step, outcome.reason) == (step, "patience")
    assert outcome.best == scratch / f"step-{best:08d}"
    assert outcome.score == scores[best - 1]
    assert os.readlink(scratch / "best") == outcome.best.name
    assert sorted(path.name for path in scratch.glob("step-*")) == [f"step-{n:08d}" for n in (best, step)]


@pytest.mark.parametrize(("metric", "better"), [("loss", "lower"), ("chrf", "lower")])
def test_scores_of_another_metric_are_forgotten(scratch, metric, better):
    losses = iter([5.0, 4.0, 3.0, 2.0, 1.0, 1.5])

    def evaluate(model):
        loss = next(losses)
        return {"chrf": 50 + loss, "loss": loss}

    begun = Recipe(steps=3, evaluate_every=1, metric="chrf", better="higher", keep=9)
    train(scratch, Plain(), Shuffled(data()), begun, evaluate=evaluate)
    assert os.readlink(scratch / "best") == "step-00000001"
    recipe = replace(begun, steps=5, metric=metric, better=better, patience=2)
    outcome, shown = train(scratch, Plain(), Shuffled(data()), recipe, evaluate=evaluate, resume=True)
    told = f"earlier scores (chrf, higher being better) are not comparable with new ones ({metric}, lower being better)"
    assert f"{told}; the search for the best restarts at step 3" in shown.lines
    assert (outcome.step, outcome.reason, outcome.best.name) == (5, "steps", "step-00000004")
    assert os.readlink(scratch / "best") == "step-00000004"


def test_a_run_that_goes_on_keeps_what_was_best_when_it_ended(scratch):
    recipe = Recipe(steps=5, evaluate_every=2, keep=1)
    ended, _ = train(scratch / "parts", Plain(), Shuffled(data()), recipe, evaluate=scripted([5.0, 4.0, 1.0]))
    assert ended.best.name == "step-00000005"
    again, longer = scripted([1.0, 3.0, 2.0]), replace(recipe, steps=8)
    outcome, _ = train(scratch / "parts", Plain(), Shuffled(data()), longer, evaluate=again, resume=True)
    assert (outcome.best.name, outcome.score) == ("step-00000005", 1.0)
    assert outcome.best.exists()
    train(scratch / "whole", Plain(), Shuffled(data()), longer, evaluate=scripted([5.0, 4.0, 3.0, 2.0]))
    weights = [scratch / run / "step-00000008" / "model.safetensors" for run in ("parts", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_where_training_goes_by_scores_that_of_an_end_is_left_out_and_told(scratch):
    recipe = Recipe(steps=5, evaluate_every=2, patience=9)
    train(scratch, Plain(), Shuffled(data()), recipe, evaluate=scripted([5.0, 4.0, 1.0]))
    again, longer = scripted([3.0, 2.0]), replace(recipe, steps=8)
    outcome, shown = train(scratch, Plain(), Shuffled(data()), longer, evaluate=again, resume=True)
    assert outcome.best.name == "step-00000008"
    told = "no evaluation at step 5, where the run ended"
    assert any(told in line for line in shown.lines)
    # That of step 8 is made again.
    again, longest = scripted([2.0, 1.0]), replace(recipe, steps=10)
    outcome, shown = train(scratch, Plain(), Shuffled(data()), longest, evaluate=again, resume=True)
    assert outcome.best.name == "step-00000010"
    assert not any("left out" in line for line in shown.lines)


def recorded(valid):
    told = {"data": {"--text": "a"}} | ({} if valid is None else {"valid": {"--text": valid}})
    return {"data.json": json.dumps(told)}


@pytest.mark.parametrize(("before", "now", "best"), [("b", "c", 4), ("b", "b", 1), (None, "b", 1), ("b", None, 1)])
def test_scores_on_other_data_to_validate_by_are_forgotten(scratch, before, now, best):
    recipe = Recipe(steps=3, evaluate_every=1, keep=9)
    losses = scripted([1.0, 2.0, 3.0]), scripted([7.0, 5.0, 6.0])
    train(scratch, Plain(), Shuffled(data()), recipe, evaluate=losses[0], files=recorded(before))
    given = {"evaluate": losses[1], "files": recorded(now), "resume": True}
    outcome, shown = train(scratch, Plain(), Shuffled(data()), replace(recipe, steps=5), **given)
    told = "earlier scores (on other data) are not comparable with new ones (on this data)"
    told += "; the search for the best restarts at step 3"
    assert (told in shown.lines) == (best == 4)
    assert os.readlink(scratch / "best") == outcome.best.name == f"step-{best:08d}"


def test_metrics_may_come_and_go(scratch):
    found = iter([{"loss": 3.0}, {"loss": 2.0, "f1": 0.5}, {"loss": 1.0, "exact": 0.25}])
    recipe = Recipe(steps=2, evaluate_every=1)
    train(scratch, Plain(), Shuffled(data()), recipe, evaluate=lambda model: next(found))
    found = iter([{"loss": 2.0, "exact": 0.25}] * 2)
    train(scratch, Plain(), Shuffled(data()), replace(recipe, steps=3), evaluate=lambda model: next(found), resume=True)
    with (scratch / "evaluations.csv").open(newline="") as file:
        rows = [{name: value for name, value in row.items() if name != "epoch"} for row in csv.DictReader(file)]
    assert rows[0] == {"step": "1", "loss": "3.0", "f1": "", "exact": ""}
    assert rows[-1] == {"step": "3", "loss": "2.0", "f1": "", "exact": "0.25"}


def test_a_record_of_ones_own_says_nothing_of_scores(scratch):
    recipe = Recipe(steps=2, evaluate_every=1)
    train(scratch, Plain(), Shuffled(data()), recipe, evaluate=scripted([1.0, 2.0]), files={"data.json": "no JSON"})
    given = {"evaluate": scripted([2.0, 3.0]), "files": {"data.json": "[1]"}, "resume": True}
    outcome, _ = train(scratch, Plain(), Shuffled(data()), replace(recipe, steps=3), **given)
    assert outcome.best.name == "step-00000001"


@pytest.mark.parametrize(
    ("better", "score", "evaluated", "ended"),
    [
        ("lower", 1e304, "loss 1.0e+304", ", 1.0e+304"),
        ("lower", math.nan, "loss nan", ", nan"),
        ("higher", math.nan, "loss nan", ", nan"),
        ("lower", math.inf, "loss inf", ", nan"),
        ("higher", math.inf, "loss inf", ", inf"),
        ("lower", -math.inf, "loss -inf", ", -inf"),
    ],
)
def test_scores_beyond_reading_are_told_short(scratch, better, score, evaluated, ended):
    recipe = Recipe(steps=1, evaluate_every=1, better=better)
    _, shown = train(scratch, Plain(), Shuffled(data()), recipe, evaluate=scripted([score]))
    assert shown.lines[0] == f"step 1 · evaluation · {evaluated} · best so far"
    assert shown.lines[1] == f"ended after 1 steps by steps; best: {scratch / 'step-00000001'}{ended}"


def test_plateau_begins_at_its_peak_where_scores_are_forgotten(scratch):
    recipe = Recipe(steps=3, evaluate_every=1, rate=Plateau(1.0, patience=0, factor=0.1), log_every=1)
    train(scratch, Plain(), Shuffled(data()), recipe, evaluate=scripted([1.0, 2.0, 3.0]))
    other = replace(recipe, steps=4, better="higher")
    _, shown = train(scratch, Plain(), Shuffled(data()), other, evaluate=scripted([4.0, 5.0]), resume=True)
    assert any(line.endswith("restarts at step 3, and the rate restarts at its peak") for line in shown.lines)
    assert [row["rate"] for row in rows(scratch / "log.csv")] == pytest.approx([1.0, 1.0, 0.1, 1.0])


def test_plateau_lowers_the_rate_by_the_scores(scratch):
    recipe = Recipe(steps=5, evaluate_every=1, rate=Plateau(1.0, patience=0, factor=0.1), better="higher", log_every=1)
    train(scratch, Plain(), Shuffled(data()), recipe, evaluate=scripted([1.0, 2.0, 1.5, 1.4, 3.0]))
    assert [row["rate"] for row in rows(scratch / "log.csv")] == pytest.approx([1.0, 1.0, 1.0, 0.1, 0.01])


def test_forcing_is_handed_to_the_loss(scratch):
    class Forced(Plain):
        def loss(self, tokens, forcing):
            handed.append(forcing)
            return super().loss(tokens)

    handed = []
    recipe = Recipe(steps=3, forcing=Linear(steps=4), accumulate=2)
    train(scratch, Forced(), Shuffled(data()), recipe)
    assert handed == [1.0, 1.0, 0.75, 0.75, 0.5, 0.5]


def test_without_steps_and_evaluation_each_epoch_is_saved(scratch):
    train(scratch, Plain(), Shuffled(data(3)), Recipe(epochs=2, keep=9))
    assert sorted(path.name for path in scratch.glob("step-*")) == [f"step-{n:08d}" for n in (0, 3, 6)]


def test_zero_steps_save_the_model_as_it_is(scratch):
    outcome, _ = train(scratch, Plain(), Shuffled(data(3)), Recipe(steps=0))
    assert outcome.best == scratch / "step-00000000"
    assert outcome.score is None


class Faulty(Plain):
    """Breaks at a certain call, in a certain way."""

    def __init__(self, at, how):
        super().__init__()
        self.calls, self.at, self.how = 0, at, how
        self.scale = nn.Parameter(torch.ones(VOCABULARY, dtype=D))

    def loss(self, tokens, forcing=None):
        self.calls += 1
        if self.calls < self.at:
            return super().loss(tokens)
        if self.how == "weight":
            self.out.weight.data[3, 3] = math.nan
        if self.how == "module":
            self.hidden.register_forward_hook(lambda module, given, result: result / 0)
        if self.how == "loss":
            loss = super().loss(tokens)
            return Loss(loss.sum * math.inf, loss.count)
        if self.how == "gradient":
            loss = super().loss(tokens)
            return Loss(loss.sum + (self.scale - 1).abs().sum().sqrt(), loss.count)
        if self.how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
        return super().loss(tokens)


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("weight", "the weight out.weight is not finite"),
        ("module", "hidden is the first module whose output is not finite"),
        ("loss", "every module's output is finite, but the loss is not"),
        ("gradient", "the loss is finite, but the gradient of scale is not"),
    ],
)
def test_numbers_that_are_not_finite_stop_the_run_and_are_located(scratch, how, place):
    recipe = Recipe(steps=20, save_every=2, accumulate=2)
    model = Faulty(10, how)
    with pytest.raises(NonFiniteError) as error:
        train(scratch, model, InOrder(data(7)), recipe)
    message = str(error.value)
    # Seven batches make four steps of two; the tenth batch is the third of the second epoch.
    where = "batch 3" if how in ("module", "loss") else "batches 3 to 4"
    assert f"at step 6 (epoch 1, {where}): {place}" in message
    assert f"the last good state is {scratch / 'step-00000004'}" in message
    assert error.value.exit_code == 4
    outcome, _ = train(scratch, Faulty(99, how), InOrder(data(7)), recipe, resume=True)
    assert outcome.step == 20


def test_batch_that_is_not_finite_is_named(scratch):
    class Line(nn.Linear):
        def loss(self, batch):
            return self(batch).square().mean()

    batches = InOrder([torch.ones(2, 3), torch.ones(2, 3), torch.tensor([[1.0, math.nan, 1.0]])])
    with pytest.raises(NonFiniteError, match=r"at step 3 \(epoch 0, batch 3\): the input of Line is not finite"):
        train(scratch, Line(3, 1), batches, Recipe(steps=9))


def test_out_of_memory_says_what_to_do(scratch):
    with pytest.raises(ResourceError, match=r"out of memory: .* 2 GiB\.; make the batches smaller, and acc") as error:
        train(scratch, Faulty(3, "memory"), Shuffled(data()), Recipe(steps=9))
    assert error.value.exit_code == 5
    assert "\n" not in str(error.value)


def test_autocast_computes_in_bfloat16(scratch):
    class Watched(Plain):
        def forward(self, tokens):
            result = super().forward(tokens)
            dtypes.add(result.dtype)
            return result

    dtypes = set()
    train(scratch / "a", Watched(torch.float32), Shuffled(data()), Recipe(steps=2, precision="bfloat16"))
    assert dtypes == {torch.bfloat16}
    dtypes.clear()
    train(scratch / "b", Watched(torch.float32), Shuffled(data()), Recipe(steps=2))
    assert dtypes == {torch.float32}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
def test_compiled_run_is_the_eager_one(scratch):
    recipe = Recipe(steps=6, rate=Constant(0.05))
    _, eager = train(scratch / "eager", Plain(), InOrder(data()), recipe)
    _, compiled = train(scratch / "compiled", Plain(), InOrder(data()), replace(recipe, compile=True))
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-9)


@pytest.mark.gpu
def test_gpu_run_trains_in_bfloat16_and_resumes(scratch):
    recipe = Recipe(steps=30, rate=Constant(0.02), save_every=10)
    _, shown = train(scratch / "whole", Plain(torch.float32).cuda(), Shuffled(data()), recipe)
    assert shown.losses[-1] < shown.losses[0]
    train(scratch / "cut", Plain(torch.float32).cuda(), Shuffled(data()), replace(recipe, steps=20))
    _, resumed = train(scratch / "cut", Plain(torch.float32).cuda(), Shuffled(data()), recipe, resume=True)
    assert resumed.losses == pytest.approx(shown.losses[20:], rel=1e-2)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": nn.Linear(1, 1)}, TypeError, "model must have a method loss(batch), got Linear without one"),
        ({"batches": [1, 2]}, TypeError, "batches must have __iter__, state and restore, got list; wrap a list in Sh"),
        ({"batches": Shuffled([])}, ValueError, "batches must have at least one batch per epoch"),
        (
            {"recipe": Recipe(steps=2, patience=1)},
            ValueError,
            "patience and Plateau need evaluations; pass validation data",
        ),
        ({"recipe": Recipe(steps=2, rate=Plateau(1.0))}, ValueError, "patience and Plateau need evaluations"),
        (
            {"evaluate": lambda model: {"los": 1.0}},
            ValueError,
            "evaluate returned no 'loss', the recipe's metric; did you",
        ),
        (
            {"evaluate": lambda model: 1.0},
            TypeError,
            "evaluate must return numbers by name, got float; write return {'l",
        ),
        ({"evaluate": lambda model: None}, TypeError, "got NoneType; write return {'loss': ...}"),
        ({"files": {"training.json": ""}}, ValueError, "files must have plain names other than model.safetensors"),
        ({"files": {"../config.json": ""}}, ValueError, "got '../config.json'"),
    ],
)
def test_bad_calls_are_answered(scratch, given, error, message):
    given = {"model": Plain(), "batches": Shuffled(data()), "recipe": Recipe(steps=2)} | given
    with pytest.raises(error) as raised:
        fit(given.pop("model"), given.pop("batches"), given.pop("recipe"), folder=scratch, show=Silence(), **given)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (
            lambda x: x.new_ones(3),
            ValueError,
            "loss must be a scalar, got shape (3,); return an object with sum and count",
        ),
        (lambda x: 0.3, TypeError, "loss must be a scalar tensor or have sum and count, got float"),
    ],
)
def test_bad_losses_are_answered(scratch, loss, error, message):
    class Line(nn.Linear):
        def loss(self, batch):
            return loss(self(batch))

    with pytest.raises(error) as raised:
        train(scratch, Line(2, 2), Shuffled([torch.ones(1, 2)]), Recipe(steps=1))
    assert message in str(raised.value)


def test_process_that_never_had_a_batch_says_so(scratch, monkeypatch):
    told = iter([0, 1])  # no signal; another process has a batch
    monkeypatch.setattr("regard.train.Group.largest", lambda group, value: next(told))
    with pytest.raises(ValueError, match="every process needs at least one batch, process 0 has none"):
        train(scratch, Plain(), Shuffled([]), Recipe(steps=1))


def test_model_without_parameters_to_train_is_refused(scratch):
    model = Plain().requires_grad_(False)
    with pytest.raises(ValueError, match="model must have parameters that require a gradient"):
        train(scratch, model, Shuffled(data()), Recipe(steps=1))


def test_model_without_parameters_is_refused(scratch):
    class Bare(nn.Module):
        def loss(self, batch):
            return torch.zeros(())

    with pytest.raises(ValueError, match="model must have parameters to train, got Bare without any"):
        train(scratch, Bare(), Shuffled(data()), Recipe(steps=1))


@pytest.mark.parametrize("recipe", [Recipe(steps=9), Recipe(epochs=1), Recipe(steps=9, accumulate=3)])
def test_epoch_in_which_nothing_counts_is_refused(scratch, recipe):
    nothing = [torch.zeros(2, 5, dtype=torch.long), torch.zeros(0, 5, dtype=torch.long)]
    with pytest.raises(ValueError, match="no loss in the 2 batches of an epoch counted an item"):
        train(scratch / "nothing", Plain(), Shuffled(nothing), recipe)
    train(scratch / "little", Plain(), Shuffled([*nothing, data(1)[0]]), recipe)


def test_epoch_resumed_among_batches_in_which_nothing_counts_goes_on(scratch):
    batches = [data(1)[0], *[torch.zeros(1, 5, dtype=torch.long)] * 3]
    train(scratch, Plain(), InOrder(batches), Recipe(steps=2))
    outcome, _ = train(scratch, Plain(), InOrder(batches), Recipe(epochs=1), resume=True)
    assert outcome.step == 4


def test_same_seed_gives_the_same_run(scratch, uninterrupted):
    torch.manual_seed(123)
    small(scratch / "again")
    assert remains(scratch / "again") == uninterrupted
    small(scratch / "other", recipe=replace(RECIPE, seed=4))
    assert remains(scratch / "other")["log"] != uninterrupted["log"]


def test_other_data_of_the_same_count_is_refused_when_a_run_is_resumed(tmp_path):
    data = [torch.randn(8, 1) for _ in range(8)]

    class Line(torch.nn.Linear):
        def loss(self, x):
            return self(x).square().mean()

    fit(Line(1, 1), Shuffled(data), Recipe(steps=2), folder=tmp_path)
    longer = Recipe(steps=4)
    with pytest.raises(
        ValueError, match="must continue with the same training data, but these batches hold other data"
    ):
        fit(Line(1, 1), Shuffled([100 * x for x in data]), longer, folder=tmp_path, resume=True)
    outcome = fit(Line(1, 1), Shuffled([x.clone() for x in data]), longer, folder=tmp_path, resume=True)
    assert outcome.step == 4


def test_long_warmup_is_reported_with_the_rate_it_reaches(tmp_path, capsys):
    class Line(torch.nn.Linear):
        def loss(self, x):
            return self(x).square().mean()

    def train(folder, **settings):
        fit(Line(1, 1), Shuffled([torch.ones(1, 1)] * 5), Recipe(**settings), folder=tmp_path / folder)
        return capsys.readouterr().err

    said = "the warm-up takes 20 of 10 steps, so the learning rate reaches 5.0e-04 of 1.0e-03; a fifth of the steps, 2"
    assert said in train("a", steps=10, rate=Constant(1e-3, warmup=20))
    assert said in train("b", epochs=2, rate=Constant(1e-3, warmup=20))
    assert "warm-up" not in train("c", steps=10, rate=Constant(1e-3, warmup=2))
