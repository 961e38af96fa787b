"""Tables of experiments: one row a case, means over the splits with their spread, and a figure of them."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

LABEL = 38
CELL = 18


def machine() -> str:
    """The processor and the date, for the head of a table."""
    name = platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {time.strftime('%Y-%m-%d')}"


@dataclass
class Table:
    """Values of cases by column; a case that is added again, for another split, joins its row.

    Attributes:
        label: of the cases.
        decimals: by column; columns are in this order.
        told: what a step is told of the loss, by case, where the table compares that.
    """

    label: str
    decimals: dict[str, int]
    rows: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)

    def add(self, case: object, told: str = "", **values: float) -> None:
        """A case's values on one split; shown as they come."""
        self.rows.setdefault(str(case), []).append(values)
        self.told[str(case)] = told
        shown = "  ".join(f"{column} {value:.{self.decimals[column]}f}" for column, value in values.items())
        print(f"  {case}: {shown}", flush=True)

    def mean(self, case: str, column: str) -> float | None:
        """Over the splits; None where the case has no such value."""
        own = [values[column] for values in self.rows[case] if column in values]
        return float(np.mean(own)) if own else None

    def cell(self, case: str, column: str) -> str:
        """Mean and, over several splits, sample standard deviation."""
        own = [values[column] for values in self.rows[case] if column in values]
        if not own:
            return ""
        places = self.decimals[column]
        spread = f" ± {np.std(own, ddof=1):.{places}f}" if len(own) > 1 and places else ""
        return f"{np.mean(own):,.{places}f}{spread}"

    def __str__(self) -> str:
        lines = [f"{self.label:<{LABEL}}" + "".join(f"{column.replace('_', ' '):>{CELL}}" for column in self.decimals)]
        for case in self.rows:
            cells = "".join(f"{self.cell(case, column):>{CELL}}" for column in self.decimals)
            lines.append(f"{case:<{LABEL}}{cells}   {self.told[case]}".rstrip())
        return "\n".join(lines)

    def draw(self, path: str, columns: tuple[str, ...], title: str) -> None:
        """Save a figure: lines over cases that are numbers, else bars of the first column."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        cases = list(self.rows)
        numeric = all(case.replace(",", "").isdigit() for case in cases)
        figure, axes = pyplot.subplots(figsize=(7, 4 if numeric else 0.8 + 0.3 * len(cases)), layout="constrained")
        if numeric:
            for column, marker in zip(columns, "osD^v", strict=False):
                known = [case for case in cases if self.mean(case, column) is not None]
                at = [float(case.replace(",", "")) for case in known]
                values = [[own[column] for own in self.rows[case]] for case in known]
                spread = [np.std(own, ddof=1) if len(own) > 1 else 0 for own in values]
                means = [np.mean(own) for own in values]
                axes.errorbar(at, means, spread, marker=marker, capsize=3, label=column.replace("_", " "))
            axes.set_xscale("log")
            axes.set(xlabel=self.label, ylabel="held out, bits/byte")
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
        else:
            means = [self.mean(case, columns[0]) for case in cases]
            axes.barh(cases[::-1], means[::-1], color="tab:blue", height=0.6)
            low, high = min(means), max(means)
            axes.set_xlim(low - 0.3 * (high - low), high + 0.12 * (high - low))
            for place, value in enumerate(means[::-1]):
                axes.text(value, place, f" {value:.3f}", va="center", fontsize=8)
            axes.set_xlabel("held out, bits/byte (axis does not start at 0)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title, fontsize=10)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
