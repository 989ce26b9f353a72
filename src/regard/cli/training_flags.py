"""The flags of a training `Recipe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..checks import suggest_name
from ..train import Constant, Cosine, Exponential, InverseSigmoid, InverseSquareRoot, Linear, Plateau, Recipe
from ..train.dataclass_json import check_types
from ..train.loggers import LoggerName, check_installed
from ..train.scheduled_sampling import Forcing
from ..train.schedules import Schedule

DEFAULT_WARMUP = 400
LOWER_IS_BETTER = ("loss", "bits", "perplexity")


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of a training run; `recipe` makes a `Recipe` of them."""

    steps: Annotated[int | None, "Number of optimizer steps. Default: 10,000 unless --epochs is given."] = None
    epochs: Annotated[int | None, "Number of passes over the training data."] = None
    rate: Annotated[float, "Peak learning rate."] = 1e-3
    schedule: Annotated[
        Literal["inverse-sqrt", "cosine", "constant", "plateau"], "Learning-rate schedule after the warm-up."
    ] = "inverse-sqrt"
    warmup: Annotated[
        int | None,
        "Number of warm-up steps, in which the learning rate rises from 0 to its peak. Default: 400, or a tenth of "
        "--steps if that is fewer.",
    ] = None
    weight_decay: Annotated[float, "Weight decay of AdamW, for matrices only."] = 0.0
    clip: Annotated[float | None, "Maximum norm of the gradient; larger gradients are scaled down."] = 1.0
    accumulate: Annotated[int, "Number of batches per optimizer step (gradient accumulation)."] = 1
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        "Number format of computation; auto is bfloat16 on a GPU and float32 on a CPU.",
    ] = "auto"
    compile: Annotated[bool, "Compile the model with torch.compile."] = False
    graphs: Annotated[bool, "Replay batches of a shape seen before as CUDA graphs (GPU only)."] = False
    shard: Annotated[bool, "Shard the weights over processes (FSDP2)."] = False
    evaluate_every: Annotated[int, "Number of steps between evaluations on the validation data."] = 500
    save_every: Annotated[int, "Number of steps between checkpoints."] = 500
    keep: Annotated[int, "Number of recent checkpoints to keep besides the best."] = 2
    metric: Annotated[str | None, "Metric that selects the best checkpoint. Default: see the description above."] = None
    patience: Annotated[int | None, "Stop after this number of evaluations without improvement. Default: never."] = None
    average: Annotated[int | None, "Average this number of the last checkpoints at the end. Default: none."] = None
    log_every: Annotated[int, "Number of steps between log lines."] = 50
    log: Annotated[
        LoggerName | tuple[LoggerName, ...],
        "Logger of the run: CSV tables in its folder, TensorBoard, or Weights & Biases; may be repeated.",
    ] = "csv"
    monitor: Annotated[
        int | None,
        "Number of steps between those at which every attention head is watched (heads.csv in the run folder). "
        "Default: never.",
    ] = None
    qk_clip: Annotated[
        float | None, "Scale down queries and keys of heads whose largest logit is above this (needs --monitor)."
    ] = None
    seed: Annotated[int, "Random seed for the initial weights, dropout and the order of the data."] = 0

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("steps", "epochs"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}; leave it out for 10,000 steps")
        if self.average is not None and self.average < 2:
            raise ValueError(f"average must be at least 2 checkpoints, got {self.average}; leave it out for none")

    def recipe(self, *metrics: str) -> Recipe:
        """Return the recipe for an evaluation with these metrics; `metric`, or else the first, selects checkpoints."""
        metric = self.metric or metrics[0]
        if metric not in metrics:
            raise ValueError(
                f"metric must be one of {', '.join(metrics)}, got {metric!r}; {suggest_name(metric, metrics)}"
            )
        check_installed(*self.loggers)
        return Recipe(
            steps=self._steps,
            epochs=self.epochs,
            seed=self.seed,
            rate=self._schedule(),
            weight_decay=self.weight_decay,
            clip=self.clip,
            accumulate=self.accumulate,
            forcing=self._forcing(),
            precision=self.precision,
            compile=self.compile,
            graphs=self.graphs,
            shard=self.shard,
            evaluate_every=self.evaluate_every,
            metric=metric,
            better="lower" if metric in LOWER_IS_BETTER else "higher",
            patience=self.patience,
            save_every=self.save_every,
            keep=max(self.keep, self.average or 0),
            log_every=self.log_every,
            loggers=self.loggers,
            monitor=self.monitor,
            qk_clip=self.qk_clip,
        )

    @property
    def loggers(self) -> tuple[LoggerName, ...]:
        """The names of the loggers, each once."""
        return (self.log,) if isinstance(self.log, str) else tuple(dict.fromkeys(self.log))

    @property
    def warmup_steps(self) -> int:
        """The number of warm-up steps."""
        if self.warmup is not None:
            return self.warmup
        return DEFAULT_WARMUP if self._steps is None else max(1, min(DEFAULT_WARMUP, self._steps // 10))

    @property
    def _steps(self) -> int | None:
        return 10_000 if self.steps is self.epochs is None else self.steps

    def _schedule(self) -> Schedule:
        match self.schedule:
            case "inverse-sqrt":
                return InverseSquareRoot(self.rate, warmup=self.warmup_steps)
            case "cosine":
                if self._steps is None:
                    raise ValueError("schedule cosine needs the number of steps, got epochs; pass steps")
                return Cosine(self.rate, steps=self._steps, warmup=self.warmup_steps)
            case "constant":
                return Constant(self.rate, warmup=self.warmup_steps)
            case "plateau":
                return Plateau(self.rate, warmup=self.warmup_steps)

    def _forcing(self) -> Forcing | None:
        """Return the schedule of scheduled sampling; None, since most models have no decoder to feed."""
        return None


@dataclass(frozen=True, kw_only=True)
class DecoderTraining(Training):
    """The settings of a training run of a model that may have a recurrent decoder."""

    forcing: Annotated[
        Literal["linear", "exponential", "inverse-sigmoid"] | None,
        "Schedule of scheduled sampling, which feeds a recurrent decoder its own outputs (--model rnn "
        "only). Default: none.",
    ] = None
    forcing_k: Annotated[
        float | None,
        "Parameter of --forcing: number of steps (linear; default: 10,000) or k (default: 0.9999 for exponential, "
        "1,000 for inverse-sigmoid).",
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.forcing is None and self.forcing_k is not None:
            raise ValueError("forcing_k needs forcing, got none; choose linear, exponential or inverse-sigmoid")

    def _forcing(self) -> Forcing | None:
        match self.forcing:
            case None:
                return None
            case "linear":
                return Linear(steps=round(self._k(10_000)))
            case "exponential":
                return Exponential(self._k(0.9999))
            case "inverse-sigmoid":
                return InverseSigmoid(self._k(1000))

    def _k(self, default: float) -> float:
        return default if self.forcing_k is None else self.forcing_k
