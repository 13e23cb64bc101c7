"""English: mathematics, program text and signs, as language models write them. These rules come before all others."""

from __future__ import annotations

import re

from vivace.text.rules import Rule, rule

_LATEX = {
    "times": " times ", "cdot": " times ", "div": " divided by ", "pm": " plus or minus ", "leq": " ≤ ", "le": " ≤ ",
    "geq": " ≥ ", "ge": " ≥ ", "neq": " ≠ ", "ne": " ≠ ", "approx": " ≈ ", "to": " to ", "rightarrow": " to ",
    "infty": " infinity", "degree": " degrees", "circ": " degrees", "sum": "the sum of ", "int": "the integral of ",
    "text": "", "mathrm": "", "mathbf": "", "left": "", "right": "", "quad": " ",
    "ldots": " and so on", "dots": " and so on",
    **{
        name: f" {name} "
        for name in ("alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "pi", "rho", "sigma", "tau",
                     "phi", "psi", "omega", "Delta", "Sigma", "Omega", "sin", "cos", "tan", "log", "ln", "exp")
    },
}  # fmt: skip
_POWERS = {"2": " squared", "3": " cubed"}


def _power(match: re.Match[str]) -> str:
    exponent = (match.group(1) or match.group(2)).replace("−", "-")
    return _POWERS.get(exponent, f" to the power of {exponent.replace('-', 'minus ')}")


def _scientific(match: re.Match[str]) -> str:
    number, sign, exponent = match.groups()
    return f"{number} times ten to the power of {'minus ' if sign == '-' else ''}{exponent}"


SYMBOL_RULES: tuple[Rule, ...] = (
    # LaTeX, whose brackets are gone already (`clean`).
    rule(r"\\[dt]?frac\{([^{}]{1,60})\}\{([^{}]{1,60})\}", r"\1 over \2"),
    rule(r"\\sqrt\{([^{}]{1,60})\}", r"the square root of \1"),
    rule(r"\^\\circ\s?|\^\{\\circ\}\s?", "°"),
    rule(
        rf"\\({'|'.join(sorted(_LATEX, key=len, reverse=True))})(?![A-Za-z])",
        lambda match: _LATEX[match.group(1)],
    ),
    rule(r"\\%", "%"),
    rule(r"(?<=[A-Za-z0-9)])\s?\^\s?(?:\{([^{}]{1,20})\}|([-−]?[A-Za-z0-9]+))", _power),
    rule(r"(?<=[A-Za-z])_\{?([A-Za-z0-9]{1,3})\}?(?![A-Za-z0-9_])", r" \1"),
    rule(r"√\s?(?=[A-Za-z0-9(])", "the square root of "),
    rule(r"\b([0-9]+(?:\.[0-9]+)?)[eE]([-+]?)([0-9]{1,3})(?![\w.])", _scientific),
    # Operators of programs.
    rule(r"\s?&&\s?", " and "),
    rule(r"\s\|\|\s", " or "),
    rule(r"\s?!==?\s?(?=[\w\"'(-])", " not equal to "),
    rule(r"(?<=[\w)\]])\s?===?\s?(?=[\w\"'(-])", " equals "),
    rule(r"(?<=[\w)\]])\s?>=\s?(?=[\w(-])", " greater than or equal to "),
    rule(r"(?<=[\w)\]])\s?<=\s?(?=[\w(-])", " less than or equal to "),
    rule(r"([0-9%])\s?(?:->|=>|→|⇒|➜)\s?(?=[$£€]?[0-9])", r"\1 to "),
    rule(r"^\s*(?:->|=>|→|⇒|➜)\s?", ""),
    rule(r"\s?(?:->|=>|→|⇒|➜)\s?(?=\S)", ", "),
    # Names with signs.
    rule(r"\b([CF])#(?!\w)", r"\1 sharp"),
    rule(r"(?<!\S)\.NET\b", "dot NET"),
    rule(r"(?<![\w@])@(?=[A-Za-z])", "at "),
    rule(r"(?<![\w#&])#(?=[A-Za-z]{0,8}[0-9])", "number "),
    rule(r"(?<![\w#&])#(?=[A-Za-z])", "hashtag "),
    rule(r"(?<=[0-9])\s?[×*]\s?(?=[$£€]?[0-9])", " times "),
    rule(r"(?<=[0-9)])\s?[-−]\s?(?=[0-9.]+\s?=)", " minus "),
    rule(r"(?<![\w)+])\+(?=[0-9]+(?:\.[0-9]+)?\s?%)", "plus "),
    rule(r"(?<=[A-Za-z0-9])_+(?=[A-Za-z0-9])", " "),
    rule(r"[,;]?\s\|\s?(?=[,.;:!?]|$)", ""),
    rule(r"[,;]?\s\|\s", ", "),
)

SYMBOL_TRIGGER = r"\\[A-Za-z%]|√|&&|\|\||→|⇒|➜|->|=>|\w_\w| \| |#"
"""Part of the pattern that says whether a clause has anything for these rules."""
