"""How far the calibration is off, operator by operator."""

from __future__ import annotations

from typing import Any

import pandas as pd

from rlsim.report.charts.style import bar_height, data, finished, legend


def residuals_chart(frame: pd.DataFrame) -> Any:
    """Median and 90th percentile of the errors (columns operator, median, p90; absolute relative errors)."""
    import altair as alt

    order = frame["operator"].tolist()
    names = ["median error", "90% of the errors are below"]
    long = frame.melt("operator", ["median", "p90"], var_name="kind", value_name="error")
    long = long.assign(kind=long["kind"].map(dict(zip(("median", "p90"), names, strict=True))))
    y = alt.Y("operator:N", sort=order, title=None, axis=alt.Axis(grid=True))
    scale = alt.Scale(domain=[0, float(frame["p90"].max()) * 1.08 or 1.0], nice=True)
    x = alt.X(
        "error:Q",
        title="error of the fit on shapes it has not seen",
        axis=alt.Axis(format=".0%", tickCount=8),
        scale=scale,
    )
    rule = alt.Chart(data(frame)).mark_rule(color="#9A9A9A", strokeWidth=2)
    rule = rule.encode(x=alt.X("median:Q", scale=scale), x2="p90:Q", y=y)
    dots = alt.Chart(data(long)).mark_point(size=85, filled=True, opacity=1)
    dots = dots.encode(
        x=x,
        y=y,
        color=alt.Color("kind:N", scale=alt.Scale(domain=names, range=["#0072B2", "#E69F00"]), legend=legend(names)),
        shape=alt.Shape("kind:N", scale=alt.Scale(domain=names, range=["circle", "square"]), legend=legend(names)),
        tooltip=["operator:N", "kind:N", alt.Tooltip("error:Q", format=".1%")],
    )
    chart = alt.layer(rule, dots).properties(height=bar_height(len(order)))
    return finished(chart, description="Median and 90th percentile of the calibration's errors by operator")
