"""Made documents that ask for a number told before: those of `ml4 eval`, so that training and its
judge use the same words.
"""

from ml4core.evaluation.needles import BEGIN, DIGITS, END, FILE, USER_END, Needles, write_needles

__all__ = ["BEGIN", "DIGITS", "END", "FILE", "USER_END", "Needles", "write_needles"]
