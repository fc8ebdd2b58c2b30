"""What the order of a rubric does, as tables of a comparison's records."""

from typing import Any

from scorecal.evaluation.blocks import Block, Grid, Heading, along, estimate, number
from scorecal.evaluation.compare import RELIABLE

Record = dict[str, Any]

_METRICS = {"spearman": "Spearman", "pearson": "Pearson", "mse": "MSE"}
_SHOWN = {"spearman": "Spearman", "mse": "MSE"}  # where there are many columns


def position_parts(task: str, records: list[Record]) -> list[Block]:
    """Position prior and score prior of all judges that were shown the balanced orders."""
    ordered = [record for record in records if "orders" in record]
    if not ordered:
        return []
    rows = []
    for record in ordered:
        orders = record["orders"]
        p = f"{orders['p']:.4f}"
        if orders["p"] * (orders["permutations"] + 1) < 1.5:
            p = f"≤ {p}"
        counts = [f"{orders['items']:,}", f"{orders['groups']:,}"]
        shares = along(orders["position_prior"])
        rows.append([record["title"], *counts, *shares, number(orders["cramers_v"]), p])
    positions = [f"position {at}" for at in range(1, len(records[0]["labels"]) + 1)]
    priors = [
        [record["title"], *(number(share) for share in record["orders"]["score_prior"])]
        for record in ordered
    ]
    return [
        Heading(3, f"{task}: which position of the rubric the judge prefers"),
        "Mean probability at each position over all items, each under all balanced orders, so that "
        "every score stands once at every position: without a preference each position has "
        f"{number(1 / len(positions))}. Cramér's V is 0 there, and 1 where one position has "
        "everything. p is of no preference at all: the masses of whole groups are turned through "
        f"the positions, {ordered[0]['orders']['permutations']:,} times.",
        Grid(["judge", "items", "groups", *positions, "Cramér's V", "p"], rows),
        "Mean probability of each score over the same items and orders:",
        Grid(["judge", *records[0]["labels"]], priors),
    ]


def order_parts(task: str, record: Record) -> list[Block]:
    """What single orders and means over several do to one judge's scores."""
    orders, title = record["orders"], record["title"]
    return [
        Heading(3, f"{task}: single orders of the rubric, {title}"),
        f"The judge under one order at a time, raw and with the default head; {orders['written']} "
        "is the written one. **Bold**: reliably better than the written order, at a false "
        "discovery rate of 5 % over the column's orders.",
        _single_table(orders),
        Heading(3, f"{task}: number of orders, {title}"),
        "The raw judge's mean over n orders: n of the balanced ones, and n of those that are "
        "neither balanced nor balanced backwards. A figure is the mean over subsets of the orders.",
        _number_table(orders),
        Heading(3, f"{task}: one order in place of all, {title}"),
        *_one_order_parts(orders),
    ]


def _single_table(orders: Record) -> Grid:
    rows = []
    for single in orders["single"]:
        cells = []
        for metric in _METRICS:
            for method in ("raw", "default head"):
                gain = single["against_written"][method].get(metric)
                sign = -1 if metric == "mse" else 1
                bold = bool(gain and gain["q"] < RELIABLE and sign * gain["estimate"] > 0)
                cells.append(estimate(single["figures"][method][metric], bold=bold))
        written = single["order"] == orders["written"]
        rows.append([single["order"], "written" if written else single["kind"], *cells])
    header = ["order", "which"]
    for name in _METRICS.values():
        header += [f"{name}, raw", f"{name}, default head"]
    return Grid(header, rows)


def _number_table(orders: Record) -> Grid:
    rows = []
    for record in orders["by_number"]:
        cells = []
        for kind in ("balanced", "random"):
            found = record.get(kind)
            cells.append(f"{found['subsets']} of {found['of']:,}" if found else "–")
            cells += [estimate(found["figures"][metric] if found else None) for metric in _SHOWN]
        gap = record.get("balanced_against_random", {})
        cells += [estimate(gap.get(metric), sign="+") for metric in _SHOWN]
        rows.append([str(record["orders"]), *cells])
    header = ["orders"]
    for kind in ("balanced", "random"):
        header += [f"{kind}: subsets", *(f"{kind}: {name}" for name in _SHOWN.values())]
    header += [f"difference in {name}" for name in _SHOWN.values()]
    kept = [at for at in range(len(header)) if any(row[at] != "–" for row in rows)]
    return Grid([header[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _one_order_parts(orders: Record) -> list[Block]:
    rows = [
        [
            row["name"],
            str(row["orders"]),
            *(estimate(row["figures"][metric]) for metric in _METRICS),
            *(estimate(row["against_one"].get(metric), sign="+") for metric in _METRICS),
        ]
        for row in orders["one_order"]
    ]
    header = ["method", "orders an item", *_METRICS.values()]
    header += [f"{name}, difference from one order" for name in _METRICS.values()]
    shares = [
        f"{estimate(share)} in {_METRICS[metric]}" for metric, share in orders["recovered"].items()
    ]
    said = (
        f"Of what the mean over all {len(orders['position_prior']['estimate'])} balanced orders "
        f"gains, the position prior keeps {', '.join(shares)}. Gains that are not reliable are "
        "left out."
        if shares
        else "The mean over all balanced orders gains nothing reliable that could be recovered."
    )
    return [
        "The written order alone; the same divided by the position prior, which is measured on dev "
        "under all balanced orders; and the mean over all of these.",
        Grid(header, rows),
        said,
    ]
