"""The typed JSON that every command writes: dataclasses, one writer, one strict reader.

A results file is an object with `kind` (which dataclass), `version` (of this schema) and `result`. The reader checks
all three and the type of every field. This package imports no torch, so a report needs Python and matplotlib alone.

Units are in the names: `_nats`, `_bits`, `_tokens`, `_bytes`, `_seconds`.
"""

from .base import Cities, Dtype, Environment, Form, IntervalMethod, Mode, PairedDifference, Segment, Statistic
from .bench import Bench, BenchRow, Timing
from .curves import Curve
from .files import SCHEMA_VERSION, VERSIONS, kept_result, read_document, read_result, write_result
from .plans import OWN_BEST, Change, Contrast, Correction, Question, RegisteredPlan, StudyPlan, Term
from .settings import Group, Point, groups_of, own_best
from .studies import (
    ArmSize,
    BaselineNll,
    ChosenRate,
    CostRow,
    Drift,
    RunFigure,
    RunRecord,
    StudyArm,
    StudyAxis,
    StudyFigure,
    StudyIndex,
    StudyMember,
    Upcycling,
    figure_of,
    figures_there,
    headline_figures,
    measured,
    reached_at,
    utc,
)
from .tasks import (
    DataIdentity,
    Grid,
    ItemScore,
    Measurement,
    ModelIdentity,
    TaskResult,
    headlines,
    summary_rows,
    title_of,
)
