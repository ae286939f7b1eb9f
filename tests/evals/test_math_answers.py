r"""Answers by hand: what a reader of mathematics calls right and wrong, from intervals to junk."""

import time

import pytest

from difftransformer_lab.evals.judges.math_answers import extract_answer, is_right

# Reference, answer, whether it is right.
CASES = {
    "integers": [
        ("12", "12", True), ("12", "+12", True), ("12", "12.", True), ("12", "1.2", False), ("0", "-0", True),
        ("0", "", False),
    ],
    "signs": [
        ("-3", "\u22123", True), ("-3", "- 3", True), ("-3", "(-3)", True), ("-3", "3", False), ("3", "-3", False),
        ("3", r"\pm 3", False), ("3", "\u00b13", False), ("3", "The answer is \u00b13.", False),
        ("-0.5", r"-\frac{1}{2}", True), ("-0.5", r"\frac{-1}{2}", True), ("-0.5", r"\frac{1}{-2}", True),
        ("-0.5", "1/2", False),
    ],
    "fractions": [
        ("1/2", "0.5", True), ("1/2", r"\dfrac{1}{2}", True), ("1/2", "2 / 4", True), ("1/2", "2/1", False),
        ("1/2", "2", False), ("1/3", "0.333", False), ("0", "0/0", False), ("5/3", r"1\frac{2}{3}", True),
        (r"\frac{x}{2}", r"\frac{2}{x}", False), (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt3}{2}", True),
    ],
    "mixed numbers": [
        ("7/2", "3 1/2", True), ("7/2", r"3\frac{1}{2}", True), ("7/2", r"3 \frac 1 2", True), ("7/2", "3\u00bd", True),
        ("7/2", "31/2", False), ("31/2", r"3\frac{1}{2}", False), ("-7/2", "-3 1/2", True), ("-5/2", "-3 1/2", False),
        (r"\frac{31}{2}x", r"3\frac{1}{2}x", False),
    ],
    "decimals": [
        ("0.75", ".75", True),
        ("0.75", "0,75", False),
        ("2.50", "2.5", True),
    ],
    "thousands": [
        ("11111", r"11{,}111", True), (r"11{,}111", "11111", True), ("11111", "11,111", True),
        ("11111", r"11,\!111", True), ("11111", r"11\,111", True), ("11111", "11 111", True), ("11111", "11'111", True),
        ("11111", "11\u202f111", True), ("1234567", "1.234.567", True), ("1234567", "1,234,567", True),
        ("1234.5", "1.234,5", True), ("1234.5", "1,234.5", True), ("1234567.5", "1.234.567,5", True),
        ("1234", "1.234", False), ("1.234", "1,234", False), ("1234", "12,34", False), ("12345", "1,2345", False),
        ("1234", "(1,234)", False), ("111", r"11{,}111", False), ("10000", "There are 10 000 of them.", True),
        ("10000", r"There are 10{,}000 of them.", True),
    ],
    "scientific notation": [
        ("1000", "1e3", True), ("1000", "1E+3", True), ("1e3", "1000", True), ("0.0015", "1.5e-3", True),
        ("1500", r"1.5 \times 10^3", True), ("1500", r"1.5 \cdot 10^{3}", True), ("1500", "1.5 \u00d7 10^3", True),
        ("0.0015", r"1.5 \times 10^{-3}", True), ("1000", "10^3", True), ("1500", r"1.5 \times 10^4", False),
        ("1.5", r"1.5 \times 10^3", False), ("3", r"1.5 \times 10^3", False), ("1", "1e3", False),
        ("1", "1e99999999999", False), ("8", "2^3", True), ("2", "2^3", False), ("3", "It is 2^3.", False),
        ("23", "2^3", False),
    ],
    "large units": [
        ("1500000", "1.5 million", True), ("1.5 million", "1,500,000", True),
        ("1500000", "The answer is 1.5 million people.", True), ("1500000", "They sold $1.5 million of them.", True),
        ("1500000", "$1.5 million", True), ("3000000000", "3 billion", True), ("2000", "2 thousand", True),
        ("24", "2 dozen", True), ("1.5", "1.5 million", False), ("1500000", "1.5 billion", False),
        ("1500000", "15 million", False),
    ],
    "percent": [
        ("50%", "50%", True), ("50%", r"50\%", True), ("50%", "50 percent", True), ("50", "50%", True),
        ("0.5", "50%", True), ("50%", "1/2", True), ("50%", "0.5%", False), ("50%", "5000", False),
        ("50%", "5%", False), ("0.5%", "0.5%", True), ("0.5%", "0.005", True),
    ],
    "units": [
        ("5", "5 cm", True), (r"5\text{ cm}", "5", True), (r"5 \text{ cm}^2", "5 square centimeters", True),
        ("5 cm", r"5\,\mathrm{cm}", True), ("5 cm", "5 centimeters", True), ("12.5", "12.5 km/h", True),
        ("9", "9 (apples)", True), ("9", "9 apples", True), ("9", "3 squared", False), ("3", "3 squared", False),
        ("3", "3 tenths", False), ("3", "3x", False), ("3", "3 + x", False), ("3", "3 (x+1)", False),
        ("30", "3:30", False), ("30", "It begins at 3:30.", False),
    ],
    "money": [
        ("18", "$18", True), ("$18.00", "18 dollars", True), ("18", r"\$18", True), ("18", r"$\$18$", True),
        ("18", "18$", True), ("-5", "-$5", True), ("-5", "$-5", True), ("1234.5", "$1,234.50", True),
        ("5", "\u00a35", True), ("18", "$81", False), ("18", "She makes $18 every day.", True),
    ],
    "degrees": [
        ("30", r"30^\circ", True),
        (r"30^\circ", "30\u00b0", True),
        (r"30^\circ", r"30\degree", True),
        ("30", r"\frac{\pi}{6}", False),
    ],
    "intervals": [
        ("[1,2)", "[1,2)", True), ("[1,2)", "[1,2]", False), ("(1,2]", "[1,2]", False), ("[1,2)", "(1,2]", False),
        ("[0.5,1)", r"\left[\frac12,1\right]", False), (r"(-\infty,2]", r"(-\infty,2)", False),
        (r"(2,\infty)", r"(-2,\infty)", False), (r"[1,2)\cup(3,4]", r"(3,4] \cup [1,2)", True),
        (r"[1,2)\cup(3,4]", r"[1,2)", False),
    ],
    "sets": [
        (r"\{1,2,3\}", r"\{1, 2, 3\}", True), (r"\{1,2,3\}", "{1,2,3}", True), (r"\{1,2,3\}", r"\{1,2\}", False),
        (r"\{1,2\}", "[1,2]", False), (r"\{(1,2),(3,4)\}", r"\{(3,4),(1,2)\}", True),
    ],
    "tuples": [
        ("(1,2)", "(1, 2)", True), ("(1,2)", "(1.0, 4/2)", True), ("(1,2)", "1", False), ("2", r"\boxed{(1,2)}", False),
        ("((1,2),3)", "(1,(2,3))", False), ("(1,2),(3,4)", "(1,2),(4,3)", False),
    ],
    "several numbers": [
        ("1,2", r"\boxed{1, 2}", True), ("1,2", r"\boxed{1 \text{ and } 2}", True), ("1,2", "12", False),
        ("1,2", "1", False), ("2", r"\boxed{1,2}", False), ("0.5,1", r"\boxed{\frac12, 1}", True),
        ("6", "The answer is 5 or 6.", False), ("6", "The answer is either 5 or 6.", False),
        ("6", "It is 5 or 6.", False), ("5", "The answer is 5 or 6.", False), ("6", "It lies between 5 and 6.", False),
        ("8", "5 and 3 make 8.", True), ("8", "The answer is 5 + 3 = 8.", True),
        ("5", "The answer is 5 + 3 = 8.", False), ("18", "20 - 2 = 18", True), ("2", "20 - 2 = 18", False),
    ],
    "equations": [
        ("5", "x = 5", True), ("x=5", "x = 5.0", True), ("x=1,y=2", "x=1, y=2", True), ("5", r"\theta = 5", True),
        ("5", r"x \neq 5", False),
    ],
    "expressions": [
        ("x+1", "x + 1", True), (r"2\sqrt{3}", r"2\sqrt3", True), (r"2\pi", "2\u03c0", True), ("x^2", "x^3", False),
        ("12", "It is x^12.", False), (r"x \leq 3", r"x \le 3", True),
    ],
    "equal expressions": [
        ("x^2+2x+1", "(x+1)^2", True), ("x^2+2x+1", "(x+2)^2", False), ("2(x+y)", "2x+2y", True), ("xy", "yx", True),
        (r"\frac{1}{x}", "x^{-1}", True), (r"2\sqrt{3}", r"\sqrt{12}", True), (r"2\sqrt{3}", r"\sqrt{11}", False),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True), (r"1+\sqrt{2}", r"\sqrt2+1", True),
        (r"\log 8", r"3\log 2", True), (r"x \leq 3", r"3 \geq x", True),
    ],
    "numbers that would fill the memory": [
        ("5", r"10^{99999999999}", False),
        ("5", "9^{9^{9}}", False),
        ("5", "9**9**9**9", False),
        ("5", "99999999!", False),
    ],
    "choices and words": [
        ("A", "(A)", True), ("(A)", "a", True), (r"\text{(B)}", r"\boxed{B}", True), ("A", "B", False),
        (r"\text{Friday}", "friday", True), (r"\text{Friday}", "The answer is Friday.", True),
        (r"\text{Friday}", "The answer is Friday because it rains.", True),
        (r"\text{Friday}", "The answer is Monday.", False), (r"\text{Friday}", "The answer is not Friday.", False),
        ("Yes", "Answer: yes", True), ("Yes", "Answer: no", False),
    ],
    "boxes": [
        ("5", r"\boxed{5}", True), ("5", r"$\boxed{5}$.", True), ("5", r"\boxed 5", True), ("5", r"\fbox{5}", True),
        ("5", r"\boxed{\boxed{5}}", True), ("5", r"\boxed{\text{5}}", True), ("5", r"\boxed{\$5}", True),
        ("5", r"\boxed{x = 5}", True), ("1/2", r"\boxed{\dfrac{1}{2}}", True),
        (r"\frac{a}{b^{2}}", r"\boxed{\frac{a}{b^{2}}}", True), (r"\{1,2\}", r"\boxed{\{1,2\}}", True),
        ("5", r"First \boxed{4}, then \boxed{5}. Also 7.", True), ("4", r"First \boxed{4}, then \boxed{5}.", False),
        ("7", r"\boxed{5}, which is not 7", False), ("5", r"\boxed{}", False),
        ("12", r"\boxed{12 \text{ because } 3 \cdot 4 = 12}", True), (r"so \boxed{5}", "5", True),
        ("20 - 2 = 18\n#### 18", "18", True), ("20 - 2 = 18\n#### 18", "20", False),
    ],
    "reasons": [
        ("12", "The answer is 12 because 3 boxes of 4 are 12.", True),
        ("12", "The answer is 12 because there are 3 boxes of 4.", True),
        ("4", "The answer is 12 because there are 3 boxes of 4.", False),
        ("12", "The answer is 12, since 3 * 4 = 12.", True), ("12", "Answer: 12 (because 3 * 4 is that)", True),
        ("12", "The answer is 12, as 3 groups have 4.", True), ("12", "The answer is 12, which is 3 times 4.", True),
        ("7", "The answer is 10-3, which is 7.", True), ("18", "The answer is that she has 18 eggs left.", True),
        ("7", "The answer is the sum 3+4=7.", True), ("4", "The answer is the sum 3+4=7.", False),
        ("0", "There are 10 apples and 0 pears and 5 plums", False), ("18", "The answer is 18 eggs.", True),
        ("18", "**Answer:** **18**", True), ("18", "The final answer is: 18", True),
        ("18", "The answer to this problem is 18.", True), ("18", "The answer would be 18.", True),
        ("18", "The answer is 17.", False),
    ],
    "negations": [
        ("6", "not 5. It is 6", True), ("5", "not 5. It is 6", False), ("6", "The answer is not 5. It is 6.", True),
        ("5", "The answer is not 5. It is 6.", False), ("6", "The answer is not 5 but 6.", True),
        ("6", "The answer is 6, not 5.", True), ("5", "The answer is 6, not 5.", False), ("6", "It is 6, not 5.", True),
        ("5", "It is 6, not 5.", False), ("5", "It is not 5.", False), ("5", "The answer is not 5.", False),
        ("5", "The answer isn't 5.", False), ("6", "The answer isn't 5. It's 6.", True),
        ("6", "It is 6 rather than 5.", True), ("6", "It is 6 instead of 5.", True), ("5", "It cannot be 5.", False),
        ("5", "I think it is 5, not 6 or 7.", True), ("7", "I think it is 5, not 6 or 7.", False),
        ("6", "It is neither 5 nor 6.", False), ("5", r"x \ne 5", False), ("5", "It is less than 5.", False),
        ("0.5", r"The answer is not \frac{1}{2}.", False), ("6", "The answer is 6. The answer is not 5.", True),
    ],
    "corrections": [
        ("6", "The answer is 5. No, it is 6.", True), ("5", "The answer is 5. No, it is 6.", False),
        ("6", "The answer is 5. Wait, 6.", True), ("6", "The answer is 5, no, 6.", True),
        ("6", "The answer is 5. Actually, it's 6.", True), ("6", "The answer is 5. Sorry, I mean 6.", True),
        ("6", "The answer is 5... correction: 6", True), ("6", "The answer is 5. That is wrong. It is 6.", True),
        ("5", "The answer is 5. That is wrong. It is 6.", False), ("6", "The answer is 5. The answer is 6.", True),
        ("5", "The answer is 5. The answer is 6.", False), ("5", "The answer is 5. No other number fits 7.", True),
        ("12", "The answer is 5. I made a mistake. 6*2=12, so 12.", True),
    ],
    "empty and junk": [
        ("18", "", False), ("18", " \n\t", False), ("18", "I do not know.", False), ("18", "The answer is", False),
        ("18", "The answer is .", False), ("18", "####", False), ("18", r"\boxed{", False), ("18", r"\frac{}{}", False),
        ("18", "nan", False), ("18", "inf", False), ("18", "None", False), ("18", "$$", False), ("18", "%", False),
        ("18", "\x00\x1b[31m", False), ("18", "\ud800", False), ("", "", False), ("", "18", False),
        ("18", "9" * 5000, False), ("9" * 200, "9" * 201, False), ("9" * 200, "9" * 200, True),
    ],
}  # fmt: skip
ROWS = [(topic, *row) for topic, rows in CASES.items() for row in rows]


@pytest.mark.parametrize("topic", CASES)
def test_cases(topic):
    wrong = [(gold, text, right) for gold, text, right in CASES[topic] if is_right(text, gold) != right]
    assert not wrong


def test_a_right_answer_is_right_for_itself():
    """Whatever a reference says, the same words in a box are right."""
    for gold in {gold for _, gold, _, _ in ROWS if gold and "boxed" not in gold and "#" not in gold}:
        assert is_right(f"So $\\boxed{{{gold}}}$.", gold), gold


JUNK = (
    "\\boxed{", "{", "(1,", "1,", "9", "The answer is not 5. ", "a ", "1.111", "5 or ", "= ", "1 ", "wait, ",
    "1 because ", "{1,(2,",
)  # fmt: skip


@pytest.mark.parametrize("unit", JUNK)
def test_junk_of_any_length_is_read_soon(unit):
    begun, text = time.process_time(), unit * (30_000 // len(unit))
    for shape in (text, f"The answer is {text}", f"\\boxed{{{text}}}"):
        extract_answer(shape)
    assert time.process_time() - begun < 1
    assert not is_right(text, "18")
