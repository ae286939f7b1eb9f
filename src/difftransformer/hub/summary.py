"""Summarise an evaluation for a terminal or a model card."""

from ..results import Evaluation


def evaluation_rows(result: Evaluation) -> list[tuple[str, str]]:
    """Return name and value of every figure of an evaluation."""
    rows = []
    if result.nll is not None:
        rows.append(("validation loss, nats/token", f"{result.nll.nll_nats_per_token:.4f}"))
        rows.append(("validation loss, bits/byte", f"{result.nll.bits_per_byte:.4f}"))
    if result.needle is not None:
        cells = result.needle.cells
        for length, needles, asked, cities in sorted({(c.length_tokens, c.needles, c.asked, c.cities) for c in cells}):
            chosen = [
                c for c in cells if (c.length_tokens, c.needles, c.asked, c.cities) == (length, needles, asked, cities)
            ]
            correct, trials = sum(c.correct for c in chosen), sum(c.trials for c in chosen)
            rows.append((f"retrieval at {length}, N={needles} R={asked}, {cities} cities", f"{correct} of {trials}"))
    if result.allocation is not None:
        answer = [s.share for s in result.allocation.shares if s.form == "signed" and s.segment == "answer"]
        rows.append(("attention on the answer (signed)", f"{sum(answer) / len(answer):.3f}"))
    return rows
