"""The picture is one that programs read, and its curves say what was simulated."""

import math
from xml.etree import ElementTree as ET

from headrace_router.simulate.svg import picture

SVG = "{http://www.w3.org/2000/svg}"


def test_each_policy_has_a_curve_that_only_rises() -> None:
    """Refused requests keep a curve below the top; names are escaped."""
    found = ET.fromstring(picture({"a<b": [0.1, 1.0, 10.0], "late": [5.0, math.inf]}, "x & y"))
    curves = [one.attrib["points"].split() for one in found.iter(f"{SVG}polyline")]
    assert len(curves) == 2
    for curve in curves:
        points = [tuple(map(float, point.split(","))) for point in curve]
        assert points == sorted(points, key=lambda point: (point[0], -point[1]))
    heights = [float(curve[-1].split(",")[1]) for curve in curves]
    assert heights[0] < heights[1]
    assert {"a<b", "x & y"} <= {one.text for one in found.iter(f"{SVG}text")}


def test_nothing_served_is_drawn_too() -> None:
    """An empty curve, not an error."""
    assert ET.fromstring(picture({"none": [math.inf]}, "t")) is not None
