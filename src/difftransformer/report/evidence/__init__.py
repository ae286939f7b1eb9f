"""From the records of studies to statistics, pages and the index of claims."""

from difftransformer.report.evidence.answers import headline
from difftransformer.report.evidence.claims import Studied, judge, read_claims, studied
from difftransformer.report.evidence.comparisons import Compared, compare, planned_comparisons
from difftransformer.report.evidence.pages import read_studies, study_page, write_evidence
from difftransformer.report.evidence.reading import Evidence, find_studies, read_evidence
from difftransformer.report.evidence.scaling import fit_power_law, scaling_of
