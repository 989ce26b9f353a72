"""Training: the flags of a `Recipe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..train import Constant, Cosine, Exponential, InverseSigmoid, InverseSquareRoot, Linear, Plateau, Recipe
from ..train.dataclass_json import check_types, unknown
from ..train.scheduled_sampling import Forcing
from ..train.schedules import Schedule

LOWER = ("loss", "bits", "perplexity")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained, in words that fit on a command line."""

    steps: Annotated[int | None, "updates of the weights (10,000 unless --epochs is given)"] = None
    epochs: Annotated[int | None, "passes over the data"] = None
    rate: Annotated[float, "the highest learning rate"] = 1e-3
    schedule: Annotated[
        Literal["inverse-sqrt", "cosine", "constant", "plateau"], "how the rate falls after the warm-up"
    ] = "inverse-sqrt"
    warmup: Annotated[int, "steps the rate climbs for, before it falls"] = 400
    weight_decay: Annotated[float, "AdamW's decay of matrices"] = 0.0
    clip: Annotated[float | None, "the largest norm of the gradient"] = 1.0
    accumulate: Annotated[int, "batches to an update"] = 1
    forcing: Annotated[
        Literal["linear", "exponential", "inverse-sigmoid"] | None, "scheduled sampling, for recurrent decoders"
    ] = None
    forcing_k: Annotated[
        float | None, "its steps where it is linear (10,000), or k: exponential (0.9999), sigmoid (1,000)"
    ] = None
    precision: Annotated[Literal["auto", "float32", "bfloat16"], "auto is bfloat16 on a GPU"] = "auto"
    compile: Annotated[bool, "compile the model"] = False
    graphs: Annotated[bool, "on a GPU, replay batches of a shape seen before as CUDA graphs"] = False
    shard: Annotated[bool, "share the weights out over processes (FSDP2)"] = False
    evaluate_every: Annotated[int, "steps between evaluations of the validation data"] = 500
    save_every: Annotated[int, "steps between checkpoints"] = 500
    keep: Annotated[int, "checkpoints to keep besides the best"] = 2
    metric: Annotated[str | None, "the number that says which checkpoint is best"] = None
    patience: Annotated[int | None, "end after so many evaluations without a better one"] = None
    average: Annotated[int | None, "at the end, average this many of the last checkpoints"] = None
    log_every: Annotated[int, "steps between lines of the log"] = 50
    seed: Annotated[int, "of weights, dropout and the order of the data"] = 0

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("steps", "epochs"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}; leave it out for 10,000 steps")
        if self.average is not None and self.average < 2:
            raise ValueError(f"average must be at least 2 checkpoints, got {self.average}")
        if self.forcing is None and self.forcing_k is not None:
            raise ValueError("forcing_k is of a forcing, got none; choose linear, exponential or inverse-sigmoid")

    def recipe(self, *metrics: str) -> Recipe:
        """The recipe these flags mean, for an evaluation that gives these metrics; the first is watched unless told."""
        metric = self.metric or metrics[0]
        if metric not in metrics:
            raise ValueError(f"metric must be one of {', '.join(metrics)}, got {metric!r}; {unknown(metric, metrics)}")
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
            better="lower" if metric in LOWER else "higher",
            patience=self.patience,
            save_every=self.save_every,
            keep=max(self.keep, self.average or 0),
            log_every=self.log_every,
        )

    @property
    def _steps(self) -> int | None:
        return 10_000 if self.steps is self.epochs is None else self.steps

    def _schedule(self) -> Schedule:
        match self.schedule:
            case "inverse-sqrt":
                return InverseSquareRoot(self.rate, warmup=self.warmup)
            case "cosine":
                if self._steps is None:
                    raise ValueError("schedule cosine falls over a number of steps, got epochs; pass steps")
                return Cosine(self.rate, steps=self._steps, warmup=self.warmup)
            case "constant":
                return Constant(self.rate, warmup=self.warmup)
            case "plateau":
                return Plateau(self.rate, warmup=self.warmup)

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
