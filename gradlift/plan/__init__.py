"""From what a probe saw to an exponent for every component of the graph, and from step to step.

Pure: histograms, graphs and plans are plain data, the same on every rank and in every framework.
``choose`` in ``planner`` makes a plan; ``pilot`` decides when to look and what to do between looks.
"""

from gradlift.plan.forecast import growth, predict
from gradlift.plan.graph import Component, Cut, Graph
from gradlift.plan.histogram import BINS, Histogram
from gradlift.plan.plan import ActiveCut, Plan, PlannedComponent
from gradlift.plan.planner import choose
from gradlift.plan.potential import Interval

__all__ = [
    "BINS",
    "ActiveCut",
    "Component",
    "Cut",
    "Graph",
    "Histogram",
    "Interval",
    "Plan",
    "PlannedComponent",
    "choose",
    "growth",
    "predict",
]
