"""`RunRecord`: what a training run did, for its report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from shardnet.training.trace import RankSpans


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step of the whole cluster."""

    step: int  # 1-based
    seconds: float  # since the training began, at the end of the step
    loss: float  # mean over the samples of the step, in nats
    learning_rate: float
    tokens_per_s: float  # of the whole cluster
    gradient_norm: float  # before clipping
    exposed_share: float  # part of the step's wall time in which this rank's compute waited for communication


@dataclass(frozen=True, slots=True)
class Validation:
    """Loss on held-out data after a step."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Totals of one rank."""

    rank: int
    address: str
    node: str
    held_bytes: int  # parameters, gradients and optimizer state that stay on the rank between steps
    sent_bytes: int
    received_bytes: int
    exposed_s: float
    duration_s: float  # of its part in the training, which `exposed_s` is a share of: a rank may have come later than others


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run, from start to end. If it resumes an earlier one, from there on."""

    title: str
    started: datetime
    duration_s: float  # of training, validation included
    parameters: int
    unsharded_bytes: int  # what held_bytes would be on a single rank
    steps: Sequence[StepRecord]
    validations: Sequence[Validation] = ()
    ranks: Sequence[RankRecord] = ()
    timeline: Sequence[RankSpans] = ()  # of a few steps; all spans of a run would be a large page
    prompt: str = ""
    sample: str = ""  # what the model wrote after the prompt
    config: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
