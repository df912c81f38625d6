"""The paper's ablations run again: every row of a table under the same budget, judged, on one page."""
