"""From results to a page: `write_report` writes it, `print_study` prints the same tables in a terminal.

`tables` builds every row once; the page, the terminal and the CSV files print those rows. No module here imports torch.
"""

from difftransformer_lab.report.evidence import brief_answer, read_studies, write_evidence
from difftransformer_lab.report.page import write_report, write_suite
from difftransformer_lab.report.terminal import cost_table, print_study
