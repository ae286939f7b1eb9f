"""From results to pages, and the same tables in a terminal. No module here imports torch.

`studied` computes everything about a study once, `write_study` and `write_evidence` write pages of studies, `suite_page` builds
that of a suite, and `print_study` prints a study.
"""

from .claims import judge, read_claims
from .page import suite_page, write_page
from .reading import Evidence, find_studies, read_evidence
from .studied import Studied, read_studies, studied
from .study_page import brief_answer, write_evidence, write_study
from .terminal import print_study
