"""From records to pages: records (JSON) -> one tidy frame -> contrasts -> figures and tables -> a page.

`read_studies` reads records and computes every finding. No module here imports torch, and none writes sentences: people do, in
docs/studies.
"""

from .contrasts import Finding
from .frame import Records, find_studies, read_records
from .study import StudyAnalysis, analyse, read_studies
