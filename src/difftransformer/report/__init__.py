"""From results to something to read: `write_report` makes the page, `comparison_table` the same table for a terminal.

`tables` builds every row once; the page, the terminal and the CSV files print those rows. No module here imports torch.
"""

from difftransformer.report.page import write_report
from difftransformer.report.terminal import comparison_table, cost_table, print_comparison
from difftransformer.report.upcycling import print_upcycling, upcycling_table, write_upcycling
