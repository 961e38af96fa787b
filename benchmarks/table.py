"""Tables of experiments: one row a case, means over the splits with their spread, and a figure of them."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

CELL = 20


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
        spread = f" ± {np.std(own, ddof=1):.{places}f}" if places and np.ptp(own) > 0 else ""
        return f"{np.mean(own):,.{places}f}{spread}"

    def __str__(self) -> str:
        width = max(38, 2 + max(map(len, self.rows), default=0))
        lines = [f"{self.label:<{width}}" + "".join(f"{column.replace('_', ' '):>{CELL}}" for column in self.decimals)]
        for case in self.rows:
            cells = "".join(f"{self.cell(case, column):>{CELL}}" for column in self.decimals)
            lines.append(f"{case:<{width}}{cells}   {self.told[case]}".rstrip())
        return "\n".join(lines)

    def draw(self, path: str, columns: tuple[str, ...], title: str) -> None:
        """Save a figure: means with every split's value behind them, over cases that are numbers, else a case a row."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        cases = list(self.rows)
        numeric = all(case.isdigit() for case in cases)
        figure, axes = pyplot.subplots(figsize=(7, 4 if numeric else 1 + 0.3 * len(cases)), layout="constrained")
        for column, color, marker in zip(columns, ("tab:blue", "tab:orange", "tab:green"), "osD", strict=False):
            known = [case for case in cases if self.mean(case, column) is not None]
            places = [int(case) if numeric else cases.index(case) for case in known]
            means = [self.mean(case, column) for case in known]
            points = [
                (place, values[column])
                for place, case in zip(places, known, strict=True)
                for values in self.rows[case]
                if column in values
            ]
            at, values = zip(*points, strict=True)
            label = column.replace("_", " ")
            if numeric:
                axes.plot(places, means, marker=marker, color=color, label=label)
                axes.scatter(at, values, marker=marker, color=color, alpha=0.25, linewidths=0)
            else:
                axes.scatter(means, places, marker=marker, color=color, label=label)
                axes.scatter(values, at, marker=marker, color=color, alpha=0.25, linewidths=0)
        if numeric:
            axes.set_xscale("log")
            axes.set_xticks([int(case) for case in cases], cases)
            axes.minorticks_off()
            axes.set(xlabel=self.label, ylabel="held out, bits/byte")
        else:
            axes.set_yticks(range(len(cases)), cases)
            axes.invert_yaxis()
            axes.set_xlabel("held out, bits/byte")
        if len(columns) > 1:
            axes.legend(frameon=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title, fontsize=10)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
