"""From the records of studies to statistics, pages and the index of claims."""

from difftransformer_lab.report.evidence.claims import judge, read_claims
from difftransformer_lab.report.evidence.comparisons import Compared, compare
from difftransformer_lab.report.evidence.contrasts import Finding, Registration
from difftransformer_lab.report.evidence.pages import brief_answer, study_page, write_evidence
from difftransformer_lab.report.evidence.reading import Evidence, find_studies, read_evidence
from difftransformer_lab.report.evidence.scaling import fit_power_law, scaling_of
from difftransformer_lab.report.evidence.studied import Studied, read_studies, studied
