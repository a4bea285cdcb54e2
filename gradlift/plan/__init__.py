"""Plans: from the gradients that probes have seen to an exponent for every component.

Pure: graphs, histograms, evidence and plans are plain data, the same on every rank and in every
framework. ``planner.choose`` makes a plan, ``adaptive_policy`` decides when.
"""

from gradlift.plan.evidence import Evidence
from gradlift.plan.fewest_cuts import Interval
from gradlift.plan.graph import Component, Cut, Graph
from gradlift.plan.histogram import BINS, Histogram
from gradlift.plan.plan import ActiveCut, Plan, PlannedComponent
from gradlift.plan.planner import choose

__all__ = [
    "BINS",
    "ActiveCut",
    "Component",
    "Cut",
    "Evidence",
    "Graph",
    "Histogram",
    "Interval",
    "Plan",
    "PlannedComponent",
    "choose",
]
