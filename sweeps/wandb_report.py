"""A W&B report of a sweep: `python sweeps/wandb_report.py ENTITY/PROJECT SWEEP`.

It needs `pip install 'scorecal[wandb-report]'` and `wandb login`; docs/tracking.md says how to make
the same panels by hand.
"""

import argparse
import sys
from typing import Any

import wandb
import wandb_workspaces.reports.v2 as reports


def panels(metric: str, parameters: list[str]) -> list[Any]:
    """Parallel coordinates, parameter importance, the metric of each run and its bias figure."""
    columns: list[Any] = [*map(reports.Config, parameters), reports.SummaryMetric(metric)]
    return [
        reports.ParallelCoordinatesPlot(
            columns=[reports.ParallelCoordinatesPlotColumn(metric=column) for column in columns],
            layout=reports.Layout(w=24, h=9),
        ),
        reports.ParameterImportancePlot(with_respect_to=metric, layout=reports.Layout(y=9, w=12)),
        reports.BarPlot(metrics=[metric], layout=reports.Layout(x=12, y=9, w=12)),
        reports.MediaBrowser(
            media_keys=["figures/latent_bias"], layout=reports.Layout(y=15, w=24, h=9)
        ),
    ]


def best_runs(entity: str, project: str, sweep: str, metric: str, goal: str) -> reports.Runset:
    """The sweep's runs, the best first."""
    order = reports.OrderBy(reports.SummaryMetric(metric), ascending=goal == "minimize")
    return reports.Runset(
        entity=entity, project=project, name="best runs", filters=f"Sweep = '{sweep}'",
        order=[order], pinned_columns=[f"summary:{metric}"],
    )  # fmt: skip


def main() -> None:
    """Save the report and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    parser.add_argument("sweep", metavar="SWEEP", help="The id that `wandb sweep` printed.")
    given = parser.parse_args()
    entity, slash, project = given.project.partition("/")
    if not slash:
        parser.error(f"the project is ENTITY/PROJECT, got {given.project!r}")
    try:
        config = wandb.Api().sweep(f"{given.project}/{given.sweep}").config
    except (wandb.Error, ValueError) as error:
        sys.exit(f"W&B: {error}")
    metric, goal = config["metric"]["name"], config["metric"]["goal"]
    grid = reports.PanelGrid(
        runsets=[best_runs(entity, project, given.sweep, metric, goal)],
        panels=panels(metric, list(config["parameters"])),
    )
    report = reports.Report(
        entity=entity, project=project, title=f"Sweep {given.sweep}", blocks=[grid]
    )
    report.save()
    print(report.url)


if __name__ == "__main__":
    main()
