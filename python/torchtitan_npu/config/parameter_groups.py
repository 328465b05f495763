"""Which parameters the rules of ``training.parameter_groups`` mean."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from .errors import ConfigError, Problem
from .schema import Config, ParameterGroup

KEY = "training.parameter_groups"


def match_parameter_groups(cfg: Config, names: Iterable[str]) -> dict[str, ParameterGroup]:
    """The rule of each parameter that has one: the first of ``cfg.training.parameter_groups`` that matches its name.

    Raises:
        ConfigError: a rule matches no parameter, or only those of earlier rules.
    """
    rules = cfg.training.parameter_groups
    names = list(names)
    chosen: dict[str, ParameterGroup] = {}
    problems = []
    for index, rule in enumerate(rules):
        matched = [name for name in names if fnmatchcase(name, rule.match)]
        mine = [name for name in matched if name not in chosen]
        chosen |= dict.fromkeys(mine, rule)
        if not matched:
            some = ", ".join(names[:3])
            problems.append(
                f"item {index + 1}: match: '{rule.match}' matches no parameter of the model; they are called {some}, … "
                "and * stands for any text, dots included"
            )
        elif not mine:
            problems.append(
                f"item {index + 1}: match: '{rule.match}' matches only parameters of the items before it, of which the "
                "first counts; move it up, or remove it"
            )
    if problems:
        raise ConfigError(cfg.source, [Problem(KEY, problem) for problem in problems])
    return chosen
