"""The parts that all checks of PyTorch training loops share: setups, batches, seeding, tolerances, findings."""

from tl_core._batches import Batches
from tl_core._build import build_setup
from tl_core._device import move_to_device
from tl_core._errors import noted
from tl_core._findings import CheckFailed, Finding, NotJudged, Report
from tl_core._losses import NoLoss, split_losses
from tl_core._names import group_names, match_names, module_names, parameter_names, step_ranges
from tl_core._rng import preserve_rng, seed_everything
from tl_core._rule_ids import check_rule_ids
from tl_core._setup import TrainingSetup
from tl_core._step import choose_step, standard_step
from tl_core._tolerances import Tolerance, Tolerances
from tl_core._unregistered import unregistered_tensors

__all__ = [
    "Batches",
    "CheckFailed",
    "Finding",
    "NoLoss",
    "NotJudged",
    "Report",
    "Tolerance",
    "Tolerances",
    "TrainingSetup",
    "build_setup",
    "check_rule_ids",
    "choose_step",
    "group_names",
    "match_names",
    "module_names",
    "move_to_device",
    "noted",
    "parameter_names",
    "preserve_rng",
    "seed_everything",
    "split_losses",
    "standard_step",
    "step_ranges",
    "unregistered_tensors",
]
